"""What the adversarial step asks of an engine, whichever way its network is laid out.

The two networks meet only at the image: an engine never sees the other's graph. Every verb takes a whole phase, the
micro-batches of one update, and yields sequences whose items are there on demand, so that an engine may schedule phases
as it likes; ``finish`` waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bigsgan.engines.outcomes import Outcome, Outcomes
from bigsgan.engines.sequences import MicroBatch, MicroBatches
from bigsgan.models.network import LayerStack


class LossFunction(Protocol):
    """Turns a network's outputs into the scalar loss of one micro-batch."""

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss contains a gradient with respect to the first input (exact R1 or R2).

        The engine must then let the forward pass track it and keep the parameters at hand for a double backward.
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

    def __call__(self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = ()) -> Tensor:
        """Mean loss over this rank's samples of the micro-batch, a float32 scalar."""
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


class Engine(Protocol):
    """One network with its optimizer, laid out over all ranks.

    Attributes:
        network: The layers that this rank computes.
        replica: Which of the ranks that compute the same layers this one is.
        division: Bounds of the stages that the layers are divided into; None where each rank has them all.
        replays: Whether passes are CUDA graphs: what they yield lasts until the next adversarial update begins.
        outcomes: Which updates changed the parameters; not those whose gradients were not finite.
        scales_loss: Whether overflow is taken for granted, as fp16's loss scaling does; such updates are skipped.
        grad_norm: Norm of the last update's averaged gradient, before clipping.
        after_update: Called on every rank after each update, applied or skipped.
    """

    network: LayerStack
    replica: int
    division: list[int] | None
    replays: bool
    outcomes: Outcomes
    scales_loss: bool
    grad_norm: Tensor | float
    after_update: Callable[[], None]

    def infer(self, micro_batches: MicroBatches, moving: bool = False) -> Sequence[Tensor]:
        """Outputs without a graph, on the ranks where they arise; moves no state unless told to."""
        ...

    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Outputs of one micro-batch of this rank's replica, on every rank of it and at once; for sampling."""
        ...

    def train(self, micro_batches: MicroBatches, loss: LossFunction, rates: Rates) -> None:
        """Update on the mean loss of the micro-batches, by the time that ``finish`` returns.

        So do ``outcomes``, ``grad_norm`` and the shards tell of it then.
        """
        ...

    def forward(self, micro_batches: MicroBatches, regularizer: Regularizer | None = None) -> Sequence[Tensor]:
        """Outputs, detached, of a forward pass that ``backward`` completes to an update. Nothing may come between.

        Args:
            micro_batches: Inputs.
            regularizer: Adds a loss; not where the network is in stages.
        """
        ...

    def backward(self, output_grads: Sequence[Tensor], rates: Rates) -> None:
        """Update on a loss of which only the gradient at the outputs is known.

        Args:
            output_grads: d(mean loss over a replica's micro-batch)/d(outputs) for each one given to ``forward``.
            rates: Of the optimizer.
        """
        ...

    def input_grads(self, micro_batches: MicroBatches, loss: LossFunction) -> Sequence[Tensor]:
        """d(loss)/d(first input), float32, of each micro-batch; parameters, gradients and all state stay untouched."""
        ...

    def finish(self) -> None:
        """Complete every phase that was asked for."""
        ...

    def observe_seam(self, applied: Outcome) -> None:
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
        """Replace the optimizer's state of one shard: tensors that lie as its master does, and the number ``step``."""
        ...

    def destroy(self) -> None:
        """Release what the engine holds in this process; it cannot be used afterwards."""
        ...
