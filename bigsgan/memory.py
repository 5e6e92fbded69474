"""Running out of memory, told from other faults and turned into a message for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bigsgan.errors import UserError

# torch has a type of its own for what its allocator of a device misses; the rest are RuntimeErrors that say: its
# allocator on the host, a device without room for CUDA itself, and cuBLAS's and cuDNN's own workspaces.
_TEXTS = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


@contextmanager
def naming_remedy(where: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a UserError.

    Args:
        where: What was going on, behind 'ran out'.
        remedy: What to do about it.
    """
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
