"""The phases of an update as one rank computes them, and the order of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.config import RunPlan
from bigsgan.engines.orders import Order
from bigsgan.engines.phases import Phase, Task, update_phases
from bigsgan.engines.pipeline.layout import EQUAL, meta_inputs
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
        return [self._build(phase) for phase in update_phases(self._plan)]

    def _build(self, phase: Phase) -> RankPhase:
        part = self._parts[phase.network]
        mode: Mode = "judge" if phase.frozen else "train"
        num, segments = self._num_samples(phase), self._num_segments(phase)
        sends, received = (0, 0), (0, 0)
        if not part.is_last:
            sends = self._traces.entering(self._plan, phase.network, mode, segments, num, part.bounds[1])
        if not part.is_first:
            received = self._traces.entering(self._plan, phase.network, mode, segments, num, part.bounds[0])
        image = num * self._pixels * FLOAT
        makes_images = phase.does == "makes images" and part.is_last
        passes = self._passes(phase, mode, segments, num)
        shown = min(phase.num, _SHOWN) if part.num_stages == 1 else phase.num
        return RankPhase(
            phase=phase._replace(num=shown),
            passes=passes,
            name=phase.label,
            keeps_graph=phase.backward or phase.keeps_graphs,
            reads=tuple(n for n in (phase.images_from, phase.grads_from) if n is not None),
            inputs=self._input_bytes(phase, num, segments) if part.is_first else 0,
            received=received,
            outputs=image if makes_images or (phase.frozen and part.is_first) else 0,
            sends=sends,
            data=phase.num * image if phase.does == "trains" and part.is_first else 0,
            num_beyond=phase.num - shown,
            pinned=isinstance(passes, WholePass)
            and not self._plan.recipe.engine(phase.network).activation_checkpointing,
        )

    def _passes(self, phase: Phase, mode: Mode, segments: int, num: int) -> Passes | WholePass:
        bounds = self._parts[phase.network].bounds
        if phase.does == "trains" and self._game.discriminator.differentiates_inputs:
            return self._traces.penalised(self._plan, phase.network, num)
        if (phase.keeps_graphs or phase.does == "pulls back") and self._game.regularises:
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
        """The tasks of this rank, of stages that are equally fast."""
        stages = {network: part.stage for network, part in self._parts.items()}
        costs = {network: [EQUAL] * part.num_stages for network, part in self._parts.items()}
        programs = Order(self._plan, stages, costs)([phase.phase for phase in phases])
        return [task for program in programs for task in program]
