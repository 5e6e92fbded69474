"""The phases of an adversarial update, as data. Executors, planner, profiler and logs read this one list.

In a phase, micro-batches go through one network forward, backward or both; it may end in an optimizer step. A rank
computes a phase as tasks. This file has no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from bigsgan.config import RunPlan
from bigsgan.config.objective import Segments

Does = Literal["makes images", "checks", "differentiates", "trains", "judges", "pulls back", "keeps"]
Kind = Literal["forward", "backward", "step"]


class Phase(NamedTuple):
    """One phase of an update."""

    network: str  # the network that computes
    # G makes images; D trains on real images and G's; D judges G's images, which gives gradients at them; G pulls those
    # gradients back to its parameters and steps. For a penalty in forward mode, a network first differentiates its
    # outputs: D by its images, G by its styles. D checks a finite difference in the same way, on one micro-batch. Where
    # updates overlap, D keeps G's images for its steps of the next update.
    does: Does
    num: int  # number of micro-batches
    num_samples: int  # samples of a micro-batch on one replica, in all its segments
    # whether an update of this phase's network begins here; its first micro-batch moves batch statistics and power
    # iterations, unless they move in every pass
    begins_update: bool = False
    keeps_graphs: bool = False  # whether the phase that pulls back goes backward through the forward passes of this one
    recomputes: bool = False  # whether this phase, which pulls back, repeats the forward passes
    images_from: int | None = None  # number of the phase whose images this one reads
    grads_from: int | None = None  # number of the phase whose gradients at the images this one reads
    graphs_from: int | None = None  # number of the phase through whose forward passes this one goes backward
    # number of the phase, of the same network, whose gradients are the direction of the tangents that this one's passes
    # carry, forward and backward
    tangents_from: int | None = None
    # Number of D's step that this phase is a part of, or whose images it makes or keeps. It counts from the update's
    # first step, on into the next update. None if the phase serves G's update alone.
    d_step: int | None = None
    segments: int = 1  # equal parts of a micro-batch: of D's, real and fake images and what penalties add
    every_pass: bool = False  # whether state moves in all passes that make images, train or judge

    def moves(self, index: int) -> bool:
        """Whether the pass of a micro-batch moves batch statistics and power iterations."""
        if self.every_pass:
            return self.does in ("makes images", "trains", "judges")
        return self.begins_update and index == 0

    @property
    def forward(self) -> bool:
        """Whether micro-batches go forward."""
        return self.does != "pulls back" or self.recomputes

    @property
    def backward(self) -> bool:
        """Whether micro-batches go backward."""
        return self.does not in ("makes images", "keeps")

    @property
    def step(self) -> bool:
        """Whether the phase ends in an optimizer step."""
        return self.does in ("trains", "pulls back")

    @property
    def frozen(self) -> bool:
        """Whether the backward pass computes gradients at the inputs only, which halves its cost."""
        return self.does in ("checks", "differentiates", "judges")

    @property
    def samples_of_work(self) -> int:
        """Samples of a micro-batch, weighted by cost: one with tangents counts twice."""
        return self.num_samples * (1 if self.tangents_from is None else 2)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the phases whose images or gradients this one reads."""
        numbers = (self.images_from, self.grads_from, self.tangents_from if self.forward else None)
        return tuple(number for number in numbers if number is not None)

    @property
    def label(self) -> str:
        """The phase's name in timelines, profiles and logs."""
        return f"{self.network[0].upper()} {self.does}"


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

    With ``objective.schedule=overlapped`` no network waits within an update for what the other learns in it: D judges
    first and trains on images that it has kept, and G makes the images for D's next update.

    Args:
        plan: The run's plan.
        steps: The segments of each of D's steps; those that are not given have no penalty. In forward mode D is
            differentiated before it trains.
        regularized: Whether G's update carries path length regularization. If it is computed in forward mode, G
            differentiates before the forward passes that it goes backward through.
        has_kept: Whether D has kept images from the update before; if not, an update that overlaps makes them first.
    """
    update = _Update(plan, steps, regularized)
    if plan.recipe.objective.schedule == "overlapped":
        update.overlap(has_kept)
    else:
        update.take_turns()
    return update.phases


class _Update:
    """Collects the phases of an update; see ``update_phases``."""

    def __init__(self, plan: RunPlan, steps: Sequence[Segments], regularized: bool) -> None:
        self.phases: list[Phase] = []
        self._plan, self._objective = plan, plan.recipe.objective
        self._steps = steps
        self._differentiates_styles = regularized and plan.differentiates_forward("generator")
        self._keeps_graphs = plan.keeps_generator_graphs

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
            self._add("discriminator", "keeps", "discriminator", images_from=images, d_step=d_step)

    def _add(self, network: str, does: Does, update_of: str, segments: int = 1, shrink: int = 1, **more: Any) -> int:
        recipe = self._plan.recipe
        num = recipe.accumulation_of(update_of)
        num_samples = segments * recipe.batch // (num * self._plan.placement(network).num_replicas) // shrink
        num = 1 if does == "checks" else num
        more["every_pass"] = recipe.statistics == "every_pass"
        self.phases.append(Phase(network, does, num, num_samples, segments=segments, **more))
        return len(self.phases) - 1

    def _differentiate_styles(self, d_step: int | None) -> int | None:
        section = self._objective.path_length
        if not (self._differentiates_styles and section):
            return None
        return self._add("generator", "differentiates", "generator", shrink=section.batch_shrink, d_step=d_step)

    def _make_images(self, d_step: int) -> int:
        return self._add("generator", "makes images", "discriminator", d_step=d_step)

    def _make_images_for_own_update(self, d_step: int | None = None) -> int:
        """Make the images of G's update, which may also serve one of D's steps."""
        tangents = self._differentiate_styles(d_step) if self._keeps_graphs else None
        more: dict[str, Any] = {"keeps_graphs": self._keeps_graphs, "tangents_from": tangents, "d_step": d_step}
        return self._add("generator", "makes images", "generator", begins_update=True, **more)

    def _train(self, d_step: int, images: int | None) -> None:
        add = partial(self._add, "discriminator", update_of="discriminator", images_from=images, d_step=d_step)
        own = self._steps[d_step] if d_step < len(self._steps) else Segments()
        if own.checks:
            add("checks", segments=own.trains)
        if own.differentiated and self._plan.differentiates_forward("discriminator"):
            read = None if own.differentiated == 1 else images
            tangents = add("differentiates", segments=own.differentiated, images_from=read, begins_update=True)
            add("trains", segments=own.trains, tangents_from=tangents)
        else:
            add("trains", segments=own.trains, begins_update=True)

    def _judge(self, images: int) -> int:
        return self._add("discriminator", "judges", "generator", 1 + self._objective.pairs, images_from=images)

    def _pull_back(self, images: int, grads: int) -> None:
        if self._keeps_graphs:
            graphs: dict[str, Any] = {"graphs_from": images, "tangents_from": self.phases[images].tangents_from}
        else:
            graphs = {"recomputes": True, "tangents_from": self._differentiate_styles(self.phases[images].d_step)}
        self._add("generator", "pulls back", "generator", grads_from=grads, **graphs)


def awaited(task: Task, stage: int, phases: Sequence[Phase], last: Mapping[str, int]) -> Placed | None:
    """Return the task of another stage, or of the other network, whose result a task reads, and its stage.

    ``stage`` is the task's own, and ``last`` the number of each network's last stage.
    """
    phase = phases[task.phase]
    if task.kind == "step":  # it reads the gradients of all stages; the first stage's come last
        return Placed(Task(task.phase, "backward", phase.num - 1), 0) if stage else None
    is_forward = task.kind == "forward"
    if stage != (0 if is_forward else last[phase.network]):
        return Placed(task, stage + (-1 if is_forward else 1))
    source = phase.images_from if is_forward else phase.grads_from
    if source is None:
        return None
    return Placed(Task(source, task.kind, task.micro_batch), last[phases[source].network] if is_forward else 0)


def in_turn(number: int, phase: Phase, phases: Sequence[Phase] = ()) -> Iterator[Task]:
    """Yield the tasks of a phase of a network without stages: micro-batch by micro-batch.

    Given all phases, each micro-batch with tangents comes right after the one that gives their direction.
    """
    for index in range(phase.num):
        if phases and phase.tangents_from is not None:
            yield from _of_micro_batch(phase.tangents_from, phases[phase.tangents_from], index)
        yield from _of_micro_batch(number, phase, index)
    if phase.step:
        yield Task(number, "step", 0)


def all_in_turn(phases: Sequence[Phase]) -> Iterator[Task]:
    """Yield the tasks of an update of networks without stages that meet on each rank.

    They go phase by phase; but the micro-batches of G's own update go through its phases one by one, so that one graph
    is alive at a time. Where updates overlap, G's update comes first and D's steps last; before G's step, G makes the
    images that D trains on or keeps.
    """
    last = max(number for number, phase in enumerate(phases) if phase.does == "pulls back")
    trained = [number for number, phase in enumerate(phases) if phase.does == "trains"]
    judged = phases[last].grads_from
    if judged is None or judged > trained[0]:
        first = 1 + trained[-1]
        yield from _by_phase(range(first), phases)
        yield from _by_micro_batch(range(first, last + 1), phases)
        return
    own = [n for n in range(last) if _is_of_own_update(phases[n])]
    made = [n for n, phase in enumerate(phases) if phase.does in ("makes images", "keeps") and n not in own]
    yield from _by_micro_batch([*own, last], phases, _by_phase(made, phases))
    yield from _by_phase([n for n in range(last) if n not in (*own, *made)], phases)


def _is_of_own_update(phase: Phase) -> bool:
    """Whether a phase before G pulls back belongs to G's update, even if its images serve D too."""
    if phase.network == "discriminator":
        return phase.does == "judges"
    return phase.begins_update or phase.does == "differentiates"


def _by_phase(numbers: Iterable[int], phases: Sequence[Phase]) -> Iterator[Task]:
    for number in numbers:
        if phases[number].does != "differentiates":  # those go with the phase that carries their tangents
            yield from in_turn(number, phases[number], phases)


def _by_micro_batch(numbers: Sequence[int], phases: Sequence[Phase], meanwhile: Iterable[Task] = ()) -> Iterator[Task]:
    """Yield the phases up to G's pulling back, then G's step; ``meanwhile`` comes before the last pulling back."""
    for index in range(phases[numbers[-1]].num):
        for number in numbers:
            if number == numbers[-1] and index == phases[number].num - 1:
                yield from meanwhile
            yield from _of_micro_batch(number, phases[number], index)
    yield Task(numbers[-1], "step", 0)


def hold_back_steps(placed: Iterable[Placed], phases: Sequence[Phase]) -> list[Placed]:
    """Move each step of D to right before its next task, so that its gradients may travel until then."""
    found: list[Placed] = []
    held: list[Placed] = []
    for one in placed:
        phase = phases[one.task.phase]
        if phase.network == "discriminator" and phase.does != "keeps":
            if one.task.kind == "step":
                held.append(one)
                continue
            found += held
            held = []
        found.append(one)
    return found + held


def _of_micro_batch(number: int, phase: Phase, index: int) -> Iterator[Task]:
    if phase.forward:
        yield Task(number, "forward", index)
    if phase.backward:
        yield Task(number, "backward", index)
