"""The phases of an adversarial update, as data. Executors, planner, profiler and logs read this one list.

A phase is a number of micro-batches that go through one network forward, backward or both, and may end in an optimizer
step. On a device it becomes tasks. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from bigsgan.config import RunPlan

Does = Literal["makes images", "checks", "differentiates", "trains", "judges", "pulls back"]
Kind = Literal["forward", "backward", "step"]


class Phase(NamedTuple):
    """One phase of an update.

    Attributes:
        network: Which of the networks goes through.
        does: G makes images; D trains on real images and G's; D judges G's images, which gives gradients at them; G
            pulls those gradients back to its parameters and steps. Where a penalty is computed in forward mode, a
            network differentiates its outputs before: D by its images, G by its styles. So D checks a finite
            difference, on one micro-batch.
        num: Micro-batches.
        num_samples: In each of them, on one replica.
        begins_update: Whether its first micro-batch moves batch statistics and power iterations, for the update of its
            network.
        keeps_graphs: Whether the phase that pulls back completes the forward passes of this one.
        recomputes: Whether pulling back repeats the forward passes.
        images_from: Number of the phase whose images are read.
        grads_from: Number of the phase whose gradients at the images are read.
        graphs_from: Number of the phase whose forward passes are completed.
        tangents_from: Number of the phase, of the same network, whose gradients are the direction of the tangents that
            this one's passes carry, forward and backward.
    """

    network: str
    does: Does
    num: int
    num_samples: int
    begins_update: bool = False
    keeps_graphs: bool = False
    recomputes: bool = False
    images_from: int | None = None
    grads_from: int | None = None
    graphs_from: int | None = None
    tangents_from: int | None = None

    @property
    def forward(self) -> bool:
        """Whether micro-batches go forward."""
        return self.does != "pulls back" or self.recomputes

    @property
    def backward(self) -> bool:
        """Whether micro-batches go backward."""
        return self.does != "makes images"

    @property
    def step(self) -> bool:
        """Whether the phase ends in an optimizer step."""
        return self.does in ("trains", "pulls back")

    @property
    def frozen(self) -> bool:
        """Whether the backward pass computes gradients at inputs alone, which costs half."""
        return self.does in ("checks", "differentiates", "judges")

    @property
    def samples_of_work(self) -> int:
        """Samples of a micro-batch, by what they cost: tangents are computed beside the values."""
        return self.num_samples * (1 if self.tangents_from is None else 2)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the phases whose images or gradients are read."""
        numbers = (self.images_from, self.grads_from, self.tangents_from if self.forward else None)
        return tuple(number for number in numbers if number is not None)

    @property
    def label(self) -> str:
        """Name in timelines, profiles and logs."""
        return f"{self.network[0].upper()} {self.does}"


class Task(NamedTuple):
    """One piece of a device's work: of a phase, what, and for which micro-batch (0 for a step)."""

    phase: int
    kind: Kind
    micro_batch: int


def update_phases(
    plan: RunPlan, penalised: Sequence[bool] = (), regularised: bool = False, checked: Sequence[bool] = ()
) -> list[Phase]:
    """The phases of an update: G makes images, D trains, once or more; G makes images, D judges, G pulls back.

    Segments that penalties add to D's micro-batches are not in ``num_samples``: not every update has them.

    Args:
        plan: The run's.
        penalised: Which of D's steps carry an exact penalty; where it is computed in forward mode, D differentiates
            before it trains.
        regularised: Whether G's update carries path length regularization; where it is computed in forward mode, G
            differentiates before the forward passes that it goes backward through.
        checked: In which of them a finite difference is compared with the exact penalty.
    """
    recipe, objective, keeps = plan.recipe, plan.recipe.objective, plan.keeps_generator_graphs
    phases: list[Phase] = []

    def add(network: str, does: Does, update_of: str, segments: int = 1, shrink: int = 1, **more: Any) -> int:
        num = recipe.accumulation_of(update_of)
        num_samples = segments * recipe.batch // (num * plan.placement(network).num_replicas) // shrink
        phases.append(Phase(network, does, 1 if does == "checks" else num, num_samples, **more))
        return len(phases) - 1

    def differentiate_styles() -> int | None:
        if not (regularised and objective.path_length and plan.differentiates_forward("generator")):
            return None
        return add("generator", "differentiates", "generator", shrink=objective.path_length.batch_shrink)

    def make_images_for_own_update() -> int:
        tangents = differentiate_styles() if keeps else None
        more: dict[str, Any] = {"keeps_graphs": keeps, "tangents_from": tangents}
        return add("generator", "makes images", "generator", begins_update=True, **more)

    for d_step in range(objective.d_steps):
        shares = objective.reuse_fakes and d_step == objective.d_steps - 1
        images = make_images_for_own_update() if shares else add("generator", "makes images", "discriminator")
        for_training: dict[str, Any] = {"segments": 2, "images_from": images}
        if d_step < len(checked) and checked[d_step]:
            add("discriminator", "checks", "discriminator", **for_training)
        if plan.differentiates_forward("discriminator") and d_step < len(penalised) and penalised[d_step]:
            tangents = add("discriminator", "differentiates", "discriminator", begins_update=True, **for_training)
            add("discriminator", "trains", "discriminator", tangents_from=tangents, **for_training)
        else:
            add("discriminator", "trains", "discriminator", begins_update=True, **for_training)
    if not objective.reuse_fakes:
        images = make_images_for_own_update()
    segments = 2 if objective.loss == "relativistic" or objective.feature_matching else 1  # real and fake
    grads = add("discriminator", "judges", "generator", segments, images_from=images)
    if keeps:
        graphs: dict[str, Any] = {"graphs_from": images, "tangents_from": phases[images].tangents_from}
    else:
        graphs = {"recomputes": True, "tangents_from": differentiate_styles()}
    add("generator", "pulls back", "generator", grads_from=grads, **graphs)
    return phases


def in_turn(number: int, phase: Phase, phases: Sequence[Phase] = ()) -> Iterator[Task]:
    """The tasks of a phase without stages: micro-batch by micro-batch.

    Given all phases, each micro-batch with tangents comes right behind the one that gives their direction.
    """
    for index in range(phase.num):
        if phases and phase.tangents_from is not None:
            yield from _of_micro_batch(phase.tangents_from, phases[phase.tangents_from], index)
        yield from _of_micro_batch(number, phase, index)
    if phase.step:
        yield Task(number, "step", 0)


def all_in_turn(phases: Sequence[Phase]) -> Iterator[Task]:
    """The tasks of an update of networks without stages that meet on each rank.

    Phase by phase; but the micro-batches of G's own update go through its phases one by one, so that the graph of one
    is alive at a time.
    """
    first = 1 + max(number for number, phase in enumerate(phases) if phase.does == "trains")
    for number in range(first):
        if phases[number].does != "differentiates":  # which goes with the phase that carries its tangents
            yield from in_turn(number, phases[number], phases)
    for index in range(phases[-1].num):
        for number in range(first, len(phases)):
            yield from _of_micro_batch(number, phases[number], index)
    yield Task(len(phases) - 1, "step", 0)


def hold_back_steps(programs: Iterable[Iterable[Task]], phases: Sequence[Phase], network: str) -> list[list[Task]]:
    """The same tasks with each step of a network right before its next task: until then its gradients may travel."""
    found: list[list[Task]] = []
    held: list[Task] = []
    for program in programs:
        found.append([])
        for task in program:
            if phases[task.phase].network == network:
                found[-1] += held
                held = []
                if task.kind == "step":
                    held.append(task)
                    continue
            found[-1].append(task)
    found[-1] += held
    return found


def _of_micro_batch(number: int, phase: Phase, index: int) -> Iterator[Task]:
    if phase.forward:
        yield Task(number, "forward", index)
    if phase.backward:
        yield Task(number, "backward", index)
