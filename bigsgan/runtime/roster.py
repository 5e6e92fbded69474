"""The ranks of this job: their processes, and the network that each holds if it holds only one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MOST_NAMED = 8
_ENDING_SECONDS = 0.5


class Member(NamedTuple):
    """A rank."""

    host: str  # name of its host
    processes: str  # the process namespace that ``process`` counts in; containers of one host have several
    process: int  # number of its process
    holds: str = ""  # the network that it holds; empty if every rank holds a part of both


_members: Sequence[Member] = ()


def own(holds: str = "") -> Member:
    """Return the member that this process is."""
    return Member(socket.gethostname(), _numbering(), os.getpid(), holds)


def know(members: Sequence[Member]) -> None:
    """Register all ranks, in their order. Until then, and after ``know(())``, no rank is known."""
    global _members
    _members = members


def named(ranks: Sequence[int]) -> str:
    """Name ranks and their networks: ``rank 1 (discriminator)``, ``ranks 0, 1 (generator), 2 (discriminator)``."""
    parts = []
    for network in dict.fromkeys(map(holds, ranks)):
        those = [rank for rank in ranks if holds(rank) == network]
        shown = ", ".join(map(str, those[:MOST_NAMED])) + (", ..." if len(those) > MOST_NAMED else "")
        parts.append(f"{shown} ({network})" if network else shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def holds(rank: int) -> str:
    """Return the network that a rank holds; empty if it holds a part of both, or is not known."""
    return _members[rank].holds if rank < len(_members) else ""


def host(rank: int) -> str:
    """Return the name of a rank's host; empty if it is not known."""
    return _members[rank].host if rank < len(_members) else ""


def gone() -> list[int]:
    """Return the ranks of this host whose processes have ended. Any thread may call this."""
    here = socket.gethostname(), _numbering()
    local = [rank for rank, member in enumerate(_members) if (member.host, member.processes) == here]
    return [rank for rank in local if _has_ended(_members[rank].process)]


def gone_soon() -> list[int]:
    """Return ``gone()`` once it has ranks, or after half a second: connections end a moment before their process."""
    until = time.monotonic() + _ENDING_SECONDS
    while not (found := gone()) and _members and time.monotonic() < until:
        time.sleep(_ENDING_SECONDS / 20)
    return found


def any_killed(ranks: Sequence[int]) -> bool:
    """Return whether one of these ``gone`` ranks is known to have ended by a signal."""
    return any(_signal_of(_members[rank].process) for rank in ranks)


def processes(ranks: Sequence[int]) -> str:
    """Return the numbers of the processes of known ranks, as text."""
    return ", ".join(str(_members[rank].process) for rank in ranks[:MOST_NAMED])


def _numbering() -> str:
    try:  # with the boot's id, as the first namespace has the same number on every machine
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: the end of a process cannot be seen
        return ""


def _has_ended(process: int) -> bool:
    """Return whether a process has ended, even if its launcher has not reaped it."""
    try:
        state, *_ = _stat(process)
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except (OSError, IndexError):  # ProcessLookupError: it is ending at this moment
        return True
    return state in "ZX"


def _signal_of(process: int) -> int:
    """Return the number of the signal that ended a process that is not reaped yet; 0 if none is known."""
    try:
        return int(_stat(process)[-1]) & 0x7F
    except (OSError, IndexError, ValueError):
        return 0


def _stat(process: int) -> list[str]:
    """Return a process's fields from its state to its exit status as ``waitpid`` gives it (proc_pid_stat(5))."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
