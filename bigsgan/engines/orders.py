"""The order in which a rank computes the tasks of an update; it follows from the layout of the networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.phases import Phase, Task, all_in_turn, hold_back_steps, in_turn
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.schedule import Cost


class Order:
    """Callable that returns this rank's tasks of an update as programs, to be computed one after the other.

    Networks that lie whole on each rank take turns. Two pipelines that meet are planned together, all phases in one
    program. Otherwise each phase is a program: images travel between phases, or the recipe asks for it. A rank that
    holds one network has that network's phases as one program, and waits for images and gradients as it needs them.
    """

    def __init__(self, plan: RunPlan, stages: Mapping[str, int], costs: Mapping[str, Sequence[Cost]]) -> None:
        """Choose the order, by this rank's stage of each network, and the costs of the stages of networks in stages.

        The stage of a network is out of range if this rank holds nothing of it.
        """
        self._stages, self._costs = stages, dict(costs)
        self._num_stages = {network: plan.placement(network).num_stages for network in NETWORKS}
        self._held = [network for network, num in self._num_stages.items() if stages[network] in range(num)]
        num_staged = sum(num > 1 for num in self._num_stages.values())
        meets = not plan.images_travel
        self._is_whole = num_staged == 0 and not plan.is_split
        self._is_joint = num_staged == 2 and meets and plan.recipe.pipeline.schedule == "joint"
        self._holds_back = plan.engines["discriminator"].leaves_steps_open
        self._known: dict[tuple[Phase, ...], list[list[Task]]] = {}

    def __call__(self, phases: Sequence[Phase]) -> list[list[Task]]:
        """Return this rank's tasks. Every rank plans for all ranks, and comes to the same plan."""
        key = tuple(phases)
        if key not in self._known:
            programs: Iterable[Iterable[Task]]
            if self._is_whole:
                programs = [all_in_turn(phases)]
            elif self._is_joint:
                programs = [self._planned(phases)]
            else:
                held = [(number, phase) for number, phase in enumerate(phases) if phase.network in self._held]
                programs = [self._alone(number, phase) for number, phase in held]
                if len(held) < len(phases):
                    programs = [chain(*programs)]
            if self._holds_back:
                programs = hold_back_steps(programs, phases)
            self._known[key] = [list(program) for program in programs]
        return self._known[key]

    def _alone(self, number: int, phase: Phase) -> Iterable[Task]:
        if self._num_stages[phase.network] == 1:
            return in_turn(number, phase)
        return [task._replace(phase=number) for task in self._planned([schedule.alone(phase)])]

    def _planned(self, phases: Sequence[Phase]) -> list[Task]:
        """Return this rank's tasks of the plan for all stages."""
        network = phases[0].network
        num_stages, stage = self._num_stages[network], self._stages[network]
        plan = schedule.plan(phases, num_stages, self._costs)
        return [timed.task for timed in plan.devices[schedule.device_of(network, stage, num_stages)]]
