"""The phases of an adversarial update, as data. Executors, planner, profiler and logs read this one list.

In a phase, micro-batches go through one network forward, backward or both; it may end in an optimizer step. A rank
computes a phase as tasks. This file has no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bigsgan.config import RunPlan
from bigsgan.config.objective import Segments, num_images

Kind = Literal["forward", "backward", "step"]


class _Defaults:
    """What holds of a phase unless its class says otherwise; a class has fields for what its phases differ in."""

    network: str  # the network that computes
    update_of: str  # the network whose update the phase serves
    label: str  # the phase's name in timelines, profiles and logs
    computes = True  # whether micro-batches go through the network
    # the one stage of the network that has tasks of the phase, which pass nothing to others: 0, -1 for the last, or all
    only_on: int | None = None
    sends = False  # whether the other network reads the images, or the gradients at images, that arise
    step = False  # whether the phase ends in an optimizer step
    frozen = False  # whether the backward pass computes gradients at the inputs only, which halves its cost
    exposes = False  # whether passes without graphs keep one from a parameter to the images, for the phase that weighs
    is_probe = False  # whether it only checks, now and then and on one micro-batch; nothing reads its gradients
    gives_tangents = False  # whether its gradients are the direction of another phase's tangents
    keeps_graphs = False  # whether it leaves graphs of forward passes to the phase that pulls back
    num_twice = 0  # of a micro-batch's samples, those that a double backward goes through
    segments = 1  # parts of a micro-batch: of D's, real and fake images and what penalties add
    images_from: int | None = None  # number of the phase whose images this one reads
    grads_from: int | None = None  # number of the phase whose gradients at the images this one reads
    graphs_from: int | None = None  # number of the phase through whose forward passes this one goes backward
    # number of the phase, of the same network, whose gradients are the direction of the tangents that this one's passes
    # carry, forward and backward
    tangents_from: int | None = None
    # Number of D's step that this phase is a part of, or whose images it makes or keeps. It counts from the update's
    # first step, on into the next update. None if the phase serves G's update alone.
    d_step: int | None = None


@dataclass(frozen=True)
class Phase(_Defaults):
    """One phase of an update; its class is what it does."""

    num: int  # number of micro-batches
    num_samples: int  # samples of a micro-batch on one replica, in all its segments
    # number of the first micro-batches whose passes move batch statistics and power iterations; a skipped update
    # restores what they were
    num_moving: int = 0

    @property
    def forward(self) -> bool:
        """Whether micro-batches go forward."""
        return True

    @property
    def backward(self) -> bool:
        """Whether micro-batches go backward."""
        return self.frozen or self.step

    @property
    def opens_graphs(self) -> bool:
        """Whether forward passes leave graphs, for backward passes of this phase or of the one that pulls back."""
        return self.backward or self.keeps_graphs

    @property
    def gives_slopes(self) -> bool:
        """Whether a penalty reads the gradients at the inputs."""
        return self.frozen and not self.sends

    @property
    def has_tangents(self) -> bool:
        """Whether passes carry tangents, for a penalty in forward mode."""
        return self.tangents_from is not None

    @property
    def needs_until(self) -> Kind:
        """The kind of pass up to which later phases leave the network's buffers and parameters as they are."""
        return "step" if self.step else "backward" if self.frozen and self.sends else "forward"

    @property
    def samples_of_work(self) -> int:
        """Samples of a micro-batch, weighted by cost: one with tangents counts twice."""
        return self.num_samples * (1 + self.has_tangents) * (self.only_on is None)

    def stages(self, num_stages: int) -> range:
        """Return the numbers of the stages that have tasks of the phase, of a network with so many."""
        return range(num_stages) if self.only_on is None else range(num_stages)[self.only_on :][:1]

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the phases whose images or gradients this one reads."""
        numbers = (self.images_from, self.grads_from, self.tangents_from if self.forward else None)
        return tuple(number for number in numbers if number is not None)


@dataclass(frozen=True, kw_only=True)
class MakesImages(Phase):
    """G makes the images of one of D's steps."""

    network, update_of, label, sends = "generator", "discriminator", "G makes images", True
    d_step: int | None


@dataclass(frozen=True, kw_only=True)
class MakesOwnImages(MakesImages):
    """G makes the images of its own update, which may also serve one of D's steps."""

    update_of = "generator"
    keeps_graphs: bool
    exposes: bool
    tangents_from: int | None
    num_twice: int


@dataclass(frozen=True, kw_only=True)
class Learns(Phase):
    """A phase of one of D's steps, on real images and, unless D is differentiated at these alone, G's."""

    network, update_of = "discriminator", "discriminator"
    segments: int
    images_from: int | None  # None with real images alone, or with images that D has kept
    d_step: int


@dataclass(frozen=True, kw_only=True)
class Checks(Learns):
    """D is differentiated by the images of one micro-batch, to check a finite difference."""

    label, frozen, is_probe = "D checks", True, True


@dataclass(frozen=True, kw_only=True)
class DifferentiatesImages(Learns):
    """D is differentiated by its images, before it trains with a penalty in forward mode."""

    label, frozen, gives_tangents = "D differentiates", True, True


@dataclass(frozen=True, kw_only=True)
class Trains(Learns):
    """D trains on real images and G's."""

    label, step = "D trains", True
    tangents_from: int | None
    num_twice: int


@dataclass(frozen=True, kw_only=True)
class DifferentiatesStyles(Phase):
    """G is differentiated by its styles, before passes with path length in forward mode."""

    network, update_of, label, frozen, gives_tangents = "generator", "generator", "G differentiates", True, True
    d_step: int | None


@dataclass(frozen=True, kw_only=True)
class Judges(Phase):
    """D judges G's images, which gives gradients at them."""

    network, update_of, label, sends, frozen = "discriminator", "generator", "D judges", True, True
    segments: int
    images_from: int


@dataclass(frozen=True, kw_only=True)
class Weighs(Phase):
    """G finds how large the gradients of the parts of its loss are, at its images or at one of its parameters.

    They are weighed over the whole batch, so all its micro-batches come before the first that is pulled back.
    """

    network, update_of, label, forward, backward = "generator", "generator", "G weighs", False, True
    only_on = -1
    grads_from: int
    graphs_from: int | None  # None if gradients are weighed at the images
    keeps_graphs: bool


@dataclass(frozen=True, kw_only=True)
class PullsBack(Phase):
    """G pulls the gradients at its images back to its parameters and steps.

    It goes backward through another phase's forward passes, or repeats them.
    """

    network, update_of, label, step = "generator", "generator", "G pulls back", True
    grads_from: int
    graphs_from: int | None  # None if the forward passes are repeated
    tangents_from: int | None
    num_twice: int

    @property
    def forward(self) -> bool:
        """Whether micro-batches go forward."""
        return self.graphs_from is None


@dataclass(frozen=True)
class LearnsWithoutD(Phase):
    """G trains on its own images and outputs, where there is no D."""

    network, update_of, label, step = "generator", "generator", "G trains", True


@dataclass(frozen=True, kw_only=True)
class Keeps(Phase):
    """D keeps G's images for one of its steps of the next update, where updates overlap."""

    network, update_of, label, computes = "discriminator", "discriminator", "D keeps", False
    only_on = 0  # where D reads its inputs
    images_from: int
    d_step: int


@dataclass(frozen=True, kw_only=True)
class Infers(Phase):
    """A network computes outputs outside of updates."""

    network: str
    label = "inference"


class Task(NamedTuple):
    """One piece of a rank's work: the number of a phase, a kind of pass, and a micro-batch (0 for a step)."""

    phase: int
    kind: Kind
    micro_batch: int


class Placed(NamedTuple):
    """A task on a stage of its network."""

    task: Task
    stage: int


class UpdateGame(NamedTuple):
    """The properties of an update's losses that determine its work and its memory."""

    segments: Segments  # of each of D's steps
    regularizes: bool  # whether the update has G's path length


def game_of(plan: RunPlan, number: int) -> UpdateGame:
    """Return what an update and D's steps of this number minimize: number 0 with every lazy penalty, 1 with none."""
    path = plan.objective.path_length
    return UpdateGame(plan.objective.segments(number), path is not None and number % path.every == 0)


def phases_of(plan: RunPlan, game: UpdateGame) -> list[Phase]:
    """Return the phases of an update in which each of D's steps has the game's segments; see ``update_phases``."""
    return update_phases(plan, [game.segments] * plan.recipe.objective.d_steps, game.regularizes)


def update_phases(
    plan: RunPlan, steps: Sequence[Segments] = (), regularized: bool = False, has_kept: bool = True
) -> list[Phase]:
    """Return the phases of an update: G makes images, D trains, once or more; G makes images, D judges, G pulls back.

    With ``objective.schedule=generator_first`` D trains last. With ``overlapped`` no network waits for what the other
    learns in the update: D judges first and trains on kept images, and G makes those for D's next update.

    Args:
        plan: The run's plan.
        steps: The segments of each of D's steps; those that are not given have no penalty. In forward mode D is
            differentiated before it trains.
        regularized: Whether G's update carries path length regularization. If it is computed in forward mode, G
            differentiates before the forward passes that it goes backward through.
        has_kept: Whether D has kept images from the update before; if not, an update that overlaps makes them first.
    """
    update = _Update(plan, steps, regularized)
    if not plan.recipe.has_discriminator:
        return [LearnsWithoutD(*update.size(LearnsWithoutD, begins=True))]
    if plan.recipe.objective.schedule == "overlapped":
        update.overlap(has_kept)
    elif plan.recipe.objective.schedule == "generator_first":
        update.begin_with_generator()
    else:
        update.take_turns()
    return update.phases


class _Update:
    """Collects the phases of an update; see ``update_phases``."""

    def __init__(self, plan: RunPlan, steps: Sequence[Segments], regularized: bool) -> None:
        self.phases: list[Phase] = []
        self._plan, self._objective = plan, plan.recipe.objective
        self._steps = steps
        self._regularized, self._keeps_graphs = regularized, plan.keeps_generator_graphs
        self._weighs = self._objective.adversarial.weighs
        self._exposes = self._objective.adversarial.adaptive is not None  # a parameter, by which it weighs

    def take_turns(self) -> None:
        """Let each network learn from the current state of the other."""
        last = self._objective.d_steps - 1
        for d_step in range(self._objective.d_steps):
            shares = self._objective.reuse_fakes and d_step == last
            images = self._make_images_for_own_update(d_step) if shares else self._make_images(d_step)
            self._train(d_step, images)
        if not self._objective.reuse_fakes:
            images = self._make_images_for_own_update()
        self._pull_back(images, self._judge(images))

    def begin_with_generator(self) -> None:
        """Let G learn from D as it is, and then D from the new G, or first from the images of G's update."""
        shares = self._objective.reuse_fakes
        own = self._make_images_for_own_update(0 if shares else None)
        self._pull_back(own, self._judge(own))
        for d_step in range(self._objective.d_steps):
            self._train(d_step, own if shares and d_step == 0 else self._make_images(d_step))

    def overlap(self, has_kept: bool) -> None:
        """Let each network learn from the other as it was before the update, and D from images of the G before that.

        Ranks send images and gradients in the order in which they are read.
        """
        num = self._objective.d_steps
        shared = 2 * num - 1 if self._objective.reuse_fakes else None
        own = self._make_images_for_own_update(shared)
        grads = self._judge(own)
        for d_step in range(num):
            self._train(d_step, None if has_kept else self._make_images(d_step))
        made = {d_step: own if d_step == shared else self._make_images(d_step) for d_step in range(num, 2 * num)}
        self._pull_back(own, grads)
        for d_step, images in made.items():
            self._add(Keeps(*self.size(Keeps), images_from=images, d_step=d_step))

    def _add(self, phase: Phase) -> int:
        self.phases.append(phase)
        return len(self.phases) - 1

    def size(self, kind: type[Phase], segments: int = 1, shrink: int = 1, begins: bool = False) -> tuple[int, int, int]:
        """Return a phase's ``num``, ``num_samples`` and ``num_moving``; ``begins`` is whether an update does."""
        recipe = self._plan.recipe
        num = recipe.accumulation_of(kind.update_of)
        num_samples = segments * recipe.batch // (num * self._plan.placement(kind.network).num_replicas) // shrink
        if recipe.statistics == "every_pass":
            begins = issubclass(kind, (MakesImages, Trains, Judges, LearnsWithoutD))
        return num, num_samples, begins * (num if recipe.statistics == "every_pass" else 1)

    def _penalize_own(self, d_step: int | None) -> tuple[int | None, int]:
        """Return ``tangents_from`` and ``num_twice`` of G's next passes; it may differentiate before them."""
        path = self._objective.path_length
        if not (self._regularized and path):
            return None, 0
        size = self.size(DifferentiatesStyles, shrink=path.batch_shrink)
        if not self._plan.differentiates_forward("generator"):
            return None, size[1]
        return self._add(DifferentiatesStyles(*size, d_step=d_step)), 0

    def _make_images(self, d_step: int) -> int:
        return self._add(MakesImages(*self.size(MakesImages), d_step=d_step))

    def _make_images_for_own_update(self, d_step: int | None = None) -> int:
        """Make the images of G's update, which may also serve one of D's steps."""
        keeps, size = self._keeps_graphs, self.size(MakesOwnImages, begins=True)
        tangents, twice = self._penalize_own(d_step) if keeps else (None, 0)
        how = {"keeps_graphs": keeps, "exposes": self._exposes and not keeps}
        return self._add(MakesOwnImages(*size, d_step=d_step, tangents_from=tangents, num_twice=twice, **how))

    def _train(self, d_step: int, images: int | None) -> None:
        own = self._steps[d_step] if d_step < len(self._steps) else Segments()
        num, tangents, shrink = own.trains, None, self._objective.batch_shrink
        units = num_images(num, shrink, shrink)  # of a real segment, ``shrink``
        if own.checks:
            _, num_samples, _ = self.size(Checks, units, shrink)
            self._add(Checks(1, num_samples, segments=num, images_from=images, d_step=d_step))
        if own.differentiated and self._plan.differentiates_forward("discriminator"):
            at, read = own.differentiated, None if own.differentiated == 1 else images
            size = self.size(DifferentiatesImages, at, shrink, begins=True)
            tangents = self._add(DifferentiatesImages(*size, segments=at, images_from=read, d_step=d_step))
        size, twice = self.size(Trains, units, shrink, begins=tangents is None), 0
        if own.differentiated and tangents is None:
            twice = size[1] if shrink == 1 else self.size(Trains, own.differentiated, shrink)[1]
        trains = Trains(*size, segments=num, images_from=images, d_step=d_step, tangents_from=tangents, num_twice=twice)
        self._add(trains)

    def _judge(self, images: int) -> int:
        num = 1 + self._objective.pairs
        return self._add(Judges(*self.size(Judges, num), segments=num, images_from=images))

    def _pull_back(self, images: int, grads: int) -> None:
        made, keeps = self.phases[images], self._keeps_graphs
        if self._weighs:
            size = self.size(Weighs)
            exposing = images if self._exposes else None
            grads = self._add(Weighs(*size, grads_from=grads, graphs_from=exposing, keeps_graphs=keeps))
        tangents, twice = (made.tangents_from, made.num_twice) if keeps else self._penalize_own(made.d_step)
        size, graphs = self.size(PullsBack), images if keeps else None
        self._add(PullsBack(*size, grads_from=grads, graphs_from=graphs, tangents_from=tangents, num_twice=twice))
