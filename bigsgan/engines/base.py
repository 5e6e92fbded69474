"""The protocol of an engine, the same for every layout of a network.

The two networks meet only at the image: an engine never sees the other's graph. An update is a list of phases
(engines/phases.py). A ``Work`` is a phase with its inputs, loss and results; the engines compute it task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bigsgan.engines.outcomes import Outcome, Outcomes
from bigsgan.engines.phases import Phase, Task
from bigsgan.models.network import LayerStack

MicroBatch = tuple[Tensor, ...]
"""Inputs of one forward pass on this rank: (latents, labels) of a generator, (images, labels) of a discriminator."""


class LossFunction(Protocol):
    """Turns a network's outputs into the scalar loss of one micro-batch."""

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss contains a gradient with respect to the first input (exact R1 or R2).

        Unless the phase carries tangents, the engine must then track the first input through the forward pass and keep
        the parameters gathered for a double backward.
        """

    @property
    def num_segments(self) -> int:
        """Number of parts of a micro-batch, such as real and fake, whose batch statistics are kept apart.

        They are equal in a network with such statistics.
        """

    @property
    def reads_features(self) -> bool:
        """Whether the loss reads the outputs of the layers before the last; never if the network is in stages."""

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss over this rank's samples of the micro-batch, a float32 scalar.

        ``tangents`` are those of the outputs, if the phase carries any; ``inputs`` are empty for a D in stages.
        If the phase has ``targets``, ``features`` are D's predictions of them, followed by the targets.
        """


class TwiceDifferentiated(LossFunction, Protocol):
    """A loss with ``differentiates_inputs``."""

    def split(self, inputs: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """Return the samples that are differentiated twice, and the others, which are not if there are any."""

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """Join the outputs of both."""


class Rates(NamedTuple):
    """An optimizer's settings for one update."""

    lr: float  # learning rate
    beta2: float | None = None  # Adam's second decay rate; None leaves it as it is
    factors: tuple[float, ...] = ()  # of the learning rate, by the number of the recipe's group of parameters


class Regularizer(Protocol):
    """A loss that looks inside a network."""

    def forward(self, network: LayerStack, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the outputs and the inner tensor that the loss reads."""

    def penalty(self, outputs: Tensor, inner: Tensor, inputs: MicroBatch) -> Tensor:
        """Return the mean loss over this rank's samples of the micro-batch; it can be differentiated twice."""

    def along(self, tangents: Tensor, inputs: MicroBatch) -> Tensor:
        """Return a scalar with the gradient of the loss, given the outputs' tangents, if the phase carries any."""


class Piece(NamedTuple):
    """A part of one parameter, and its place in a shard."""

    name: str  # the parameter's name
    offset: int  # first element of the part in the flattened parameter
    numel: int  # elements of the part
    start: int  # first element of the part in the shard


class Shard(NamedTuple):
    """One flat float32 tensor of parameters that this rank owns, and its contents."""

    master: Tensor  # the values that the optimizer updates
    # the optimizer's tensors and numbers for it, such as ``exp_avg``; empty before the first update
    optimizer_state: dict[str, Any]
    pieces: list[Piece]  # the parts of parameters in it; elements outside of every piece are padding
    # index of this copy of the shard, and the number of copies over all replicas; (0, 1) for an only one
    copies: tuple[int, int] = (0, 1)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type of an engine's passes, by the precision of its DeepSpeed file."""


class Graph(NamedTuple):
    """What the forward pass of a micro-batch leaves for its backward pass, on this rank."""

    outputs: Sequence[Tensor]  # a loss; or images, with a loss of G's own; or what goes to the next pipeline stage
    inputs: Sequence[Tensor] = ()  # of these, the floating ones get gradients
    # images, and the parameter by which the phase that weighs differentiates them, or its copy
    weighed: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class Work:
    """A phase of an update, with its inputs and loss on this rank, and its results so far."""

    phase: Phase
    # Returns the inputs of a micro-batch, given its number and the images that the phase reads, or None. Called on the
    # ranks where the network reads its inputs; returns the same inputs each time.
    inputs: Callable[[int, Tensor | None], MicroBatch]
    # turns the network's outputs into a loss; None if only the loss's gradient at the outputs is given
    loss: LossFunction | None = None
    # adds a loss to the phase's forward passes; of tangents only, if the network is in stages
    regularizer: Regularizer | None = None
    # Of G's outputs: adds a loss to the phase's forward passes, given images, what G returns after them, inputs, and
    # the phase's targets.
    of_outputs: Callable[[Tensor, Sequence[Tensor], MicroBatch, MicroBatch], Tensor] | None = None
    # Of a phase that weighs: takes the number of a micro-batch, and by how much each part of the loss would move the
    # exposed parameter. Of the one that pulls back: returns the gradient at G's images, given those parts.
    weigh: Callable[[int, Sequence[Tensor]], None] | None = None
    weighted: Callable[[int, Tensor], Tensor] = lambda index, grads: grads
    exposed: str = ""  # end of the name of the parameter by which the phase that weighs differentiates
    ahead: int = 0  # number of layers before the tensor by which a phase differentiates, or at which its tangents begin
    rates: Rates | None = None  # the optimizer's settings, if the phase steps
    # where D judges or a network differentiates: takes the number of a micro-batch, the tensor x that is differentiated
    # by, and dL/dx, float32; returns the gradient at G's images, or the direction of tangents
    gradient: Callable[[int, Tensor, Tensor], Tensor] | None = None
    # Returns a teacher's features, class tokens (n, W) and patch tokens (n, P, W), of the real images of a micro-batch,
    # given its number; nothing unless the loss compares D's predictions with them. Where G learns alone, the real
    # images (n, C, H, W). Called on the ranks that compute the loss, once a forward pass.
    targets: Callable[[int], MicroBatch] = lambda index: ()
    # by micro-batch, on the ranks that compute them: images, detached, or gradients at images
    outputs: dict[int, Tensor] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)  # by micro-batch, for its backward pass


class Engine(Protocol):
    """One network with its optimizer, laid out over all ranks or some.

    Attributes:
        network: The layers that this rank computes.
        replica: Index of this rank among those that compute the same layers.
        division: Bounds of the stages into which the layers are divided; None if each rank has all layers.
        replays: Whether passes replay CUDA graphs; their outputs last until the next adversarial update begins.
        outcomes: Which updates changed the parameters, and which were skipped for gradients that are not finite.
        scales_loss: Whether overflow is expected, as with fp16's loss scaling; such updates are skipped.
        grad_norm: Norm of the last update's averaged gradient, before clipping; None if only other ranks know it.
        is_held: Whether this rank holds a part of the network.
        after_update: Called on every rank after each update, applied or skipped.
    """

    network: LayerStack
    replica: int
    division: list[int] | None
    replays: bool
    outcomes: Outcomes
    scales_loss: bool
    grad_norm: Tensor | float | None
    is_held: bool
    after_update: Callable[[], None]

    def expect(self, phase: Phase, task: Task) -> None:
        """Post the receives for what a task needs from other ranks of the network, ahead of the task."""

    def receive(self, phase: Phase, task: Task) -> None:
        """Wait until what ``expect`` announced for a task has arrived."""

    def forward(self, work: Work, index: int, images: Tensor | None, tangents: Tensor | None = None) -> None:
        """Go forward with a micro-batch, with the images and the tangents that its phase reads.

        The tangents belong to the first entry of the carry after the first ``work.ahead`` layers.
        """

    def backward(self, work: Work, index: int, grads: Tensor | None) -> None:
        """Go backward: from the loss or, where G pulls back, from d(mean loss over the micro-batch)/d(its images).

        Where D judges, parameters, gradients and all state stay untouched.
        """

    def step(self, work: Work) -> None:
        """Update on the mean over the phase's micro-batches; set ``outcomes``, ``grad_norm`` and the shards."""

    def settle(self) -> None:
        """Wait until all that was sent to other ranks of the network has arrived."""

    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Return the outputs of one micro-batch, for sampling. All ranks of this rank's replica call this together."""

    def observe_seam(self, applied: Outcome) -> None:
        """Note whether the gradients at images were finite: fp16 adjusts the scale of D's judging accordingly."""

    @property
    def loss_scale(self) -> float:
        """The factor on losses before the backward pass; 1 unless fp16."""

    def shards(self) -> list[Shard]:
        """Return this rank's part of the parameters and of the optimizer's state; tensors are live, not copies."""

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum a tensor, in place, over the ranks that compute the same layers."""

    def publish(self) -> None:
        """Bring the network's parameters up to date with the shards' masters."""

    def scalars(self) -> dict[str, float]:
        """Return the numbers to save beside the shards: counters and loss scales."""

    def load_scalars(self, values: dict[str, float]) -> None:
        """Restore the numbers that ``scalars`` returned."""

    def load_optimizer_state(self, shard: int, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of one shard: tensors laid out as its master, and the number ``step``."""

    def destroy(self) -> None:
        """Release everything the engine holds in this process; it cannot be used afterwards."""
