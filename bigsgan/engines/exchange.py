"""Takes images from the ranks where G's outputs arise to those that read D's inputs, and gradients back.

Each micro-batch is sent as soon as it is computed, point to point, each sample once to each rank that reads it.

All messages go through one process group of all ranks. Over NCCL it has one communicator, on which a rank's messages go
one after the other, so each rank sends and receives in the one order of ``messages``.

Shapes: N samples of a micro-batch over all replicas, of which replica r of R holds the r-th N / R.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.config import RunPlan
from bigsgan.engines.phases import Phase, Task
from bigsgan.engines.pipeline.transport import MESSAGES, Channel, Link, arrived, arriving
from bigsgan.runtime import comm


def build_exchange(plan: RunPlan) -> Exchange | None:
    """The exchange of a run; None where images arise on the very ranks that read them. Every rank calls this."""
    if not plan.images_travel:
        return None
    size = plan.recipe.data.network_size
    shape, parts = (plan.recipe.judged_channels, *size), plan.recipe.objective.adversarial.parts
    makers, judges = plan.placement("generator").output_ranks(), plan.placement("discriminator").input_ranks()
    group = dist.new_group(group_desc=MESSAGES)
    # The loss is a mean over the samples of a replica, of which G's has another number than D's.
    gradients = Route(group, judges, makers, (parts * shape[0], *size), len(makers) / len(judges))
    return Exchange(Route(group, makers, judges, shape), gradients)


class Arrival(NamedTuple):
    """A message that a task waits for."""

    source: int  # number of the phase whose output it is
    num_samples: int  # of a micro-batch of it, that this rank reads


class Exchange:
    """Both directions, as this rank sees them."""

    def __init__(self, images: Route, gradients: Route) -> None:
        self._images, self._routes = images, {"generator": images, "discriminator": gradients}
        self._received: tuple[str, Route] | None = None

    def arrivals(self, phases: Sequence[Phase], tasks: Iterable[Task]) -> dict[Task, Arrival]:
        """What the tasks of this rank wait for: each micro-batch, before the first that reads it."""
        found: dict[Task, Arrival] = {}
        seen: set[tuple[int, int]] = set()
        for task in tasks:
            phase = phases[task.phase]
            source = {"forward": phase.images_from, "backward": phase.grads_from}.get(task.kind)
            if source is None or not phases[source].sends or (source, task.micro_batch) in seen:
                continue
            seen.add((source, task.micro_batch))
            if self._routes[phases[source].network].receives:
                reads_images = task.kind == "forward"
                num = self._images.of_target(phases[source].num_samples) if reads_images else phase.num_samples
                found[task] = Arrival(source, num)
        return found

    def expect(self, phase: Phase, num_samples: int) -> None:
        """Prepare for the next micro-batch of a phase's outputs, of which this rank reads ``num_samples``."""
        self._routes[phase.network].expect(num_samples)

    def receive(self, phase: Phase) -> Tensor:
        """Wait for the oldest micro-batch that was expected of such a phase."""
        route = self._routes[phase.network]
        self._received = phase.label, route
        return route.receive()

    def awaited(self) -> tuple[str, list[int]] | None:
        """What this rank waits for, if it does: the phase's label, and the ranks; any thread may ask."""
        if self._received is None:
            return None
        label, route = self._received
        ranks = route.awaited()
        return (label, ranks) if ranks else None

    def send(self, phase: Phase, output: Tensor) -> None:
        """Send a micro-batch of a phase's outputs, without waiting for it to arrive."""
        self._routes[phase.network].send(output)

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for route in self._routes.values():
            route.settle()


class Share(NamedTuple):
    """A part of the samples of a replica: [first, last) of it."""

    first: float
    last: float

    def rows(self, num_samples: int) -> slice:
        """Which of its samples."""
        return slice(round(self.first * num_samples), round(self.last * num_samples))


class _End(NamedTuple):
    """A rank of a route, maybe this one: what both hold of this rank's samples, and the way to another."""

    rank: int
    share: Share
    channel: Channel | None


class Route:
    """One direction: from one network's replicas to the other's.

    Attributes:
        receives: Whether this rank is one of the targets.
    """

    def __init__(
        self, group: Any, sources: Sequence[int], targets: Sequence[int], shape: tuple[int, ...], scale: float = 1
    ) -> None:
        """Open the channels of this rank. Every rank calls this.

        Args:
            group: The process group of all ranks that carries the messages.
            sources: Ranks that hold the samples, by replica.
            targets: Ranks that read them, by replica.
            shape: Of a sample.
            scale: Factor on what is sent.
        """
        self._shape, self._scale, self._device, me = shape, scale, comm.device(), comm.rank()
        self.receives, self._replicas = me in targets, (len(sources), len(targets))
        self._to: list[_End] = []
        self._from: list[_End] = []
        self._kept: deque[Tensor] = deque()  # of this rank to itself
        self._expected: deque[Tensor] = deque()
        for source, target, given, taken in messages(sources, targets):
            if me == source:
                channel = None if me == target else self._open(None, Link(group, target))
                self._to.append(_End(target, given, channel))
            if me == target:
                channel = None if me == source else self._open(Link(group, source), None)
                self._from.append(_End(source, taken, channel))

    def _open(self, source: Link | None, target: Link | None) -> Channel:
        channel = Channel(source, target, self._device)
        channel.greet(sends_first=True)
        return channel

    def of_target(self, num_samples: int) -> int:
        """How many samples a target reads where a source holds ``num_samples``."""
        return num_samples * self._replicas[0] // self._replicas[1]

    def expect(self, num_samples: int) -> None:
        """Prepare for a target's next micro-batch, of so many samples."""
        with arriving(self._device):
            whole = torch.empty(num_samples, *self._shape, device=self._device)
            for end in self._from:
                if end.channel is not None:
                    end.channel.expect_into([whole[end.share.rows(num_samples)]])
        self._expected.append(whole)

    def receive(self) -> Tensor:
        """Wait for the oldest micro-batch that was expected: float32, samples in their order."""
        whole = arrived(self._expected.popleft())
        for end in self._from:
            if end.channel is not None:
                end.channel.receive()
            else:
                whole[end.share.rows(len(whole))] = self._kept.popleft()
        return whole

    def send(self, output: Tensor) -> None:
        """Send a source's micro-batch to all that read some of it, without waiting."""
        output = self._scale * output if self._scale != 1 else output
        for end in self._to:
            part = output[end.share.rows(len(output))]
            if end.channel is not None:
                end.channel.send([part])
            else:
                self._kept.append(part)

    def awaited(self) -> list[int]:
        """Ranks of which what was last received has not arrived; any thread may ask."""
        return [end.rank for end in self._from if end.channel is not None and end.channel.awaits()]

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for end in self._to:
            if end.channel is not None:
                end.channel.settle()


def messages(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, Share, Share]]:
    """``overlaps`` in the order in which all ranks send and receive them; each rank sends before it receives.

    Ranks that hold both networks send a micro-batch as they have made it, and get ready for others' parts of it after
    that. All targets lie on one side of their sources, as both networks end with the last rank, or one lies behind the
    other; those that lie farthest on that side, which send to nobody there, come first.
    """
    found = list(overlaps(sources, targets))
    return sorted(found, key=lambda each: each[1], reverse=any(source < target for source, target, *_ in found))


def overlaps(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, Share, Share]]:
    """Pairs of ranks that hold samples in common: source, target, and these as a share of each one's samples."""
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            # In units of 1 / (len(sources) * len(targets)) of a micro-batch.
            first, last = max(i * len(targets), j * len(sources)), min((i + 1) * len(targets), (j + 1) * len(sources))
            if first < last:
                given = Share(first / len(targets) - i, last / len(targets) - i)
                yield source, target, given, Share(first / len(sources) - j, last / len(sources) - j)
