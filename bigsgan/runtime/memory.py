"""Host memory: how much is free, and a message when memory runs out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from bigsgan.errors import UserError

# torch has a type of its own for what its allocator of a device misses; the rest are RuntimeErrors that say: its
# allocator on the host, a device without room for CUDA itself, and cuBLAS's and cuDNN's own workspaces.
_TEXTS = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


class _Group(NamedTuple):
    """How the kernel names a control group's files, in one of their two versions."""

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
    """A number of bytes as text, in the largest unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1 << 10 * power:
            return f"{num_bytes / (1 << 10 * power):.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process could get: of the machine, and within the limits of its control groups.

    Files that the kernel keeps in memory count as free, as it drops them where memory is asked for. None where the
    system does not say. ``proc`` and ``sys`` are below ``root``.
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


def resident_bytes(process: Path = Path("/proc/self"), peak: bool = False) -> int:
    """Bytes that a process holds in memory, or the most that it has held; 0 where the system does not say."""
    with suppress(OSError, ValueError):
        return _field(process / "status", "VmHWM:" if peak else "VmRSS:") * 1024
    return 0


def _control_groups(root: Path) -> Iterator[tuple[Path, _Group]]:
    """Directories of the groups that this process is in, from its own up."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for group in _GROUPS:
                if group.hierarchy in controllers.split(","):
                    top = root / "sys/fs/cgroup" / group.hierarchy
                    within = Path(path.lstrip("/"))
                    # Within a container the path may be the host's, and its own group the top.
                    yield from ((top / each, group) for each in (within, *within.parents))


def _field(path: Path, name: str) -> int:
    """Number behind a name, in a file with one of each on a line.

    Raises:
        ValueError: There is none.
    """
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")


@contextmanager
def naming_remedy(where: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a UserError; ``where`` follows 'ran out'."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise UserError("memory", None, f"ran out {where}: {cause}", remedy) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _TEXTS)
