"""What a rank asks its device or the other ranks, and learns later, so that nobody waits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.runtime import comm, division


class HostCopy:
    """A number on its way from the device to the host, behind the work that is queued.

    Attributes:
        is_known: Whether the host had it from the beginning.
    """

    def __init__(self, number: Tensor | float) -> None:
        """Send it; a tensor has one element."""
        self.is_known = not isinstance(number, Tensor)
        self._number, self._event = torch.as_tensor(number), None
        if self._number.is_cuda:
            self._number = self._number.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float:
        """Wait until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._number.item())


class Agreement:
    """Whether any rank raises a flag: asked in every update, and answered one update later, so that no rank waits."""

    def __init__(self) -> None:
        self._flags = [torch.zeros(1, device=comm.device()), torch.ones(1, device=comm.device())]
        self._asked: tuple[dist.Work, HostCopy] | None = None

    def any_rank(self, flag: bool) -> bool:
        """Submit this rank's flag; return whether any rank's was raised when this was called before. A collective."""
        if comm.world_size() == 1:
            return flag
        answer = False
        if self._asked is not None:
            asked, answered = self._asked
            asked.wait()
            answer = answered.value() > 0
        own = self._flags[flag].clone()
        with division.scope():
            work = dist.all_reduce(own, async_op=True)
        assert work is not None
        if own.is_cuda:
            work.wait()  # lets the stream wait, and not the host
        self._asked = work, HostCopy(own)
        return answer
