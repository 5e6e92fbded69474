"""The placement of a network's stages and replicas on ranks.

A network with S stages on W ranks has W / S replicas. Without a pipeline S is 1 and each of its ranks is a replica.
"""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """A network's stages and replicas on the ranks.

    Neighbouring ranks are replicas of one stage, which exchange gradients, as in DeepSpeed's PipeDataParallelTopology.

    If ``reversed``, the first stage is on the last ranks. This holds for the discriminator: its first stage is on the
    ranks of the generator's last stage, so that images need not travel.

    A network may have its own ranks, from ``first`` on; other ranks hold no part of it.
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
        """The same placement with the network's ranks counted from 0."""
        return self._replace(first=0)

    def rank(self, stage: int, replica: int) -> int:
        """Return the rank of a stage of a replica."""
        row = self.num_stages - 1 - stage if self.reversed else stage
        return self.first + row * self.num_replicas + replica

    def stage(self, rank: int) -> int:
        """Return the stage that a rank computes; out of range for a rank that holds no part of the network."""
        stage = (rank - self.first) // self.num_replicas
        return self.num_stages - 1 - stage if self.reversed else stage

    def replica(self, rank: int) -> int:
        """Return the replica that a rank belongs to; meaningless for a rank that holds no part of the network."""
        return (rank - self.first) % self.num_replicas

    def of_stage(self, stage: int) -> range:
        """Return the ranks that compute a stage, by replica."""
        first = self.rank(stage, 0)
        return range(first, first + self.num_replicas)

    def replicas(self) -> list[range]:
        """Return the ranks of each stage, which exchange gradients."""
        return [self.of_stage(stage) for stage in range(self.num_stages)]

    def pipelines(self) -> list[list[int]]:
        """Return the ranks of each replica, by stage, which pass activations on."""
        return [[self.rank(s, replica) for s in range(self.num_stages)] for replica in range(self.num_replicas)]

    def input_ranks(self) -> list[int]:
        """Ranks that read the network's inputs, by replica."""
        return list(self.of_stage(0))

    def output_ranks(self) -> list[int]:
        """Ranks that compute the network's outputs, by replica."""
        return list(self.of_stage(self.num_stages - 1))
