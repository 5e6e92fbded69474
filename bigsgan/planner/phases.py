"""The phases of an update as one rank computes them, and the order of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from bigsgan.config import RunPlan
from bigsgan.config.objective import PathLength, num_images
from bigsgan.engines.exposing import exposed
from bigsgan.engines.orders import Order, Turn
from bigsgan.engines.phases import Judges, Keeps, Learns, MakesImages, Phase, Trains, UpdateGame, Weighs, phases_of
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.planner.activations import Traces
from bigsgan.planner.layers import Mode
from bigsgan.planner.passes import Passes, WholePass
from bigsgan.planner.states import FLOAT, image_bytes
from bigsgan.planner.teaching import PROGRAMS
from bigsgan.planner.update import RankPhase

_SHOWN = 3
"""Number of micro-batches to go through in a phase without stages; the others are like the last of them."""


class Part(NamedTuple):
    """A rank's part of a network."""

    bounds: tuple[int, int]  # layers ``bounds[0]`` to ``bounds[1] - 1``
    stage: int  # number of their pipeline stage; not in ``range(num_stages)`` if the rank holds nothing of the network
    num_stages: int  # number of the network's stages
    sizes: list[int]  # elements of each parameter
    buffers: int  # bytes of the buffers that are saved
    computed: int = 0  # bytes of the buffers that are computed instead, and of a layer's frozen program
    in_matrices: int = 0  # elements of the matrices that Muon may update
    frozen: int = 0  # bytes of this rank's parts of frozen parameters that ranks share
    largest_layer: int = 0  # elements of the parameters of a layer, at most

    @property
    def is_held(self) -> bool:
        """Whether the rank holds layers of the network."""
        return self.stage in range(self.num_stages)

    @property
    def is_first(self) -> bool:
        """Whether the part reads the network's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the part computes the network's outputs."""
        return self.stage == self.num_stages - 1


def build_phases(plan: RunPlan, traces: Traces, parts: Mapping[str, Part], game: UpdateGame) -> list[RankPhase]:
    """Build the phases of an update for a rank with these parts, in the order of the step."""
    return [_build_phase(plan, traces, parts[phase.network], game, phase) for phase in phases_of(plan, game)]


def kept_images(plan: RunPlan, part: Part) -> int:
    """Bytes of images of earlier updates that a rank with this part of D keeps for its steps."""
    recipe = plan.recipe
    if not part.is_first:
        return 0
    objective, num = recipe.objective, recipe.batch // plan.placement("discriminator").num_replicas
    shown = objective.d_steps * (
        (objective.schedule == "overlapped") + bool(objective.pool)
    )  # stale, and of this update
    return (shown + objective.pool) * num * image_bytes(recipe)


def _build_phase(plan: RunPlan, traces: Traces, part: Part, game: UpdateGame, phase: Phase) -> RankPhase:
    network = phase.network
    mode: Mode = "judge" if phase.frozen else "train with tangents" if phase.has_tangents else "train"
    segments, num = Fraction(phase.segments), phase.num_samples // phase.segments  # of samples on one replica
    if network == "discriminator" and plan.objective.batch_shrink > 1:
        num = plan.recipe.batch // (plan.recipe.accumulation_of(phase.update_of) * plan.placement(network).num_replicas)
        segments = Fraction(phase.num_samples, num)  # some are a part of one
    image = num * image_bytes(plan.recipe)
    entering = partial(traces.entering, plan, network, mode, segments, num)
    passes: Passes | WholePass | None
    if phase.only_on is not None:
        passes = None
    elif phase.num_twice:
        passes = traces.penalized(plan, network, num)
    else:
        passes = traces.passes(plan, network, mode, segments, num, part.bounds)
    # Bytes of the gradient at all samples' images, or at the styles that enter G's second layer.
    slope = num_images(game.segments.trains, num, plan.objective.batch_shrink) * image_bytes(plan.recipe)
    if network == "generator":
        whole = plan.recipe.batch // (phase.num * plan.placement(network).num_replicas)
        slope = traces.entering(plan, network, "train", 1, whole, PathLength.ahead)[0]
    inputs = outputs = 0
    seam = image * plan.recipe.objective.adversarial.parts
    judges_in_place = isinstance(phase, Judges) and segments == 1  # D judges images in place
    if part.is_first and passes is not None and not judges_in_place:
        inputs = sum(tensor.nbytes for tensor in meta_inputs(plan, network, phase.num_samples))
        inputs += slope if phase.has_tangents else 0
    if part.is_last if isinstance(phase, MakesImages) else part.is_first and isinstance(phase, Keeps):
        outputs = image
    elif part.is_last if isinstance(phase, Weighs) else part.is_first and isinstance(phase, Judges):
        outputs = seam
    elif phase.gives_slopes and part.is_first:
        outputs = slope
    arrives = isinstance(phase, Weighs) or (phase.grads_from is not None and not plan.objective.adversarial.weighs)
    to_others = seam if plan.images_travel and part.is_last and arrives else 0
    teaches = isinstance(phase, Trains) and plan.recipe.objective.teacher is not None
    program, distance = (traces.program(plan.recipe, name) for name in PROGRAMS)
    data = phase.num * image if isinstance(phase, Learns) and part.is_first else 0
    if teaches and (part.is_first or part.is_last):  # where real images are read, with their pixels
        data = phase.num * (image + num * _pixels(plan))
    shown = min(phase.num, _SHOWN) if part.num_stages == 1 else phase.num
    return RankPhase(
        phase=replace(phase, num=shown),
        passes=passes,
        inputs=inputs,
        arriving=image if plan.images_travel and part.is_first and phase.images_from is not None else 0,
        received=(0, 0) if part.is_first or not part.is_held else entering(part.bounds[0]),
        outputs=outputs,
        sends=(0, to_others) if part.is_last or not part.is_held else entering(part.bounds[1]),
        data=data,
        num_beyond=phase.num - shown,
        pinned=isinstance(passes, WholePass) and not plan.engines[network].section.activation_checkpointing,
        before=program.peak(num) if program and teaches and part.is_last else 0,
        after=distance.peak(num) if distance and isinstance(phase, Judges) and part.is_first else 0,
        exposed=_exposed(traces, plan, num) if phase.exposes and part.is_last else 0,
    )


def _exposed(traces: Traces, plan: RunPlan, num: int) -> int:
    """Bytes that the graph from G's exposed parameter to so many images keeps, and at ZeRO 3 the weights behind it."""
    section = plan.objective.adversarial.adaptive
    assert section is not None, "an adaptive weight exposes a parameter"
    network, inputs = traces.network(plan, "generator"), meta_inputs(plan, "generator", num)
    with exposed(network, section.parameter) as found:
        network(*inputs)
    is_sharded = plan.engines["generator"].file.stage == 3
    return found.num_bytes + is_sharded * sum(each.nbytes for each in found.later.values())


def _pixels(plan: RunPlan) -> int:
    """Bytes of a real image that stands beside what networks see of it."""
    data = plan.recipe.data
    return 0 if data.codec.kind == "pixels" else data.image_channels * data.resolution.num_pixels * FLOAT


def order_turns(plan: RunPlan, parts: Mapping[str, Part], phases: Sequence[RankPhase]) -> list[Turn]:
    """The turns of a rank with these parts, if all stages are equally fast; of micro-batches that are not shown too."""
    stages = {network: part.stage for network, part in parts.items()}
    return Order(plan, stages)([replace(phase.phase, num=phase.num) for phase in phases])
