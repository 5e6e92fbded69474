"""Messages between neighbouring stages.

Each pipeline has two process groups: in one the even stages send and the odd ones receive, in the other the reverse. On
an NCCL communicator in which a rank did both, a message could wait behind one that is expected later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.config.placement import Placement
from bigsgan.engines.pipeline.partition import TensorSpec
from bigsgan.runtime.division import partition

MESSAGES = "messages"
"""Description of process groups that carry messages, and no collectives."""

_TAGS = 1 << 15


@lru_cache
def _arrivals(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def arriving(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a rank gets ready to receive: beside what the device computes, into memory of its own.

    A message does not wait for what the device was given to compute before, as it would in the stream of that. This
    stream computes nothing, so all channels share it.
    """
    return torch.cuda.stream(_arrivals(device)) if device.type == "cuda" else nullcontext()


def arrived(tensor: Tensor) -> Tensor:
    """Take over a tensor that was made while ``arriving``: it is used behind that, and freed behind its use."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_stream(_arrivals(tensor.device))  # which may have filled it, where kernels are deterministic
        tensor.record_stream(stream)
    return tensor


def open_channels(placement: Placement, rank: int, device: torch.device) -> tuple[Channel, Channel]:
    """Open the channels of a network, to the next stage and back. Every rank calls this."""
    stage, replica = placement.stage(rank), placement.replica(rank)
    pipelines = placement.pipelines()
    groups = [partition(pipelines, MESSAGES) for _ in range(2)]  # of messages from even stages, and from odd ones

    def link(other: int, source: int) -> Link | None:
        within = 0 <= other < placement.num_stages
        return Link(groups[source % 2], placement.rank(other, replica)) if within else None

    channels = [Channel(link(stage - step, stage - step), link(stage + step, stage), device) for step in (1, -1)]
    for channel in channels:
        channel.greet(sends_first=stage % 2 == 0)
    return channels[0], channels[1]


class Link(NamedTuple):
    """Another rank, and the process group for messages to it or from it."""

    group: Any
    rank: int


class Channel:
    """This rank's end of one direction; messages are received in the order in which they were sent.

    Attributes:
        bytes_sent: Bytes sent since the start.
    """

    def __init__(self, source: Link | None, target: Link | None, device: torch.device) -> None:
        self.bytes_sent = 0
        self._source, self._target, self._device = source, target, device
        self._num_sent = self._num_expected = 0
        self._under_way: list[tuple[Any, Tensor]] = []
        self._arriving: list[Any] = []
        self._expected: deque[list[tuple[Any, Tensor]]] = deque()

    def greet(self, sends_first: bool) -> None:
        """Exchange a number with both neighbours.

        NCCL sets up a connection at its first use, and waits for the other side. So neighbours connect now, one sending
        while the other receives, and not in the middle of a program.
        """
        number = torch.zeros(1, device=self._device)
        for sends in (sends_first, not sends_first):
            if sends and self._target is not None:
                dist.send(number, self._target.rank, group=self._target.group)
            elif not sends and self._source is not None:
                dist.recv(number, self._source.rank, group=self._source.group)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for it to arrive."""
        assert self._target is not None
        self._under_way = [(work, tensor) for work, tensor in self._under_way if not work.is_completed()]
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, self._target.rank, group=self._target.group, tag=self._num_sent % _TAGS)
            self._under_way.append((work, tensor))  # keeps the tensor's memory
            self._num_sent += 1
            self.bytes_sent += tensor.numel() * tensor.element_size()

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Prepare to receive the message that follows those expected already."""
        with arriving(self._device):
            self.expect_into([spec.empty(self._device) for spec in specs])

    def expect_into(self, tensors: Sequence[Tensor]) -> None:
        """Prepare to receive the next message into these tensors; call it while ``arriving``, as these are made."""
        assert self._source is not None
        message = []
        for tensor in tensors:
            work = dist.irecv(tensor, self._source.rank, group=self._source.group, tag=self._num_expected % _TAGS)
            message.append((work, tensor))
            self._num_expected += 1
        self._expected.append(message)

    def receive(self) -> list[Tensor]:
        """Wait for the oldest expected message."""
        message = self._expected.popleft()
        self._arriving = [work for work, _ in message]
        for work in self._arriving:
            work.wait()
        if self._device.type == "cpu":  # on other devices the stream waits, not the host
            self._arriving = []
        return [arrived(tensor) for _, tensor in message]

    def awaits(self) -> bool:
        """Whether this rank waits for a message that has not arrived; any thread may ask."""
        return not all(work.is_completed() for work in self._arriving)

    def settle(self) -> None:
        """Wait until all sent messages have arrived, and free them; gloo completes a send only when asked."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
