"""Host memory: how much is free, and a message when memory runs out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from bigsgan.errors import UserError
from bigsgan.runtime import limits

# torch.OutOfMemoryError comes from torch's allocator of a device. Other errors are RuntimeErrors with these texts: from
# torch's allocator on the host, from a device without room for CUDA itself, and from cuBLAS's and cuDNN's workspaces.
_TEXTS = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


class _Group(NamedTuple):
    """The names of a control group's files, in one of the kernel's two versions."""

    hierarchy: str
    limit: str
    usage: str
    inactive: str
    active: str


_GROUPS = (
    _Group("", "memory.max", "memory.current", "inactive_file", "active_file"),
    _Group("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
)


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, in the largest unit that is not larger."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1 << 10 * power:
            return f"{num_bytes / (1 << 10 * power):.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could allocate on this machine, within the limits of its control groups.

    Files that the kernel caches count as free, as it drops them when memory is needed. None if the system does not
    say. ``proc`` and ``sys`` are looked up below ``root``.
    """
    found = []
    with suppress(OSError, ValueError):
        found.append(_field(root / "proc/meminfo", "MemAvailable:") * 1024)
    for directory, group in _control_groups(root):
        with suppress(OSError, ValueError):  # "max", or no limit at this level
            limit, usage = (int((directory / name).read_text()) for name in (group.limit, group.usage))
            cached = sum(_field(directory / "memory.stat", name) for name in (group.inactive, group.active))
            found.append(max(0, limit - usage + cached))
    return min(found, default=None)


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch pins for a tensor: it rounds up to powers of 2 (2.15, CachingHostAllocator.h)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def resident_bytes(process: Path = Path("/proc/self"), peak: bool = False) -> int:
    """Return the bytes that a process holds in memory, or the most that it has held; 0 if the system does not say."""
    with suppress(OSError, ValueError):
        return _field(process / "status", "VmHWM:" if peak else "VmRSS:") * 1024
    return 0


def _control_groups(root: Path) -> Iterator[tuple[Path, _Group]]:
    """Yield the directories of this process's control groups, from its own up."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for group in _GROUPS:
                if group.hierarchy in controllers.split(","):
                    top = root / "sys/fs/cgroup" / group.hierarchy
                    within = Path(path.lstrip("/"))
                    # Inside a container the path may be the host's, while the container's own group is at the top.
                    yield from ((top / each, group) for each in (within, *within.parents))


def _field(path: Path, name: str) -> int:
    """Return the number after a name, in a file with one name and number on each line.

    Raises:
        ValueError: The file does not have the name.
    """
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")


@contextmanager
def naming_remedy(where: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a UserError; ``where`` follows 'is not enough'."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if limit := limits.reached(error):
            raise limit from error
        if not _is_out_of_memory(error):
            raise
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise UserError("memory", None, f"is not enough {where}: {cause}", remedy) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _TEXTS)
