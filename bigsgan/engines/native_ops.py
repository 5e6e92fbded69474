"""Ops that DeepSpeed compiles on first use: only where a DeepSpeed file asks for them, and never waiting for ever.

A build that was killed leaves a lock file behind, and every later process then waits for it without a word
(torch.utils.file_baton). Here the lock is looked at first, one rank of each host builds, and the others say that they
wait.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils.cpp_extension import _get_build_directory

from bigsgan import comm
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.errors import UserError

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


def build_cpu_adam() -> type[DeepSpeedCPUAdam]:
    """Compile DeepSpeed's Adam for offloaded state, once on each host, and return its class.

    Raises:
        UserError: A killed build left its lock behind, or there is no compiler.
    """
    name = CPUAdamBuilder.NAME
    refuse_stale_lock(Path(_get_build_directory(name, verbose=False)))
    if comm.local_rank() == 0:
        _log.warning("building DeepSpeed's %s (minutes, once on each machine)", name)
        _load(name)
    else:
        _log.info("waiting while local rank 0 builds DeepSpeed's %s", name)
    comm.barrier()
    return DeepSpeedCPUAdam


def refuse_stale_lock(build_directory: Path, grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait while somebody builds in ``build_directory``; raise UserError where a killed build left its lock there.

    Args:
        build_directory: Of one op, under TORCH_EXTENSIONS_DIR.
        grace_seconds: How long a lock may stand without a builder on this host, which a build that begins needs.
    """
    lock = build_directory / "lock"
    unattended_since = time.monotonic()
    said = False
    while lock.exists():
        if _is_building(build_directory):
            unattended_since = time.monotonic()
            if not said:
                _log.warning("waiting for another process that builds in %s", build_directory)
                said = True
        elif time.monotonic() - unattended_since > grace_seconds:
            raise UserError(
                str(lock),
                None,
                "was left by a build that was killed, and every run would wait for it",
                f"remove it, unless another host is building there: rm {lock}",
            )
        time.sleep(POLL_SECONDS)


def refuse_nvme(network: str, file: DeepSpeedFile) -> None:
    """Raise UserError: checkpoints and the average read the float32 weights, which NVMe offload keeps swapped out."""
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    has_libaio = builder is not None and builder.is_compatible(verbose=False)
    problem = (
        "which checkpoints cannot read yet" if has_libaio else "which needs libaio, and checkpoints cannot read yet"
    )
    raise UserError(
        f"engines.{network}.ds_config",
        str(file.path),
        f"asks for NVMe offload, {problem}",
        "set the offload device to cpu, as ds_configs/zero3_offload.json does",
    )


def _load(name: str) -> None:
    try:
        CPUAdamBuilder().load(verbose=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            "zero_force_ds_cpu_optimizer",
            True,
            f"needs DeepSpeed's {name}, which does not build here ({error})",
            "install a C++ compiler and ninja, or set it to false for torch's own Adam",
        ) from None


def _is_building(directory: Path) -> bool:
    """Whether a process of this host works in ``directory`` (ninja and compilers do)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).resolve() == directory.resolve():
                return True
        except OSError:
            continue
    return False
