"""What Linux's /proc tells: a process's peak memory, the time that it waits for disks, and the processor's name."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bigsgan.runtime.memory import resident_bytes

_SAMPLING_SECONDS = 0.02
_PROC = Path("/proc")
_FORGET_PEAK = "5"
_DELAY_FIELD = 42
"""Field of /proc/PID/stat: ticks that the main thread waited for block devices (man 5 proc, delayacct_blkio_ticks)."""


def return_unused() -> None:
    """Collect garbage, and return freed memory to the system, so that it does not count in a later peak."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class HostPeak:
    """The peak memory of this process from here on, in bytes; sampled if the kernel cannot reset its own count.

    Attributes:
        before: Bytes held at the beginning.
    """

    def __init__(self, process: Path = _PROC / "self") -> None:
        self._process, self._closed, self._sampler = process, threading.Event(), None
        self.before = self._largest = resident_bytes(process)
        try:
            (process / "clear_refs").write_text(_FORGET_PEAK)
        except OSError:
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()

    def peak(self) -> int:
        """Return the peak so far."""
        if self._sampler is None:
            return resident_bytes(self._process, peak=True)
        return max(self._largest, resident_bytes(self._process))

    def close(self) -> None:
        """End the sampling."""
        self._closed.set()
        if self._sampler is not None:
            self._sampler.join()

    def _sample(self) -> None:
        while not self._closed.wait(_SAMPLING_SECONDS):
            self._largest = max(self._largest, resident_bytes(self._process))


def disk_wait_seconds(proc: Path = _PROC) -> float | None:
    """Seconds that the main threads of this process and its children have waited for block devices, summed.

    Returns:
        None if the kernel does not count them (sysctl kernel.task_delayacct).
    """
    with suppress(OSError):
        if (proc / "sys/kernel/task_delayacct").read_text().strip() == "0":
            return None
        ticks = sum(_delay_ticks(proc / pid / "stat") for pid in ("self", *_children(proc)))
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def _children(proc: Path) -> Iterable[str]:
    """Ids of the processes that this one has started, such as loading processes."""
    for task in (proc / "self/task").glob("*/children"):
        with suppress(OSError):
            yield from task.read_text().split()


def _delay_ticks(stat: Path) -> int:
    with suppress(OSError, IndexError):
        words = stat.read_text().rpartition(")")[2].split()  # the process's name, in brackets, may contain blanks
        return int(words[_DELAY_FIELD - 3])
    return 0


def processor() -> str:
    """Name of this machine's processor; empty if the system does not tell it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", (_PROC / "cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return ""
