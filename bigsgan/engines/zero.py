"""A network as a DeepSpeedEngine: ZeRO stages 0 to 3, with or without offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from bigsgan.engines import deepspeed_private
from bigsgan.engines.averaged_gradients import AveragedGradients
from bigsgan.engines.base import LossFunction, Rates, Regularizer
from bigsgan.engines.compiling import compiled
from bigsgan.engines.deepspeed_backed import DeepSpeedBacked
from bigsgan.engines.outcomes import Outcome
from bigsgan.engines.prefetching import Prefetching
from bigsgan.engines.refusing import Refusing
from bigsgan.engines.sequences import Kept, MicroBatch, MicroBatches, OnDemand
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack


class Root(nn.Module):
    """The one root module of an engine: losses are computed inside its forward pass.

    DeepSpeed hooks an engine's outputs, so that a penalty which differentiates them outside would run the engine's
    backward bookkeeping (0.19.8, runtime/engine.py:3019). Inside, the only output is the loss.
    """

    def __init__(self, network: LayerStack, compile: str = "none", cuda_graphs: bool = False) -> None:
        """Wrap a network.

        Args:
            network: With its weights, or its shards of them.
            compile: What of it to compile for training passes: none, layers or whole.
            cuda_graphs: Whether to replay what is compiled as CUDA graphs.
        """
        super().__init__()
        self.network, self.replays = network, cuda_graphs
        fast = network if compile == "none" else compiled(network, compile, cuda_graphs)
        self._fast = (fast,)  # in a tuple it is no submodule
        self.stateful = network.stateful_layers()

    def forward(
        self,
        inputs: MicroBatch,
        moving: bool,
        loss: LossFunction | None = None,
        regularizer: Regularizer | None = None,
        trains: bool = True,
    ) -> Any:
        """Outputs of the network, or their loss, or both outputs and a regulariser's loss.

        ``moving`` lets batch statistics and power iterations move. Not compiled is what is differentiated twice, or
        read for its features, and what does not belong to training: samples come in numbers of their own.
        """
        is_fast = trains and not (loss is not None and loss.differentiates_inputs)
        network = self._fast[0] if is_fast else self.network
        if loss is not None and loss.differentiates_inputs:
            inputs = (inputs[0].detach().requires_grad_(True), *inputs[1:])
        features: Sequence[Tensor] = ()
        with moving_state(self.stateful, moving):
            if regularizer is not None:
                outputs, inner = regularizer.forward(self.network, inputs)
            elif loss is None:
                return network(*inputs)
            elif loss.reads_features:
                outputs, features = self.network.with_features(*inputs, segments=loss.num_segments)
            else:
                outputs = network(*inputs, segments=loss.num_segments)
        # Outside, as a gradient taken here recomputes checkpointed layers, which must find their state moved once.
        if regularizer is not None:
            return outputs, regularizer.loss(outputs, inner, inputs)
        assert loss is not None
        return loss(outputs, inputs, features)


class ZeroEngine(DeepSpeedBacked):
    """The Engine protocol on ZeRO: what a phase yields is computed when it is asked for, micro-batch by micro-batch.

    Rule of this class: exactly one engine forward, one backward and one step for each micro-batch. Anything else loses
    gradients silently at some stage (deepspeed 0.19.8: forward, forward, backward, backward at stage 3).
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        root: Root,
        rank: int,
        world_size: int,
        recomputes: bool = False,
        release: Callable[[], None] | None = None,
        averaged: AveragedGradients | None = None,
        refusing: Refusing | None = None,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: DeepSpeed's.
            root: Its module.
            rank: This process's, which is its replica's.
            world_size: Number of them.
            recomputes: Whether ``backward`` repeats the forward pass: needed where another engine wants the outputs of
                all micro-batches before it gives the gradient of any.
            release: Removes what was made for the engine outside of it, such as swap files.
            averaged: What has to be waited for before gradients are used. While they travel ``train`` leaves its last
                step to whatever comes next: the other network may make images meanwhile.
            refusing: Steps in the place of the host where the device decides whether to update.
        """
        super().__init__(engine, root.network, rank, world_size)
        self.division: list[int] | None = None
        self.replays = root.replays
        self._root, self._release, self._averaged, self._refusing = root, release, averaged, refusing
        self._is_step_open = False
        self._recomputes = recomputes
        # Stage 0 in fp32 has no optimizer wrapper: it would apply NaN where the others skip the update.
        self._checks_gradients = engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled()
        if self._checks_gradients:
            engine.clip_fp32_gradients = self._clip  # DeepSpeed's takes the norm again, and waits for numbers it copies
        self._gathers_for_double_backward = engine.zero_optimization_stage() == 3 and not self.network.checkpointing
        # The other network's update needs their room.
        self._gradient_buffers = deepspeed_private.gradient_buffers(engine)
        deepspeed_private.release(self._gradient_buffers)
        self._prefetching = Prefetching(engine)
        self._inputs: Sequence[MicroBatch] = []
        self._regularizer: Regularizer | None = None
        self._graphs: dict[int, tuple[Tensor, Tensor | float]] = {}

    def infer(self, micro_batches: MicroBatches, moving: bool = False) -> Sequence[Tensor]:
        """Outputs without a graph; moves no state unless told to."""
        return [self._infer(inputs, moving, trains=True) for inputs in micro_batches]

    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Outputs of one micro-batch without a graph."""
        return self._infer(inputs, moving, trains=False)

    def train(self, micro_batches: MicroBatches, loss: LossFunction, rates: Rates) -> None:
        """Update on the mean loss of the micro-batches; the last step may be left to the next verb."""
        pin = loss.differentiates_inputs and self._gathers_for_double_backward
        for i in range(len(micro_batches)):
            inputs = micro_batches[i]  # which the other network may make, while gradients are under way
            self.finish()
            if i == 0:
                self._begin_update()
                self._set_rates(rates)
            self._prefetching.expect(("train", loss.differentiates_inputs))
            with self._pinned() if pin else nullcontext():
                value = self._engine(inputs, moving=i == 0, loss=loss)
                del inputs
                self._backward(value)
            self._is_step_open = True
            if self._averaged is None or not self._averaged.overlaps:
                self.finish()

    def forward(self, micro_batches: MicroBatches, regularizer: Regularizer | None = None) -> Sequence[Tensor]:
        """Outputs, detached; each is computed, and its graph kept, when it is first asked for."""
        self.finish()
        self._begin_update()
        self._inputs, self._regularizer = micro_batches, regularizer
        return Kept(len(micro_batches), self._forward)

    def backward(self, output_grads: Sequence[Tensor], rates: Rates) -> None:
        """Update on a loss of which only the gradient at the outputs is known."""
        self._set_rates(rates)
        pin = self._regularizer is not None and self._gathers_for_double_backward
        for i in range(len(output_grads)):
            with self._pinned() if pin else nullcontext():
                self._backward_from(i, output_grads[i])  # which asks for the outputs, unless there is nothing to ask
            self._step()
        self._inputs = []

    def input_grads(self, micro_batches: MicroBatches, loss: LossFunction) -> Sequence[Tensor]:
        """d(loss)/d(first input), float32; each is computed when it is asked for."""
        return OnDemand(len(micro_batches), lambda i: self._input_grads(micro_batches[i], loss))

    def finish(self) -> None:
        """Complete the update that ``train`` left open."""
        if self._is_step_open:
            self._is_step_open = False
            self._step()

    def destroy(self) -> None:
        """Release the engine's hooks and buffers, and what else was made for it."""
        self._is_step_open = False
        if self._averaged is not None:
            self._averaged.close()
        super().destroy()
        if self._release is not None:
            self._release()

    @torch.no_grad()
    def _infer(self, inputs: MicroBatch, moving: bool, trains: bool) -> Tensor:
        self.finish()
        self._prefetching.expect("infer")
        return self._root(inputs, moving=moving, trains=trains)

    def _forward(self, i: int) -> Tensor:
        if self._recomputes:
            return self._infer(self._inputs[i], moving=i == 0, trains=True)
        self._keep_graph(i, moving=i == 0)
        return self._graphs[i][0].detach()

    def _keep_graph(self, i: int, moving: bool) -> None:
        self._prefetching.expect(("forward", self._regularizer is not None))
        if self._regularizer is None:
            self._graphs[i] = self._engine(self._inputs[i], moving=moving), 0.0
        else:
            self._graphs[i] = self._engine(self._inputs[i], moving=moving, regularizer=self._regularizer)

    def _backward_from(self, i: int, grads: Tensor) -> None:
        if self._recomputes:
            self._keep_graph(i, moving=False)
        elif i not in self._graphs:
            self._forward(i)
        outputs, extra = self._graphs.pop(i)
        # The value of this product means nothing; its gradient at the outputs is ``grads``.
        self._backward((outputs * grads).sum() + extra)

    def _input_grads(self, inputs: MicroBatch, loss: LossFunction) -> Tensor:
        """Use the bare network with frozen parameters: the engine's hooks would count this as a backward pass."""
        self.finish()
        first = inputs[0].detach().requires_grad_(True)
        self._prefetching.expect("input_grads")
        with self._frozen():
            value = self._root((first, *inputs[1:]), moving=False, loss=loss)
            (grads,) = torch.autograd.grad(value * self._seam_scale, first)
        self._prefetching.end()
        return grads.float() / self._seam_scale

    def _pinned(self) -> AbstractContextManager[None]:
        """All parameters whole, for a double backward."""
        self._prefetching.settle()
        return deepspeed_private.pinned(self._parameters)

    def _backward(self, loss: Tensor) -> None:
        deepspeed_private.take(self._gradient_buffers)
        self._engine.backward(loss)

    def _clip(self) -> None:
        norm = torch.as_tensor(self.grad_norm)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._engine.gradient_clipping(), norm)

    def _step(self) -> None:
        """Step the engine, which updates on the last micro-batch only, and keep count."""
        is_update = self._engine.is_gradient_accumulation_boundary()
        if self._averaged is not None:
            self._averaged.wait()
        finite = True
        if is_update and self._checks_gradients:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)
            if self._refusing is not None:
                self._refusing.judge(self.grad_norm)
            elif not bool(torch.isfinite(self.grad_norm)):
                finite = False
                self.network.zero_grad(set_to_none=True)  # optimizers pass over parameters without a gradient
        applied: Outcome
        if is_update and self._refusing is not None:
            applied = self._refusing.step()
        else:
            with self._explained():
                self._engine.step()
            applied = finite and self._engine.was_step_applied()
        if not is_update:
            return
        deepspeed_private.release(self._gradient_buffers)
        if not self._checks_gradients:
            self.grad_norm = self._reported_norm()
        self._count(applied)
