"""The protocol of an engine, the same for every layout of a network.

The two networks meet only at the image: an engine never sees the other's graph. An update is a list of phases
(engines/phases.py); each with what it computes is a ``Work``, which the engines compute task by task.
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

        Where the phase carries no tangents, the engine must let the forward pass track it and keep the parameters at
        hand for a double backward.
        """
        ...

    @property
    def num_segments(self) -> int:
        """Equal parts of a micro-batch, such as real and fake, whose batch statistics are kept apart."""
        ...

    @property
    def reads_features(self) -> bool:
        """Whether the loss looks at what the layers before the last yield; not where the network is in stages."""
        ...

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Mean loss over this rank's samples of the micro-batch, a float32 scalar.

        ``tangents`` are those of the outputs, where the phase carries some; ``inputs`` are empty for a D in stages.
        Where the phase has ``targets``, ``features`` are what D predicts of them, and they themselves.
        """
        ...


class Rates(NamedTuple):
    """What an optimizer takes for one update.

    Attributes:
        lr: Learning rate.
        beta2: Adam's second decay rate; None leaves it as it is.
    """

    lr: float
    beta2: float | None = None


class Regularizer(Protocol):
    """A loss that looks inside a network."""

    def forward(self, network: LayerStack, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
        """Outputs, and what the loss looks at inside."""
        ...

    def loss(self, outputs: Tensor, inner: Tensor, inputs: MicroBatch) -> Tensor:
        """Mean loss over this rank's samples of the micro-batch, which may be differentiated twice."""
        ...

    def along(self, tangents: Tensor, inputs: MicroBatch) -> Tensor:
        """What has the same gradient, of the outputs' tangents where the phase carries some."""
        ...


class Piece(NamedTuple):
    """Where a part of one parameter lies in one shard.

    Attributes:
        name: Of the parameter.
        offset: First element of the part in the flattened parameter.
        numel: Elements of the part.
        start: First element of the part in the shard.
    """

    name: str
    offset: int
    numel: int
    start: int


class Shard(NamedTuple):
    """One flat float32 tensor of parameters that this rank owns, and what lies in it.

    Attributes:
        master: The values that the optimizer updates.
        optimizer_state: The optimizer's tensors and numbers for it, such as ``exp_avg``; empty before the first update.
        pieces: The parameters in it; elements outside of every piece are padding.
        copies: Which copy of this shard it is, and how many replicas have one; (0, 1) where it is the only one.
    """

    master: Tensor
    optimizer_state: dict[str, Any]
    pieces: list[Piece]
    copies: tuple[int, int] = (0, 1)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of an engine's passes, by the precision that its DeepSpeed file gives."""


@dataclass(eq=False)
class Work:
    """A phase of an update with what it computes on this rank, and what it has computed so far.

    Attributes:
        phase: What it is.
        inputs: Gives the inputs of a micro-batch by its number and the images that the phase reads, None where it reads
            none. Called where the network reads its inputs; the same inputs each time.
        loss: What the network's outputs are turned into; None where nothing is known of it but its gradient at them.
        regularizer: Adds a loss to the phase's forward passes; where the network is in stages, one of tangents.
        ahead: Layers ahead of what a phase differentiates by, or what has the tangents that it begins with.
        rates: Of the optimizer, where the phase steps.
        gradient: Where D judges or a network differentiates, turns the number of a micro-batch, the tensor that is
            differentiated by and dL/d(that), float32, into the gradient at G's images, or the direction of tangents.
        targets: Gives a teacher's features, class tokens (n, W) and patch tokens (n, P, W), of the real images of a
            micro-batch by its number, where D's last layer predicts them; empty where the loss does not compare them.
            Called where the loss is, once a forward pass.
        outputs: By micro-batch, on the ranks where they arise: images, detached, or gradients at images.
        graphs: By micro-batch, what its backward pass will need.
    """

    phase: Phase
    inputs: Callable[[int, Tensor | None], MicroBatch]
    loss: LossFunction | None = None
    regularizer: Regularizer | None = None
    ahead: int = 0
    rates: Rates | None = None
    gradient: Callable[[int, Tensor, Tensor], Tensor] | None = None
    targets: Callable[[int], MicroBatch] | None = None
    outputs: dict[int, Tensor] = field(default_factory=dict)
    graphs: dict[int, Any] = field(default_factory=dict)


def targets_of(work: Work, index: int) -> MicroBatch:
    """A teacher's features of a micro-batch; empty where the loss does not compare any."""
    return () if work.targets is None else work.targets(index)


class Engine(Protocol):
    """One network with its optimizer, laid out over all ranks or some.

    Attributes:
        network: The layers that this rank computes.
        replica: Which of the ranks that compute the same layers this one is.
        division: Bounds of the stages that the layers are divided into; None where each rank has them all.
        replays: Whether passes are CUDA graphs: what they yield lasts until the next adversarial update begins.
        outcomes: Which updates changed the parameters; not those whose gradients were not finite.
        scales_loss: Whether overflow is taken for granted, as fp16's loss scaling does; such updates are skipped.
        grad_norm: Norm of the last update's averaged gradient, before clipping; None where other ranks know it.
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
        """Prepare to receive what a task needs from other ranks of the network, ahead of it."""
        ...

    def receive(self, phase: Phase, task: Task) -> None:
        """Wait for what was expected."""
        ...

    def forward(self, work: Work, index: int, images: Tensor | None, tangents: Tensor | None = None) -> None:
        """Go forward with a micro-batch, with the images and the tangents that its phase reads.

        Tangents are those of the first entry of the carry behind the layers ``work.ahead``.
        """
        ...

    def backward(self, work: Work, index: int, grads: Tensor | None) -> None:
        """Go backward: from the loss or, where G pulls back, from d(mean loss over the micro-batch)/d(its images).

        Where D judges, parameters, gradients and all state stay untouched.
        """
        ...

    def step(self, work: Work) -> None:
        """Update on the mean over the phase's micro-batches; then ``outcomes``, ``grad_norm`` and the shards tell."""
        ...

    def settle(self) -> None:
        """Wait until all that was sent to other ranks of the network has arrived."""
        ...

    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Outputs of one micro-batch of this rank's replica, on every rank of it and at once; for sampling."""
        ...

    def observe_seam(self, applied: Outcome) -> None:
        """Learn whether gradients at images could be used: fp16 scales the backward pass of D's judgement by it."""
        ...

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward pass; 1 unless fp16."""
        ...

    def shards(self) -> list[Shard]:
        """This rank's part of the parameters and of the optimizer's state; tensors are live, not copies."""
        ...

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum a tensor, in place, over the ranks that compute the same layers."""
        ...

    def publish(self) -> None:
        """Bring the network's parameters up to date with the shards' masters."""
        ...

    def scalars(self) -> dict[str, float]:
        """Numbers to save beside the shards: counters and loss scales."""
        ...

    def load_scalars(self, values: dict[str, float]) -> None:
        """Restore what ``scalars`` gave."""
        ...

    def load_optimizer_state(self, shard: int, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of one shard: tensors that lie as its master does, and the number ``step``."""
        ...

    def destroy(self) -> None:
        """Release what the engine holds in this process; it cannot be used afterwards."""
        ...
