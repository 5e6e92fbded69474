"""Ops that DeepSpeed compiles on first use, built only if a DeepSpeed file asks for them, without waiting for ever.

In older versions of torch (2.8) a killed build leaves a lock file behind, and every later process silently waits for it
(torch.utils.file_baton). Here the lock is checked first, one rank of each host builds, and the others log that they
wait.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
from torch.utils import cpp_extension

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import by_each
from bigsgan.runtime.locking import is_held
from bigsgan.runtime.signals import kept_from_children

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.2
_FILE_IS_LOCK = hasattr(cpp_extension, "FileBaton")
"""Whether torch's lock is held as long as its file exists. In torch 2.15 the file stays, and flock holds the lock."""

_log = logging.getLogger(__name__)


class Op(NamedTuple):
    """The ops that DeepSpeed compiles for a field of its file."""

    builder: Callable[[], OpBuilder]  # makes the object that builds them
    names: tuple[str, ...]  # names of these ops, in the order of building
    # parts of the message if they cannot be built
    field: str
    value: object
    remedy: str


CPU_ADAM = Op(
    CPUAdamBuilder,
    (CPUAdamBuilder.NAME,),
    "zero_force_ds_cpu_optimizer",
    True,
    "install a C++ compiler and ninja, or set it to false for torch's own Adam",
)
ASYNC_IO = Op(
    AsyncIOBuilder,
    (PinMemoryBuilder.NAME, AsyncIOBuilder.NAME),
    "zero_optimization.offload_optimizer.device",
    "nvme",
    "install a C++ compiler, ninja and libaio-dev, or set the device to cpu",
)
_built: set[str] = set()
"""The last name of each ``Op`` that was built, on the hosts that need it."""


def build_once(op: Op, needed: bool = True) -> None:
    """Compile ``CPU_ADAM`` or ``ASYNC_IO``, once on each host that needs it. Every rank calls this.

    Raises:
        UserError: A killed build left its lock behind, or a compiler or a library is missing.
    """
    if op.names[-1] not in _built:
        _build(op, needed)
        _built.add(op.names[-1])


def build_for_both(files: Mapping[str, DeepSpeedFile], held: str) -> None:
    """Compile the ops of both networks' files, before each network gets ranks of its own. Every rank calls this.

    If ranks of both networks share a host, one of them builds. Hosts without ranks of a network build nothing for it.

    Args:
        files: DeepSpeed files by network.
        held: The network of this rank.

    Raises:
        UserError: A killed build left its lock behind, or something is missing.
    """
    for op, needs in ((CPU_ADAM, needs_cpu_adam), (ASYNC_IO, lambda file: file.uses_nvme)):
        if any(needs(file) for file in files.values()):
            build_once(op, needs(files[held]))


def refuse_stale_lock(build_directory: Path, grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait while somebody builds in ``build_directory``; raise UserError where a killed build left its lock there.

    Args:
        build_directory: The directory of one op, under TORCH_EXTENSIONS_DIR.
        grace_seconds: How long a lock may exist without a builder on this host, as it does when a build begins.
    """
    lock = build_directory / "lock"
    unattended_since = time.monotonic()
    said = False
    while lock.exists():
        if _FILE_IS_LOCK and not _is_building(build_directory):
            if time.monotonic() - unattended_since > grace_seconds:
                raise UserError(
                    str(lock),
                    None,
                    "is left over from a killed build, and every run would wait for it",
                    f"remove it unless another host is building there: rm {lock}",
                )
        elif _FILE_IS_LOCK or is_held(lock):
            unattended_since = time.monotonic()
            if not said:
                _log.warning("waiting for another process that builds in %s", build_directory)
                said = True
        else:
            return
        time.sleep(POLL_SECONDS)


def builders(file: DeepSpeedFile) -> list[OpBuilder]:
    """Return the builders of the ops that a DeepSpeed file asks for."""
    found: list[OpBuilder] = []
    if needs_cpu_adam(file):
        found.append(CPUAdamBuilder())
    if file.uses_nvme:
        found += [PinMemoryBuilder(), AsyncIOBuilder()]
    return found


def needs_cpu_adam(file: DeepSpeedFile) -> bool:
    """Whether the file asks for DeepSpeed's own Adam on the host."""
    return file.offload_optimizer != "none" and bool(file.content.get("zero_force_ds_cpu_optimizer", False))


def _build(op: Op, needed: bool) -> None:
    """Let the first rank of each host that needs the ops build them; all ranks wait. Every rank calls this."""
    wait_for_all = comm.patient_barrier()
    host, what = socket.gethostname() if needed else None, " and ".join(op.names)
    hosts = comm.from_rank_zero(comm.gather_objects(host))

    def build() -> None:
        try:
            if needed and comm.rank() == hosts.index(host):  # LOCAL_RANK is 0 where a rank sees only its own device
                _load(op, what)
            else:
                _log.info("waiting while the first rank of each host that needs DeepSpeed's %s builds it", what)
        finally:
            wait_for_all()

    by_each(comm, build)


def _load(op: Op, what: str) -> None:
    for name in op.names:
        refuse_stale_lock(Path(cpp_extension._get_build_directory(name, verbose=False)))
    _log.warning("building DeepSpeed's %s (minutes, once on each machine)", what)
    try:
        with kept_from_children():  # a compiler that Ctrl-C ends would look like one that fails
            op.builder().load(verbose=False)
    except Exception as error:  # DeepSpeed has no type for it (op_builder/builder.py)
        problem = f"needs DeepSpeed's {what}, which cannot be built here: {error}"
        raise UserError(op.field, op.value, problem, op.remedy) from None


def _is_building(directory: Path) -> bool:
    """Whether a process of this host works in ``directory`` (ninja and compilers do)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).resolve() == directory.resolve():
                return True
        except OSError:
            continue
    return False
