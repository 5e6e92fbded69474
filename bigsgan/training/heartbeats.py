"""Heartbeats of ranks, and what they tell of a run that hangs: which ranks, where, and who waits for them."""

from __future__ import annotations

import sys
import traceback
from typing import NamedTuple

from bigsgan.runtime.roster import MOST_NAMED, holds, named

_WAITING_IN = ("torch/distributed", "deepspeed/comm", "bigsgan/runtime/comm", "bigsgan/engines/pipeline/transport")
_REMEDY = "; see the stacks in the ranks' logs; if the run was only slow, raise hang_timeout_seconds"


class Beat(NamedTuple):
    """A rank's heartbeat."""

    number: int  # grows as long as the process lives
    progress: int  # number of phases so far
    phase: str  # the current phase
    place: str  # innermost line of the main thread
    waits: bool  # whether that line waits for other ranks
    host: str  # name of the process's host
    # the phase that it waits for and the ranks that compute it; None if it waits for no particular ranks
    awaited: tuple[str, list[int]] | None = None


def describe(before: dict[int, Beat], after: dict[int, Beat], timeout: float, world_size: int) -> str:
    """Return one line that names the hanging ranks, and where they hang, after ``timeout`` seconds without progress.

    The line ends with the ranks that wait for these, and their phases. Beats are given by rank; every live process
    beats between ``before`` and ``after``. There are none if the board does not answer.
    """
    silent = [rank for rank in range(world_size) if rank not in after or before.get(rank) == after[rank]]
    text = f"no progress for {timeout:.0f} s: "
    if not after:  # rank 0 hosts the store, or under torchrun its launcher does
        return f"{text}{named([0])} does not answer, nor does the store that it or its launcher hosts{_REMEDY}"
    if silent:
        last = after.get(silent[0])
        where = f", last seen in phase '{last.phase}' on {last.host}" if last else ""
        does = "does" if len(silent) == 1 else "do"
        return f"{text}{named(silent)} {does} not answer{where}{waiting(after, silent)}{_REMEDY}"
    answering = list(after)
    shown = _behind(after) or [rank for rank in answering if not after[rank].waits]
    shown = shown or [rank for rank in answering if after[rank].awaited is None] or answering
    parts = []
    for place in dict.fromkeys((after[rank].phase, after[rank].place) for rank in shown):
        there = [rank for rank in shown if (after[rank].phase, after[rank].place) == place]
        parts.append(f"{named(there)} in phase '{place[0]}' at {place[1]} on {after[there[0]].host}")
    return text + "; ".join(parts[:MOST_NAMED]) + waiting(after, shown) + _REMEDY


def _behind(beats: dict[int, Beat]) -> list[int]:
    """Return ranks with fewer phases than others that hold the same network; only G's ranks sample, for example."""
    found = []
    for network in dict.fromkeys(map(holds, beats)):
        progress = {rank: beat.progress for rank, beat in beats.items() if holds(rank) == network}
        least = min(progress.values())
        if least < max(progress.values()):
            found += [rank for rank, num in progress.items() if num == least]
    return sorted(found)


def waiting(beats: dict[int, Beat], ranks: list[int]) -> str:
    """Say which ranks wait for ``ranks``, and for which phase."""
    by_phase: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        if rank not in ranks and beat.awaited and not set(beat.awaited[1]).isdisjoint(ranks):
            by_phase.setdefault(beat.awaited[0], []).append(rank)
    them = "it" if len(ranks) == 1 else "them"
    waiting = [f"; {named(o)} wait{'s' * (len(o) == 1)} for {them} in '{phase}'" for phase, o in by_phase.items()]
    return "".join(waiting)


def innermost(thread: int) -> tuple[str, bool]:
    """Return the current line of a thread, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "the end", False
    path, line, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    files = [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
    waits = any(part in file for file in files for part in _WAITING_IN)
    return f"{'/'.join(path.split('/')[-2:])}:{line} ({name})", waits
