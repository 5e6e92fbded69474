"""Copies of a run's state in host memory, which are written while training continues."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.checkpoint.entries import ObjectCollectives, StateShard
from bigsgan.checkpoint.reader import tensor_name
from bigsgan.errors import counted
from bigsgan.runtime import memory
from bigsgan.runtime.collective_errors import compared

_MOST = 0.9
"""The copies' largest share of a host's free memory: the rest is for loading processes and later allocations."""

Parts = dict[str, list[StateShard]]
"""This rank's parts of each entry."""


class _Need(NamedTuple):
    """The bytes that one rank would allocate, and those that are free on its host, None if unknown."""

    host: str
    num_bytes: int
    free: int | None


class StateCopies:
    """Copies that are kept from save to save, as it takes long to allocate pinned memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def refusal(self, parts: Parts, ranks: ObjectCollectives) -> str | None:
        """Say why the copies would not fit into the memory of some host. A collective.

        Returns:
            The end of a sentence, the same on all ranks; None if the copies fit, or are allocated already.
        """
        new = (part.values for _, part in self._new(parts))
        needed = sum(memory.pinned_bytes(values.nbytes) if values.is_cuda else values.nbytes for values in new)
        if not ranks.any_rank(needed > 0):
            return None
        return compared(ranks, _Need(socket.gethostname(), needed, memory.free_host_bytes()), _problem)

    def copied(self, parts: Parts) -> Parts:
        """Copy this rank's parts over the copies of the save before."""
        for name, part in self._new(parts):
            values = part.values
            self._kept[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        waits = False
        for entry, live in parts.items():
            for part in live:
                self._kept[tensor_name(entry, part)].copy_(part.values.detach(), non_blocking=True)
                waits |= part.values.is_cuda
        if waits:
            torch.cuda.current_stream().synchronize()
        return {
            entry: [part._replace(values=self._kept[tensor_name(entry, part)]) for part in live]
            for entry, live in parts.items()
        }

    def _new(self, parts: Parts) -> Iterator[tuple[str, StateShard]]:
        """Yield the parts for which no copy of their shape is kept yet, with the names of their copies."""
        for entry, live in parts.items():
            for part in live:
                kept = self._kept.get(name := tensor_name(entry, part))
                if kept is None or kept.shape != part.values.shape:
                    yield name, part


def _problem(needs: Sequence[_Need]) -> str | None:
    for host in sorted({need.host for need in needs}):
        here = [need for need in needs if need.host == host]
        num_bytes = sum(need.num_bytes for need in here)
        free = min((need.free for need in here if need.free is not None), default=None)
        if free is not None and num_bytes > _MOST * free:
            copies = f"copies of the state of {counted(len(here), 'rank')} take {memory.size(num_bytes)} on {host}"
            return f"{copies}, where {memory.size(free)} are free"
    return None
