"""Optimizer state on NVMe: checks of this machine, and a directory for each rank's swap files.

DeepSpeed names swap files only after the numbers of parameters and ranks, so two runs with the same path would
overwrite each other's weights. It also leaves the files behind. deepspeed/internals.py reads and writes them between
updates.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deepspeed.ops.op_builder import AsyncIOBuilder

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.engines.optimizer import num_state_tensors
from bigsgan.errors import UserError, at_end
from bigsgan.runtime.locking import hold

_ALIGNMENT = 1024
"""Sizes of swap files are multiples of it (DeepSpeed 0.19.8, swap_tensor/utils.py: AIO_ALIGNED_BYTES)."""
_SECTION = "zero_optimization.offload_optimizer"


def check_nvme(network: str, file: DeepSpeedFile) -> None:
    """Raise UserError if DeepSpeed's op for asynchronous input and output cannot be built."""
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"engines.{network}.ds_config",
            str(file.path),
            "sets NVMe offload, which needs libaio and a C++ compiler, which DeepSpeed does not find here",
            "install libaio-dev (libaio-devel) and g++, or set the offload device to cpu, as "
            "ds_configs/zero3_offload.json does",
        )


def num_swap_buffers(file: DeepSpeedFile, optimizer: Optimizer) -> int:
    """Return the number of buffers: weights, gradients and the optimizer's tensors of each sub-group in memory.

    With ``pipeline_read`` the next sub-group is in memory too, with ``pipeline_write`` the last one.

    Raises:
        UserError: The file gives fewer buffers; DeepSpeed would stop in the middle of an update.
    """
    section = file.content["zero_optimization"]["offload_optimizer"]
    num_sub_groups = 1 + bool(section.get("pipeline_read")) + bool(section.get("pipeline_write"))
    needed = (2 + num_state_tensors(optimizer, file)) * num_sub_groups
    given = int(section.get("buffer_count", needed))
    if given < needed:
        where = f"{file.path}: {_SECTION}.buffer_count"
        raise UserError(where, given, f"must be at least {needed} with {optimizer.kind}", f"set {needed}, or remove it")
    return given


def open_swap_directory(file: DeepSpeedFile, network: str, rank: int) -> tuple[Path, Callable[[], None]]:
    """Make ``bigsgan/<network>/rank<n>`` under ``nvme_path``, for one engine on one rank.

    Returns:
        The directory, emptied of a killed run's files, and the function that removes it, as does the process's end.

    Raises:
        UserError: Another run uses it, or its file system does not support DeepSpeed's way of writing.
    """
    where = f"{file.path}: {_SECTION}.nvme_path"
    nvme_path = file.content["zero_optimization"]["offload_optimizer"]["nvme_path"]
    path = Path(nvme_path).absolute() / "bigsgan" / network / f"rank{rank:05d}"
    if not Path(nvme_path).is_dir():
        raise UserError(where, nvme_path, "must be a directory", "give one on a local NVMe drive")
    with ExitStack() as resources:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            resources.callback(hold(path.with_suffix(".lock"), where, nvme_path, "give each run its own directory"))
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            resources.callback(shutil.rmtree, path, ignore_errors=True)
            _write_directly(path / "probe")
        except OSError as error:
            problem = f"must support O_DIRECT writes in blocks of {_ALIGNMENT} bytes, as DeepSpeed does"
            raise UserError(where, nvme_path, problem, "give a directory on a local NVMe drive", str(error)) from None
        kept = resources.pop_all()
    at_end(kept.close)
    return path, kept.close


def _write_directly(path: Path) -> None:
    """Write as DeepSpeed does, but check the outcome, which DeepSpeed ignores."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, _ALIGNMENT) as block:
            os.write(descriptor, block)
    finally:
        os.close(descriptor)
    path.unlink()
