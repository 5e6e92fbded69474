"""The phases of an update as one rank computes them, and the order of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.deepspeed_config import leaves_steps_open
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.layout import EQUAL, meta_inputs, update_phases
from bigsgan.engines.pipeline.schedule import Cost, Phase, Task
from bigsgan.planner.activations import Traces
from bigsgan.planner.layers import Mode
from bigsgan.planner.passes import Passes, WholePass
from bigsgan.planner.states import FLOAT
from bigsgan.planner.update import RankPhase

_SHOWN = 3
"""Micro-batches that are gone through of a phase without stages; the rest are like the last of them."""


class Part(NamedTuple):
    """What a rank has of a network.

    Attributes:
        bounds: Layers ``bounds[0]`` up to ``bounds[1]``.
        stage: Which stage they are.
        num_stages: Of the network.
        sizes: Elements of each parameter.
        buffers: Bytes of all buffers.
    """

    bounds: tuple[int, int]
    stage: int
    num_stages: int
    sizes: list[int]
    buffers: int

    @property
    def is_first(self) -> bool:
        """Whether it reads the network's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the network's outputs arise here."""
        return self.stage == self.num_stages - 1


class Game(NamedTuple):
    """What the networks minimise in an update.

    Attributes:
        discriminator: D's loss.
        generator: G's.
        regularises: Whether G's path length is taken.
    """

    discriminator: DiscriminatorObjective
    generator: GeneratorObjective
    regularises: bool


class PhaseBuilder:
    """Builds the phases of an update, as a rank with certain parts of the networks computes them."""

    def __init__(self, plan: RunPlan, traces: Traces, parts: Mapping[str, Part], game: Game) -> None:
        """Keep what they follow from.

        Args:
            plan: The run's.
            traces: Of its networks.
            parts: By network.
            game: What is minimised.
        """
        self._plan, self._traces, self._parts, self._game = plan, traces, parts, game
        self._pixels = plan.recipe.data.image_channels * plan.recipe.data.resolution**2

    def build(self) -> list[RankPhase]:
        """All phases, in the order in which the step asks for them."""
        phases = update_phases(self._plan)
        # Those through G that leave or build the graphs of its update.
        self._of_update = {len(phases) - 1, phases[-1].graphs_from}
        return [self._build(number, phase) for number, phase in enumerate(phases)]

    def _build(self, number: int, phase: Phase) -> RankPhase:
        part = self._parts[phase.network]
        mode: Mode = "judge" if phase.frozen else "train"
        num, segments = self._num_samples(phase), self._num_segments(phase)
        sends, received = (0, 0), (0, 0)
        if not part.is_last:
            sends = self._traces.entering(self._plan, phase.network, mode, segments, num, part.bounds[1])
        if not part.is_first:
            received = self._traces.entering(self._plan, phase.network, mode, segments, num, part.bounds[0])
        image = num * self._pixels * FLOAT
        makes_images = phase.network == "generator" and not phase.step and part.is_last
        trains = phase.network == "discriminator" and phase.step
        passes = self._passes(number, phase, mode, segments, num)
        shown = min(phase.num, _SHOWN) if part.num_stages == 1 else phase.num
        return RankPhase(
            phase=phase._replace(num=shown),
            passes=passes,
            name=_name(phase),
            keeps_graph=phase.backward or number in self._of_update,
            reads=tuple(n for n in (phase.images_from, phase.grads_from) if n is not None),
            inputs=self._input_bytes(phase, num, segments) if part.is_first else 0,
            received=received,
            outputs=image if makes_images or (phase.frozen and part.is_first) else 0,
            sends=sends,
            data=phase.num * image if trains and part.is_first else 0,
            num_beyond=phase.num - shown,
            pinned=isinstance(passes, WholePass)
            and not self._plan.recipe.engine(phase.network).activation_checkpointing,
        )

    def _passes(self, number: int, phase: Phase, mode: Mode, segments: int, num: int) -> Passes | WholePass:
        bounds = self._parts[phase.network].bounds
        if phase.network == "discriminator" and phase.step and self._game.discriminator.differentiates_inputs:
            return self._traces.penalised(self._plan, phase.network, num)
        if number in self._of_update and self._game.regularises:
            return self._traces.penalised(self._plan, phase.network, num)
        return self._traces.passes(self._plan, phase.network, mode, segments, num, bounds)

    def _num_samples(self, phase: Phase) -> int:
        """Of a segment of a micro-batch, on one replica."""
        return self._plan.recipe.batch // (phase.num * self._plan.placement(phase.network).num_replicas)

    def _num_segments(self, phase: Phase) -> int:
        if phase.network == "generator":
            return 1
        return self._game.generator.num_segments if phase.frozen else self._game.discriminator.num_segments

    def _input_bytes(self, phase: Phase, num: int, segments: int) -> int:
        """Of what is put together for the first layer; D judges images where they are."""
        if phase.frozen and segments == 1:
            return 0
        return sum(t.numel() * t.element_size() for t in meta_inputs(self._plan, phase.network, num * segments))

    def order(self, phases: Sequence[RankPhase]) -> list[Task]:
        """The tasks of this rank."""
        staged = [self._parts[network].num_stages > 1 for network in NETWORKS]
        numbers = range(len(phases))
        if all(staged) and not self._plan.images_travel and self._plan.recipe.pipeline.schedule == "joint":
            return self._planned([phase.phase for phase in phases], numbers)
        if any(staged):
            order = [task for n in numbers for task in self._planned([_alone(phases[n].phase)], [n])]
            return self._with_open_steps(phases, order)
        num_joint = 2 if self._plan.recipe.objective.reuse_fakes else 3  # those of G's update
        order = [task for n in numbers[:-num_joint] for task in _in_turn(n, phases[n].phase)]
        for index in range(phases[-1].phase.num):
            for n in numbers[-num_joint:]:
                order += _one(n, phases[n].phase, index)
        return [*self._with_open_steps(phases, order), Task(numbers[-1], "step", 0)]

    def _with_open_steps(self, phases: Sequence[RankPhase], order: list[Task]) -> list[Task]:
        """Tasks with D's steps where its engine makes them, which may leave them open (engines/zero.py)."""
        if not leaves_steps_open(self._plan, "discriminator"):
            return order
        found: list[Task] = []
        left_open: list[Task] = []
        for task in order:
            if task.kind == "step" and phases[task.phase].phase.network == "discriminator":
                left_open.append(task)
                continue
            if phases[task.phase].phase.network == "discriminator":
                found += left_open
                left_open = []
            found.append(task)
        return found + left_open

    def _planned(self, phases: list[Phase], numbers: Sequence[int]) -> list[Task]:
        """Tasks of this rank's place among the stages, as the pipelines plan them."""
        part = self._parts[phases[0].network]
        if part.num_stages == 1:
            return list(_in_turn(numbers[0], phases[0]))
        is_reversed = phases[0].network == "discriminator"
        device = part.num_stages - 1 - part.stage if is_reversed else part.stage
        tasks = _plan(tuple(phases), part.num_stages).devices[device]
        return [timed.task._replace(phase=numbers[timed.task.phase]) for timed in tasks]


@lru_cache(maxsize=32)
def _plan(phases: tuple[Phase, ...], num_stages: int) -> schedule.Plan:
    """As ``Program.plan`` has it, of stages that are equally fast."""
    costs: dict[str, Sequence[Cost]] = dict.fromkeys(NETWORKS, [EQUAL] * num_stages)
    return schedule.plan(phases, num_stages, costs, ["discriminator"])


def _alone(phase: Phase) -> Phase:
    return phase._replace(images_from=None, grads_from=None, graphs_from=None)


def _in_turn(number: int, phase: Phase) -> list[Task]:
    """Tasks of a phase without stages: micro-batch by micro-batch."""
    tasks = [task for index in range(phase.num) for task in _one(number, phase, index)]
    return tasks + [Task(number, "step", 0)] * phase.step


def _one(number: int, phase: Phase, index: int) -> list[Task]:
    return [Task(number, "forward", index)] * phase.forward + [Task(number, "backward", index)] * phase.backward


def _name(phase: Phase) -> str:
    if phase.network == "generator":
        return "G trains" if phase.step else "G makes images"
    return "D judges" if phase.frozen else "D trains"
