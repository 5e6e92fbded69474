"""The placement of a network's stages and replicas on ranks.

A network with S stages on W ranks has W / S replicas. Without a pipeline S is 1 and each of its ranks is a replica.
"""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """A network's stages and replicas on the ranks.

    Neighbouring ranks are replicas of one stage, which exchange gradients, as in DeepSpeed's PipeDataParallelTopology.

    If ``reversed``, the first stage lies on the last ranks. The discriminator's does, so that its first stage is where
    the generator's last one is, and images need not travel.

    A network may have ranks of its own, from ``first`` on; the others hold nothing of it.
    """

    num_stages: int
    num_replicas: int
    reversed: bool = False
    first: int = 0

    @property
    def ranks(self) -> range:
        """Ranks that hold a part of the network."""
        return range(self.first, self.first + self.num_stages * self.num_replicas)

    @property
    def local(self) -> Placement:
        """The same with the network's ranks counted from 0."""
        return self._replace(first=0)

    def rank(self, stage: int, replica: int) -> int:
        """Return the rank of a stage of a replica."""
        row = self.num_stages - 1 - stage if self.reversed else stage
        return self.first + row * self.num_replicas + replica

    def stage(self, rank: int) -> int:
        """Return the stage that a rank computes; that of no layers for a rank that holds nothing of the network."""
        stage = (rank - self.first) // self.num_replicas
        return self.num_stages - 1 - stage if self.reversed else stage

    def replica(self, rank: int) -> int:
        """Return the replica that a rank belongs to; any for a rank that holds nothing of the network."""
        return (rank - self.first) % self.num_replicas

    def input_ranks(self) -> list[int]:
        """Ranks that read the network's inputs, by replica."""
        return [self.rank(0, replica) for replica in range(self.num_replicas)]

    def output_ranks(self) -> list[int]:
        """Ranks where the network's outputs arise, by replica."""
        return [self.rank(self.num_stages - 1, replica) for replica in range(self.num_replicas)]
