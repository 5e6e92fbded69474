"""A network as a DeepSpeedEngine: ZeRO stages 0 to 3, with or without offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from bigsgan.engines import zero_private
from bigsgan.engines.base import LossFunction, MicroBatch, Shard
from bigsgan.errors import UserError
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack

SEAM_SCALE_MAX = 2.0**16
SEAM_SCALE_WINDOW = 500


class Root(nn.Module):
    """The one root module of an engine: losses are computed inside its forward pass.

    DeepSpeed hooks an engine's outputs, so that a penalty which differentiates them outside would run the engine's
    backward bookkeeping (0.19.8, runtime/engine.py:3019). Inside, the only output is the loss.
    """

    def __init__(self, network: LayerStack) -> None:
        super().__init__()
        self.network = network
        self.stateful = network.stateful_layers()

    def forward(self, inputs: MicroBatch, moving: bool, loss: LossFunction | None = None) -> Tensor:
        """Outputs of the network, or their loss; ``moving`` lets batch statistics and power iterations move."""
        if loss is not None and loss.differentiates_inputs:
            inputs = (inputs[0].detach().requires_grad_(True), *inputs[1:])
        with moving_state(self.stateful, moving):
            outputs = self.network(*inputs)
        return outputs if loss is None else loss(outputs, inputs)


class ZeroEngine:
    """The Engine protocol on ZeRO.

    Rule of this class: exactly one engine forward, one backward and one step for each micro-batch. Anything else loses
    gradients silently at some stage (deepspeed 0.19.8: forward, forward, backward, backward at stage 3).

    Attributes:
        network: The layers.
        applied, num_applied, num_skipped, grad_norm: See Engine.
    """

    def __init__(
        self, engine: DeepSpeedEngine, root: Root, rank: int, release: Callable[[], None] | None = None
    ) -> None:
        self.network = root.network
        self.applied = False
        self.num_applied = 0
        self.num_skipped = 0
        self.grad_norm: Tensor | float = 0.0
        self._engine = engine
        self._release = release
        self._root = root
        self._accumulation = engine.gradient_accumulation_steps()
        self._penalised = [layer for layer in self.network.spectral_layers() if layer.orthogonal]
        # Walking the module tree for these costs a millisecond an update, so they are kept.
        self._parameters = list(self.network.parameters())
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        self._pieces = zero_private.pieces(engine, names, rank)
        self._buffers = list(self.network.buffers())
        self._kept_buffers = [buffer.clone() for buffer in self._buffers]
        self._is_fp16 = engine.fp16_enabled()
        # Stage 0 in fp32 has no optimizer wrapper: it would apply NaN where the others skip the update.
        self._checks_gradients = engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled()
        self._gathers_for_double_backward = engine.zero_optimization_stage() == 3 and not self.network.checkpointing
        self._seam_scale = SEAM_SCALE_MAX if self._is_fp16 else 1.0
        self._seam_good = 0

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[MicroBatch], moving: bool = False) -> list[Tensor]:
        """Outputs without a graph; moves no state unless told to (standing statistics)."""
        return [self._root(inputs, moving=moving) for inputs in micro_batches]

    def train(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, lr: float) -> None:
        """Update on the mean loss of the micro-batches."""
        self._begin(lr)
        pin = loss.differentiates_inputs and self._gathers_for_double_backward
        for i, inputs in enumerate(micro_batches):
            with zero_private.pinned(self._parameters) if pin else nullcontext():
                self._backward(self._engine(inputs, moving=i == 0, loss=loss))
            self._step()

    def train_through(
        self, micro_batches: Sequence[MicroBatch], output_grads: Callable[[int, Tensor], Tensor], lr: float
    ) -> None:
        """Update on a loss of which only the gradient at the outputs is known."""
        self._begin(lr)
        for i, inputs in enumerate(micro_batches):
            outputs = self._engine(inputs, moving=i == 0)
            grads = output_grads(i, outputs.detach())
            # The value of this product means nothing; its gradient at the outputs is ``grads``.
            self._backward((outputs * grads).sum())
            self._step()

    def input_grads(self, micro_batch: MicroBatch, loss: LossFunction) -> Tensor:
        """d(loss)/d(first input), float32; parameters, their gradients and all state stay untouched.

        The bare network with frozen parameters, and not the engine, whose hooks would count this as a backward pass.
        """
        first = micro_batch[0].detach().requires_grad_(True)
        inputs = (first, *micro_batch[1:])
        self._require_grad(False)
        try:
            value = self._root(inputs, moving=False, loss=loss)
            (grads,) = torch.autograd.grad(value * self._seam_scale, first)
        finally:
            self._require_grad(True)
        return grads.float() / self._seam_scale

    def observe_seam(self, applied: bool) -> None:
        """Adapt the scale of ``input_grads``'s backward pass to whether its gradients could be used.

        The same rule as dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): halve on overflow, double
        after a number of good updates. Only in fp16.
        """
        if not self._is_fp16:
            return
        self._seam_good = self._seam_good + 1 if applied else 0
        if not applied:
            self._seam_scale = max(1.0, self._seam_scale / 2)
        elif self._seam_good % SEAM_SCALE_WINDOW == 0:
            self._seam_scale = min(SEAM_SCALE_MAX, self._seam_scale * 2)

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward pass; 1 unless fp16."""
        return float(self._engine.optimizer.loss_scale) if self._is_fp16 else 1.0

    def shards(self) -> list[Shard]:
        """This rank's part of the parameters and of the optimizer's state; tensors are live, not copies."""
        masters, states = zero_private.masters(self._engine), zero_private.optimizer_states(self._engine)
        return [
            Shard(master.detach().view(-1), state, pieces)
            for master, state, pieces in zip(masters, states, self._pieces, strict=True)
        ]

    def publish(self) -> None:
        """Bring the network's parameters up to date with the shards' masters."""
        zero_private.publish(self._engine)

    def scalars(self) -> dict[str, float]:
        """Numbers to save beside the shards: counters and loss scales."""
        scaler = zero_private.loss_scaler_numbers(self._engine) if self._is_fp16 else {}
        own = {"num_applied": self.num_applied, "num_skipped": self.num_skipped}
        seam = {"seam_scale": self._seam_scale, "seam_good": self._seam_good}
        return {**own, **seam, **{f"scaler.{key}": value for key, value in scaler.items()}}

    def load_scalars(self, values: dict[str, float]) -> None:
        """Restore what ``scalars`` gave."""
        self.num_applied, self.num_skipped = int(values["num_applied"]), int(values["num_skipped"])
        self._seam_scale, self._seam_good = values["seam_scale"], int(values["seam_good"])
        scaler = {key.removeprefix("scaler."): v for key, v in values.items() if key.startswith("scaler.")}
        if self._is_fp16:
            zero_private.set_loss_scaler_numbers(self._engine, scaler)
        zero_private.set_counters(self._engine, self.num_applied + self.num_skipped, self.num_skipped)

    def load_optimizer_state(self, shard: int, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of one shard."""
        zero_private.set_optimizer_state(self._engine, shard, state)

    def destroy(self) -> None:
        """Release the engine's hooks and buffers, and what else was made for it."""
        self._engine.destroy()
        if self._release is not None:
            self._release()

    def _begin(self, lr: float) -> None:
        """Set the learning rate, and keep the buffers in case the update is skipped."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        torch._foreach_copy_(self._kept_buffers, self._buffers)

    def _require_grad(self, required: bool) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(required)

    def _backward(self, loss: Tensor) -> None:
        for layer in self._penalised:
            layer.gradient_scale = self.loss_scale / self._accumulation
        self._engine.backward(loss)

    def _step(self) -> None:
        """Step the engine, which updates on the last micro-batch only, and keep count."""
        is_update = self._engine.is_gradient_accumulation_boundary()
        finite = True
        if is_update and self._checks_gradients:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)
            finite = bool(torch.isfinite(self.grad_norm))
            if not finite:  # optimizers pass over parameters without a gradient
                self.network.zero_grad(set_to_none=True)
        self._step_engine()
        if not is_update:
            return
        self.applied = finite and self._engine.was_step_applied()
        self.num_applied += self.applied
        self.num_skipped += not self.applied
        if not self.applied:  # what overflowed the gradients may stand in the running statistics too
            torch._foreach_copy_(self._buffers, self._kept_buffers)
        if not self._checks_gradients:
            norm = self._engine.get_global_grad_norm()
            self.grad_norm = 0.0 if norm is None else norm  # `or` would ask a tensor, and wait for the device

    def _step_engine(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed raises no type of its own (fp16/loss_scaler.py)
            if "loss scale" not in str(error):
                raise
            raise UserError(
                "fp16",
                self.loss_scale,
                "is the smallest loss scale, and gradients still overflow: the run has diverged or needs more range",
                "go on from an older checkpoint with a lower learning rate, or use a bf16 file",
            ) from error
