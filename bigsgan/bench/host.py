"""What Linux's /proc tells: a process's peak memory, and the processor's name."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from contextlib import suppress
from pathlib import Path

from bigsgan.runtime.memory import resident_bytes

_SAMPLING_SECONDS = 0.02
_PROC = Path("/proc")
_FORGET_PEAK = "5"


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


def processor() -> str:
    """Name of this machine's processor; empty if the system does not tell it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", (_PROC / "cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return ""
