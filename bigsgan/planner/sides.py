"""The work of each network in an update, and how long the update takes where networks have ranks of their own.

All replicas of a network compute as much and get their images at once, so that one of each stands for all. The order of
tasks is that of the run (engines/orders.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.config.objective import PathLength
from bigsgan.engines.orders import Order
from bigsgan.engines.phases import Phase, Task, UpdateGame, phases_of
from bigsgan.engines.pipeline.layout import build_on_meta
from bigsgan.engines.tasks import awaited
from bigsgan.planner.counting import count_frozen, count_games, count_heads, count_layers, stage_bounds


class StageWork(NamedTuple):
    """Operations of a forward pass of one image through a stage."""

    whole: float  # of all its layers
    behind: float  # of those that penalties differentiate through: of G, those behind the styles
    heads: float = 0.0  # of what D's last stage predicts of a teacher's features of a real image, beside that
    frozen: float = 0.0  # of the frozen program with which a network begins, a part of all its layers
    more: float = 0.0  # of what D from outside computes besides where it judges G's images


class UpdateKind(NamedTuple):
    """Updates that carry the same penalties."""

    phases: list[Phase]  # of such an update
    share: float  # of all updates that are so


@dataclass(frozen=True)
class UpdateWork:
    """What an update computes."""

    # in which networks have ranks of their own: phases and the order of tasks come from it; its replicas do not matter
    plan: RunPlan
    stages: dict[str, list[StageWork]]  # of each network
    kinds: list[UpdateKind]  # of updates; their shares add up to 1
    _programs: dict[tuple[int, str, int], list[Task]] = field(default_factory=dict)

    def of_task(self, kind: UpdateKind, task: Task, stage: int) -> float:
        """Operations of a task on a stage, were all samples on one replica; 0 for a step.

        A backward pass takes two forward passes; one if it is to the inputs alone. Tangents are computed beside the
        values. A double backward goes to the images and back through that, three passes.
        """
        phase = kind.phases[task.phase]
        if task.kind == "step" or phase.only_on is not None:
            return 0.0
        network, own = phase.network, self.stages[phase.network][stage]
        num_replicas = self.plan.placement(network).num_replicas
        samples: float = phase.num_samples * num_replicas
        recipe = self.plan.recipe
        heads = own.heads * recipe.batch / recipe.accumulation_of(phase.update_of) if phase.step else 0.0
        more = (own.behind if phase.has_tangents else 0.0) + (own.more if phase.frozen else 0.0)
        forward = samples * (own.whole + more) + heads
        if task.kind == "forward":
            return forward
        again = forward if self.plan.engines[network].section.activation_checkpointing else 0.0
        backward = samples * own.behind if phase.frozen else 2 * (forward - samples * own.frozen)
        return backward + again + 3 * own.behind * phase.num_twice * num_replicas

    def program(self, kind: UpdateKind, network: str, stage: int) -> list[Task]:
        """The tasks of a stage in their order."""
        key = self.kinds.index(kind), network, stage
        if key not in self._programs:
            stages = {name: stage if name == network else -1 for name in NETWORKS}
            self._programs[key] = [turn.task for turn in Order(self.plan, stages)(kind.phases)]
        return self._programs[key]


def count_update(plan: RunPlan) -> UpdateWork:
    """Count the work of both networks; lazy penalties in so many updates as carry them."""
    return UpdateWork(plan, {network: _count_stages(plan, network) for network in NETWORKS}, _kinds(plan))


def _count_stages(plan: RunPlan, network: str) -> list[StageWork]:
    flop, bounds = count_layers(plan, network), stage_bounds(plan, network, build_on_meta(plan, network))
    judged = count_layers(plan, network, judged=network == "discriminator")
    ahead = PathLength.ahead if network == "generator" else 0
    heads = {bounds[-1]: count_heads(plan)} if network == "discriminator" else {}
    frozen = count_frozen(plan, network)

    def work(a: int, b: int) -> StageWork:
        whole, more = sum(flop[a:b]), sum(judged[a:b]) - sum(flop[a:b])
        return StageWork(whole, sum(flop[max(a, ahead) : b]), heads.get(b, 0.0), 0.0 if a else frozen, more)

    return [work(a, b) for a, b in pairwise(bounds)]


def _kinds(plan: RunPlan) -> list[UpdateKind]:
    found: Counter[UpdateGame] = Counter()
    for game, times in count_games(plan).items():
        found[game._replace(segments=game.segments._replace(checks=False))] += times  # one micro-batch now and then
    return [UpdateKind(phases_of(plan, game), times / found.total()) for game, times in found.items()]


class Timing(NamedTuple):
    """Of the mean update."""

    seconds: float  # that it takes
    busy: dict[str, float]  # by network, of them in which a rank of it computes, or steps, in the mean
    idle: float  # share of all ranks' time in which they wait


def time_update(work: UpdateWork, replicas: Mapping[str, int]) -> Timing:
    """Time of the mean update on so many replicas of each network, simulated task by task, in operations."""
    seconds, busy = 0.0, dict.fromkeys(NETWORKS, 0.0)
    for kind in work.kinds:
        makespan, own = _simulate(work, kind, replicas)
        seconds += kind.share * makespan
        for network in NETWORKS:
            stages = len(work.stages[network])
            busy[network] += kind.share * sum(own[network, stage] for stage in range(stages)) / stages
    ranks = {network: replicas[network] * len(work.stages[network]) for network in NETWORKS}
    computed = sum(ranks[network] * busy[network] for network in NETWORKS)
    return Timing(seconds, busy, 1 - computed / (sum(ranks.values()) * seconds))


_Device = tuple[str, int]
"""A stage of a network."""


def _simulate(work: UpdateWork, kind: UpdateKind, replicas: Mapping[str, int]) -> tuple[float, dict[_Device, float]]:
    """When an update of a kind ends, and how long each device computes.

    Every device takes its tasks in their order, each as soon as what it reads is there; messages and steps take none.
    """
    devices = [(network, stage) for network in NETWORKS for stage in range(len(work.stages[network]))]
    programs = {device: work.program(kind, *device) for device in devices}
    last = {network: len(own) - 1 for network, own in work.stages.items()}
    ends: dict[tuple[Task, int], float] = {}  # of a task on a stage of its network
    free, busy = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
    place = dict.fromkeys(devices, 0)
    blocked = False
    while not blocked:
        blocked = True
        for device in devices:
            network, stage = device
            for task in programs[device][place[device] :]:
                needed, start = awaited(task, stage, kind.phases, last), free[device]
                if needed is not None:
                    if needed not in ends:
                        break
                    start = max(start, ends[needed])
                taken = work.of_task(kind, task, stage) / replicas[network]
                ends[task, stage] = free[device] = start + taken
                busy[device] += taken
                place[device] += 1
                blocked = False
    assert all(place[device] == len(programs[device]) for device in devices), "the sides wait for each other"
    return max(free.values()), busy
