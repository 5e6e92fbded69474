"""The order in which the ranks compute the tasks of an update; it follows from the layout of the networks.

All ranks have one order in common, of all tasks of all stages. A rank computes its own tasks in that order, and gets
ready for each message at the place of the task that sends it: right before its own first task behind that place. So a
rank that waits for all it has sent, for all it gets ready for, or for those with whom it meets in a collective, waits
for what lies before its own next task. The rank whose next task lies before all others' never waits.
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.phases import (
    Judges,
    Learns,
    LearnsWithoutD,
    MakesImages,
    Phase,
    Placed,
    PullsBack,
    Task,
    Weighs,
)
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.schedule import EQUAL, Cost
from bigsgan.engines.tasks import awaited, in_turn, of_micro_batch


class Turn(NamedTuple):
    """A task of a rank, and what the rank gets ready for before it."""

    task: Task
    receives: tuple[Task, ...] = ()  # this task or later ones, whose messages may be on their way, oldest first


class Order:
    """Callable that returns this rank's turns in an update.

    Networks that lie whole on each rank take turns. Two pipelines that meet are planned together, all phases at once.
    Otherwise phases follow each other: images travel between them, or the recipe asks for it. A rank that holds one
    network has that network's phases, and waits for images and gradients as it needs them.
    """

    def __init__(
        self, plan: RunPlan, stages: Mapping[str, int], costs: Mapping[str, Sequence[Cost]] | None = None
    ) -> None:
        """Choose the order, by this rank's stage of each network, and the costs of the stages of networks in stages.

        The stage of a network is out of range if this rank holds nothing of it. All stages of a network without costs
        are taken for equal, as that of others' may be: when this rank gets ready depends on their phases alone.
        """
        self._stages = stages
        self._num_stages = {network: plan.placement(network).num_stages for network in NETWORKS}
        self._costs = {n: [EQUAL] * num for n, num in self._num_stages.items()} | dict(costs or {})
        num_staged = sum(num > 1 for num in self._num_stages.values())
        meets = plan.recipe.has_discriminator and not plan.images_travel
        self._is_whole = num_staged == 0 and not plan.is_split
        self._is_joint = num_staged == 2 and meets and plan.recipe.pipeline.schedule == "joint"
        self._holds_back = plan.engines["discriminator"].leaves_steps_open
        self._known: dict[tuple[Phase, ...], list[Turn]] = {}

    def __call__(self, phases: Sequence[Phase]) -> list[Turn]:
        """Return this rank's turns. Every rank orders the tasks of all ranks, and comes to the same order."""
        key = tuple(phases)
        if key not in self._known:
            placed = list(self._of_all(phases))
            if self._holds_back:
                placed = hold_back_steps(placed, phases)
            self._known[key] = list(self._turns(placed, phases))
        return self._known[key]

    def _of_all(self, phases: Sequence[Phase]) -> Iterator[Placed]:
        if self._is_whole:
            yield from (Placed(task, 0) for task in all_in_turn(phases))
        elif self._is_joint:
            yield from self._planned(phases, range(len(phases)))
        else:
            for number, phase in enumerate(phases):
                if self._num_stages[phase.network] == 1:
                    yield from (Placed(task, 0) for task in in_turn(number, phase))
                else:
                    yield from self._planned(phases, [number])

    def _planned(self, phases: Sequence[Phase], numbers: Sequence[int]) -> Sequence[Placed]:
        costs = tuple((network, tuple(each)) for network, each in self._costs.items())
        return _planned(tuple(phases), tuple(numbers), self._num_stages[phases[numbers[0]].network], costs)

    def _turns(self, placed: Sequence[Placed], phases: Sequence[Phase]) -> Iterator[Turn]:
        places = {one: place for place, one in enumerate(placed)}
        own = [place for place, (task, stage) in enumerate(placed) if stage == self._stages[phases[task.phase].network]]
        last = {network: num - 1 for network, num in self._num_stages.items()}
        ready = defaultdict[int, list[tuple[int, Task]]](list)  # by place, that of the sender and the receiver
        if not self._is_whole:
            for place in own:
                sender = awaited(*placed[place], phases, last)
                if sender is not None and placed[place].task.kind != "step":
                    sent = places[sender]
                    ready[own[bisect(own, sent)]].append((sent, placed[place].task))
        for place in own:
            yield Turn(placed[place].task, tuple(task for _, task in sorted(ready[place], key=lambda each: each[0])))


@functools.lru_cache(maxsize=64)  # the planner asks for the turns of one rank after the other
def _planned(
    phases: tuple[Phase, ...], numbers: tuple[int, ...], num_stages: int, costs: tuple[tuple[str, Sequence[Cost]], ...]
) -> Sequence[Placed]:
    return schedule.in_one_order(schedule.plan(phases, num_stages, dict(costs), numbers), phases, num_stages)


def all_in_turn(phases: Sequence[Phase]) -> Iterator[Task]:
    """Yield the tasks of an update of networks without stages that meet on each rank.

    They go phase by phase; but the micro-batches of G's own update go through its phases one by one, so that one graph
    is alive at a time. Where G's update comes first, D's steps come last. Where updates overlap, G makes images for D's
    next steps before its own.
    """
    if isinstance(phases[0], LearnsWithoutD):
        yield from _by_phase([0], phases)
        return
    last = next(number for number, phase in enumerate(phases) if isinstance(phase, PullsBack))
    judges = next(number for number, phase in enumerate(phases) if isinstance(phase, Judges))
    learning = [number for number, phase in enumerate(phases) if isinstance(phase, Learns)]
    if judges > learning[0]:
        first = 1 + learning[-1]
        yield from _by_phase(range(first), phases)
        yield from _by_micro_batch(range(first, last + 1), phases)
        return
    own = [number for number in range(last) if phases[number].update_of == "generator"]
    new = [number for number in range(last, len(phases)) if isinstance(phases[number], MakesImages)]  # of the new G
    made = [number for number in range(len(phases)) if number not in (*own, *learning, *new, last)]
    yield from _by_micro_batch([*own, last], phases, _by_phase(made, phases))
    yield from _by_phase(sorted([*learning, *new]), phases)


def _by_phase(numbers: Iterable[int], phases: Sequence[Phase]) -> Iterator[Task]:
    for number in numbers:
        if not phases[number].gives_tangents:  # those go with the phase that carries their tangents
            yield from in_turn(number, phases[number], phases)


def _by_micro_batch(numbers: Sequence[int], phases: Sequence[Phase], meanwhile: Iterable[Task] = ()) -> Iterator[Task]:
    """Yield the phases up to G's pulling back, then G's step; ``meanwhile`` comes before the last pulling back.

    If G weighs, it does so for all micro-batches first.
    """
    num = phases[numbers[-1]].num
    if any(isinstance(phases[number], Weighs) for number in numbers):
        for index in range(num):
            for number in numbers[:-1]:
                yield from of_micro_batch(number, phases[number], index)
        numbers = numbers[-1:]
    for index in range(num):
        for number in numbers:
            if number == numbers[-1] and index == phases[number].num - 1:
                yield from meanwhile
            yield from of_micro_batch(number, phases[number], index)
    yield Task(numbers[-1], "step", 0)


def hold_back_steps(placed: Iterable[Placed], phases: Sequence[Phase]) -> list[Placed]:
    """Move each step of D to right before its next task, so that its gradients may travel until then."""
    found: list[Placed] = []
    held: list[Placed] = []
    for one in placed:
        phase = phases[one.task.phase]
        if phase.network == "discriminator" and phase.computes:
            if one.task.kind == "step":
                held.append(one)
                continue
            found += held
            held = []
        found.append(one)
    return found + held
