"""A simple model of an update's time on many GPUs: computing, sending gradients, weights and images, and waiting.

GPUs compute at a given share of their peak, whatever the size of a micro-batch. A collective among N ranks takes the
time of a ring over the slowest link among them, and a latency for each of 2 log2(N) hops. Gradients travel during the
backward passes that make them, and ZeRO 3's weights while the network computes; ranks wait for the rest. Images travel
from rank to rank and cost time only on the rank that waits for them. Networks that share all ranks take turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.base import DTYPES
from bigsgan.engines.phases import Judges
from bigsgan.planner.counting import count_parameters
from bigsgan.planner.sides import Speed, UpdateWork
from bigsgan.planner.states import image_bytes


class Machine(NamedTuple):
    """GPUs and their links."""

    operations: float = 0.4 * 989e12  # operations a second of a GPU: the peak times its share (MFU)
    per_node: int = 8  # GPUs of a host
    inside: float = 350e9  # bytes a second that a GPU sends to others of its host
    between: float = 40e9  # bytes a second that a GPU sends to other hosts
    latency: float = 10e-6  # seconds of a hop

    def link(self, ranks: int) -> float:
        """Bytes a second of the slowest link among neighbouring ranks."""
        return self.inside if ranks <= self.per_node else self.between

    def collective(self, num_bytes: float, ranks: int) -> float:
        """Seconds for so many bytes to go once around a ring."""
        if ranks == 1 or not num_bytes:
            return 0.0
        return num_bytes * (ranks - 1) / ranks / self.link(ranks) + 2 * math.ceil(math.log2(ranks)) * self.latency


def turns(plan: RunPlan, network: str) -> int:
    """How often a network's parameters, or as many gradients, go through a ring in an update at its ZeRO stage.

    ZeRO 0 all-reduces an update's gradients, which is twice. ZeRO 1 scatters their sums and gathers updated parameters.
    ZeRO 2 keeps no whole gradient, so it scatters those of each micro-batch. ZeRO 3 gathers the parameters instead,
    forward and backward (Rajbhandari et al. 2020, arXiv 1910.02054, section 7). It gathers them once more for each
    micro-batch of the other network. For G these are forward passes for D's images, except images that G's update
    shares; for D they are at the seam, where the gradient at the images follows the forward pass, so that gathered
    parameters can stay. A D too large for that (stage3_max_reuse_distance) is gathered again, and exceeds this least
    number. A network that fits in that distance also stays from an update's forward to its backward pass, and needs
    less.
    """
    recipe, stage, updates = plan.recipe, plan.engines[network].file.stage, plan.recipe.updates_of(network)
    passes = {n: recipe.updates_of(n) * recipe.accumulation_of(n) for n in NETWORKS}  # micro-batches of all its updates
    if stage <= 1:
        return 2 * updates
    if stage == 2:
        return passes[network] + updates
    others = sum(passes.values()) - passes[network]
    if network == "generator" and recipe.objective.reuse_fakes and plan.keeps_generator_graphs:
        others -= recipe.accumulation_of("discriminator")
    return 3 * passes[network] + others


class Model:
    """The time of an update of one recipe on a machine, whether or not networks have ranks of their own."""

    def __init__(self, shared: UpdateWork, separate: UpdateWork, machine: Machine) -> None:
        """Count parameters, given the work on ranks that hold both networks, and on ranks of one network."""
        self.separate, self.machine, self._shared = separate, machine, shared
        self._numel = {network: count_parameters(separate.plan, network) for network in NETWORKS}

    def shared_seconds(self, world_size: int) -> float:
        """Seconds of an update if networks take turns on all ranks; pipelines count without a bubble."""
        seconds = 0.0
        for network in NETWORKS:
            seconds += self._shared.total(network) / world_size / self.machine.operations
            seconds += self._waits(self._shared, network, world_size)
        return seconds

    def speed(self, numbers: Mapping[str, int]) -> Speed:
        """The speed of so many ranks of each network, for `sides.time_update`."""
        recipe = self.separate.plan.recipe
        replicas = {network: number // len(self.separate.stages[network]) for network, number in numbers.items()}
        link = self.machine.link(sum(numbers.values()))
        # G makes images for D's steps in D's micro-batches; those of its own update may have another size.
        num = min(recipe.accumulation_of(each) for each in NETWORKS)
        travel = recipe.batch / num / min(replicas.values()) * image_bytes(recipe) / link + self.machine.latency
        return Speed(
            dict.fromkeys(NETWORKS, 1 / self.machine.operations),
            {n: self._waits(self.separate, n, numbers[n]) / recipe.updates_of(n) for n in NETWORKS},
            dict.fromkeys(NETWORKS, travel),
        )

    def _waits(self, work: UpdateWork, network: str, ranks: int) -> float:
        """Seconds of an update in which the ranks of a network wait for its gradients and weights."""
        plan, stages = work.plan, len(work.stages[network])
        file, replicas = plan.engines[network].file, ranks // stages
        num_bytes = self._numel[network] / stages * DTYPES[file.precision].itemsize
        passes = work.total(network) if file.stage == 3 else work.total(network, "backward")
        hidden = passes / ranks / self.machine.operations
        once = self.machine.collective(num_bytes, replicas)
        # At ZeRO 1 and 2 weights are gathered after the step, and nothing hides that.
        after = plan.recipe.updates_of(network) if file.stage in (1, 2) else 0
        return after * once + max(0.0, (turns(plan, network) - after) * once - hidden)


def sent_bytes(work: UpdateWork) -> dict[str, float]:
    """Bytes of images, and of gradients at them, that leave a network's ranks in the mean update, by network."""
    recipe = work.plan.recipe
    found = dict.fromkeys(NETWORKS, 0.0)
    for kind in work.kinds:
        for phase in kind.phases:
            if phase.sends:
                parts = recipe.objective.adversarial.parts if isinstance(phase, Judges) else 1
                found[phase.network] += kind.share * parts * image_bytes(recipe) * recipe.batch
    return found
