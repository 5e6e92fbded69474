"""Messages between neighbouring stages.

Each network has a channel for each direction, with a process group of its own: a device that sends forward while its
neighbour sends back would else, on one NCCL communicator, leave both waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.engines.pipeline.partition import TensorSpec
from bigsgan.placement import Placement

_TAGS = 1 << 15


def open_channels(placement: Placement, rank: int, device: torch.device) -> tuple[Channel, Channel]:
    """Open the channels of a network, to the next stage and back. Every rank calls this."""
    stage, replica = placement.stage(rank), placement.replica(rank)
    neighbours = [
        placement.rank(other, replica) if 0 <= other < placement.num_stages else None
        for other in (stage - 1, stage + 1)
    ]
    groups: list[Any] = []  # torch types a group that this rank is not in as a number
    for _ in range(2):
        for of_replica in range(placement.num_replicas):
            ranks = [placement.rank(s, of_replica) for s in range(placement.num_stages)]
            group = dist.new_group(ranks)
            if of_replica == replica:
                groups.append(group)
    before, after = neighbours
    channels = Channel(groups[0], before, after, device), Channel(groups[1], after, before, device)
    for channel in channels:
        channel.greet(sends_first=stage % 2 == 0)
    return channels


class Channel:
    """One direction, as this rank sees it: messages are received in the order in which they were sent.

    Attributes:
        bytes_sent: Since the start.
    """

    def __init__(self, group: dist.ProcessGroup, source: int | None, target: int | None, device: torch.device) -> None:
        self.bytes_sent = 0
        self._group, self._source, self._target, self._device = group, source, target, device
        self._num_sent = self._num_expected = 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._expected: deque[list[tuple[Any, Tensor]]] = deque()

    def greet(self, sends_first: bool) -> None:
        """Exchange a number with both neighbours.

        NCCL sets up a connection when it is first used, and waits for the other side: neighbours do so now, one sending
        while the other receives, and not in the middle of a program.
        """
        number = torch.zeros(1, device=self._device)
        for sends in (sends_first, not sends_first):
            if sends and self._target is not None:
                dist.send(number, self._target, group=self._group)
            elif not sends and self._source is not None:
                dist.recv(number, self._source, group=self._group)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for it to arrive."""
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, self._target, group=self._group, tag=self._num_sent % _TAGS)
            self._under_way.append((work, tensor))  # its memory has to stay
            self._num_sent += 1
            self.bytes_sent += tensor.numel() * tensor.element_size()

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Prepare for the message that comes next after those expected already."""
        message = []
        for spec in specs:
            tensor = spec.empty(self._device)
            work = dist.irecv(tensor, self._source, group=self._group, tag=self._num_expected % _TAGS)
            message.append((work, tensor))
            self._num_expected += 1
        self._expected.append(message)

    def receive(self) -> list[Tensor]:
        """Wait for the oldest expected message."""
        message = self._expected.popleft()
        for work, _ in message:
            work.wait()
        return [tensor for _, tensor in message]
