"""The order in which the ranks compute the tasks of an update; it follows from the layout of the networks.

All ranks have one order in common, of all tasks of all stages. A rank computes its own tasks in that order, and gets
ready for each message at the place of the task that sends it: right before its own first task behind that place. So a
rank that waits for all it has sent, for all it gets ready for, or for those with whom it meets in a collective, waits
for what lies before its own next task. The rank whose next task lies before all others' never waits.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.phases import Phase, Placed, Task, all_in_turn, awaited, hold_back_steps, in_turn
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.schedule import EQUAL, Cost


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
        meets = not plan.images_travel
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
            yield from self._planned(phases)
        else:
            for number, phase in enumerate(phases):
                if self._num_stages[phase.network] == 1:
                    yield from (Placed(task, 0) for task in in_turn(number, phase))
                else:
                    for task, stage in self._planned([schedule.alone(phase)]):
                        yield Placed(task._replace(phase=number), stage)

    def _planned(self, phases: Sequence[Phase]) -> list[Placed]:
        num_stages = self._num_stages[phases[0].network]
        return schedule.in_one_order(schedule.plan(phases, num_stages, self._costs), phases, num_stages)

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
