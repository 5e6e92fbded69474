"""DeepSpeed's own reports, if a DeepSpeed file asks for them: its log of collectives, and its profiles of operations.

DeepSpeed keeps the time of each collective in lists that grow, ends the process with status 0 at one that it has no
formula for, such as all_gather_object, and prints nothing by itself (0.19.8, utils/comms_logging.py). Both networks'
profilers would write to one file, whatever it was before, and end the run where they cannot.
"""

from __future__ import annotations

import io
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed.comm
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from bigsgan.errors import reason
from bigsgan.monitor import NOTICE
from bigsgan.runtime.atomic import write_text
from bigsgan.table import aligned

HEADINGS = ["collective", "bytes", "calls", "ms", "ms a call"]

_log = logging.getLogger(__name__)


class Logged(NamedTuple):
    """Collectives of one name and size on this rank."""

    name: str
    bytes: int  # of the tensors of one of them
    calls: int
    milliseconds: float  # of all of them


_times: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
"""Calls and milliseconds by name and bytes."""


_waited: dict[Path, int] = {}
"""Files of profiles that are not written yet, and the number of the update that they are of."""


def keep_log() -> None:
    """Count the collectives that DeepSpeed logs. Called before an engine is built, whose file switches the log on."""
    comms_logger.append = _append


def _append(raw_name: str, name: str, milliseconds: float, num_bytes: int) -> None:
    found = _times[name, num_bytes]
    found[0] += 1
    found[1] += milliseconds
    if comms_logger.verbose:
        log_dist(f"comm op: {name} | time (ms): {milliseconds:.2f} | bytes: {num_bytes}", [0])


def clear_log() -> None:
    """Count from zero."""
    _times.clear()


def forget_log() -> None:
    """Switch the log off, and forget what it has."""
    comms_logger.enabled = False
    clear_log()
    _waited.clear()


def collectives() -> Any:
    """Return the module whose collectives are used for gradients: DeepSpeed's if it logs them, else torch's."""
    return deepspeed.comm if comms_logger.enabled else dist


def logged() -> list[Logged]:
    """Return what DeepSpeed has logged on this rank."""
    return [Logged(name, size, int(calls), time) for (name, size), (calls, time) in sorted(_times.items())]


def rows(found: Sequence[Logged]) -> list[list[str]]:
    """Return the cells below ``HEADINGS``."""
    return [[n, f"{size:,}", f"{calls:,}", f"{time:.1f}", f"{time / calls:.3f}"] for n, size, calls, time in found]


def summary() -> str:
    """Return a table of what is logged on this rank, and the profiles that were not made; empty if there are none."""
    lines = [
        f"flops_profiler: {path} is not written, as the run ended before update {step} of the network since its start"
        for path, step in _waited.items()
    ]
    if comms_logger.enabled:
        lines += ["comms_logger: collectives of both engines on this rank", *aligned([HEADINGS, *rows(logged())])]
    return "\n".join(lines)


def profile_into(engine: DeepSpeedEngine, network: str, out: Path, prints_times: bool) -> None:
    """Let the engine's profiler, if its file asks for one, write ``flops_<network>.txt`` in the run directory.

    Whatever fails in this is a warning, as the run does not need it. With a profiler, DeepSpeed prints times after each
    micro-batch, as wall_clock_breakdown does; ``prints_times`` says whether the file asks for that, too.
    """
    if not engine.flops_profiler_enabled():
        return
    profiler, path = engine.flops_profiler, out / f"flops_{network}.txt"
    printed, timers = profiler.print_model_profile, engine.timers
    if engine.global_rank == 0:  # where DeepSpeed makes a profile
        _waited[path] = engine.flops_profiler_profile_step()

    def write(**settings: Any) -> None:
        _waited.pop(path, None)
        try:
            with redirect_stdout(io.StringIO()) as text:
                printed(**{**settings, "output_file": None})
            write_text(path, text.getvalue())
        except Exception as error:  # of DeepSpeed's arithmetic, or of the disk
            _log.warning("flops_profiler: %s is not written: %s", path, reason(error, path))
        else:
            _log.log(NOTICE, "flops_profiler: %s", path)

    profiler.print_model_profile = write
    if not prints_times:
        timers.log = lambda names, **settings: [timers(name).reset() for name in names]
