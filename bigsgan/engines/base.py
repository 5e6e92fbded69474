"""What the adversarial step asks of an engine, whichever way its network is laid out.

The two networks meet only at the image: an engine never sees the other's graph. Every verb takes a whole phase, the
micro-batches of one update, so that an engine may schedule them as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from bigsgan.models.network import LayerStack

MicroBatch = tuple[Tensor, ...]
"""Inputs of one forward pass on this rank: (latents, labels) of a generator, (images, labels) of a discriminator."""


class LossFunction(Protocol):
    """Turns a network's outputs into the scalar loss of one micro-batch."""

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss contains a gradient with respect to the first input (exact R1 or R2).

        The engine must then let the forward pass track it and keep the parameters at hand for a double backward.
        """
        ...

    def __call__(self, outputs: Tensor, inputs: MicroBatch) -> Tensor:
        """Mean loss over this rank's samples of the micro-batch, a float32 scalar."""
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
    """

    master: Tensor
    optimizer_state: dict[str, Any]
    pieces: list[Piece]


class Engine(Protocol):
    """One network with its optimizer, laid out over all ranks."""

    network: LayerStack
    applied: bool
    """Whether the last update changed the parameters; not where gradients were not finite."""
    num_applied: int
    num_skipped: int
    grad_norm: Tensor | float
    """Norm of the last update's averaged gradient, before clipping."""

    def infer(self, micro_batches: Sequence[MicroBatch], moving: bool = False) -> list[Tensor]:
        """Outputs without a graph; moves no state unless told to (standing statistics)."""
        ...

    def train(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, lr: float) -> None:
        """Update on the mean loss of the micro-batches."""
        ...

    def train_through(
        self, micro_batches: Sequence[MicroBatch], output_grads: Callable[[int, Tensor], Tensor], lr: float
    ) -> None:
        """Update on a loss of which only the gradient at the outputs is known.

        Args:
            micro_batches: The inputs.
            output_grads: Called with the number of a micro-batch and its outputs, gives d(mean loss)/d(outputs).
            lr: Learning rate.
        """
        ...

    def input_grads(self, micro_batch: MicroBatch, loss: LossFunction) -> Tensor:
        """d(loss)/d(first input), float32; parameters, their gradients and all state stay untouched."""
        ...

    def observe_seam(self, applied: bool) -> None:
        """Learn whether gradients from ``input_grads`` could be used: fp16 scales its backward pass accordingly."""
        ...

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward pass; 1 unless fp16."""
        ...

    def shards(self) -> list[Shard]:
        """This rank's part of the parameters and of the optimizer's state; tensors are live, not copies."""
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
        """Replace the optimizer's state of one shard."""
        ...
