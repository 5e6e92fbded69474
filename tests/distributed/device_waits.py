"""Ranks on CPUs that wait for their device as those on GPUs may: before each task, for every message under way.

On NCCL a receive is a kernel that ends when the other rank has sent. What waits for the device waits for it too: the
first use of a kernel or of a communicator, cuDNN's search, memory that is freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from bigsgan.engines.executor import Executor
from bigsgan.runtime import comm
from tests.distributed import scenarios

SECONDS = 60
"""Until ranks that hang are ended; the updates take a few."""


class _Arriving:
    """A receive that can be waited for more than once."""

    def __init__(self, work: Any) -> None:
        self._work, self._has_come = work, False

    def is_completed(self) -> bool:
        return self._has_come or self._work.is_completed()

    def wait(self) -> None:
        if not self._has_come:
            self._work.wait()
            self._has_come = True


@contextmanager
def waits(count: list[int]) -> Iterator[None]:
    """Let each task in the block wait for the device first; ``count`` gets the number of messages at each."""
    receives, compute = dist.irecv, Executor._compute_one
    under_way: list[_Arriving] = []

    def irecv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> _Arriving:
        under_way.append(_Arriving(receives(tensor, src, group=group, tag=tag)))
        return under_way[-1]

    def compute_one(self: Executor, *arguments: Any) -> None:
        count.append(len(under_way))
        for work in under_way:
            work.wait()
        comm.synchronize()
        under_way.clear()
        compute(self, *arguments)

    with mock.patch.object(dist, "irecv", irecv), mock.patch.object(Executor, "_compute_one", compute_one):
        yield


def train(overrides: list[str], ds: dict[str, Any], num_updates: int) -> tuple[dict[str, Any], int]:
    """As ``scenarios.train``, with such waits; and the number of messages that were waited for."""
    count: list[int] = []
    with waits(count):
        return scenarios.uninterrupted(overrides, ds, num_updates), sum(count)


def resumed(overrides: list[str], ds: dict[str, Any], directory: str, num_updates: int) -> dict[str, Any]:
    """As ``scenarios.resumed``, with such waits: its first update has made no images before."""
    with waits([]):
        return scenarios.resumed(overrides, ds, directory, num_updates)
