"""State shared by all engines on DeepSpeed: shards, counters, loss scales, and the buffers before an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from bigsgan.checkpoint import saved_buffers
from bigsgan.engines.base import Graph, Rates, Shard, Work
from bigsgan.engines.deepspeed import internals
from bigsgan.engines.exposing import Exposure, exposed, gradients, parameter_at
from bigsgan.engines.optimizer import set_rates, spread_matrices, state_of
from bigsgan.engines.outcomes import Outcome, Outcomes
from bigsgan.engines.phases import Phase
from bigsgan.engines.replicas import partial_statistics, share
from bigsgan.errors import UserError
from bigsgan.models.frozen import without_frozen
from bigsgan.models.layers import SpectralLayer
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm

SEAM_SCALE_MAX = 2.0**16
SEAM_SCALE_WINDOW = 500


class DeepSpeedBacked:
    """The part of the Engine protocol that does not depend on the layout.

    Attributes:
        network, replica, replays, outcomes, scales_loss, grad_norm, after_update, is_held: See Engine.
    """

    replays, is_held = False, True

    def __init__(
        self,
        engine: DeepSpeedEngine,
        network: LayerStack,
        replica: int,
        num_replicas: int,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: The DeepSpeed engine.
            network: The layers that this rank computes.
            replica: Index of this rank among those that compute the same layers.
            num_replicas: Number of these ranks.
            replicas: Process group of these ranks; None for all ranks.
        """
        self._replicas = replicas
        self.network = network
        self.replica = replica
        self.outcomes = Outcomes()
        self.grad_norm: Tensor | float | None = 0.0
        self.after_update: Callable[[], None] = lambda: None
        self._engine = engine
        self._accumulation = engine.gradient_accumulation_steps()
        self._penalized: list[SpectralLayer] = [layer for layer in network.spectral_layers() if layer.orthogonal]
        # Orthogonal regularization adds to gradients in the backward pass, so it must be scaled as they are.
        self._penalty_scale, shared = 1.0, torch.ones((), device=comm.device())
        for layer in self._penalized:
            layer.gradient_scale = shared
        self._stateful = network.stateful_layers()
        self._exact_layers, self._is_exact = network.exact_layers(), True
        # Walking the module tree for these costs a millisecond an update, so they are kept.
        self._parameters: list[nn.Parameter] = list(network.parameters())
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        self._pieces = internals.pieces(engine, names, replica)
        is_copied = internals.has_whole_masters(engine)
        self._copies = (replica, num_replicas) if is_copied else (0, 1)
        keys = internals.keys(engine)
        spread_matrices(engine.basic_optimizer, network, keys, self._pieces, copied=is_copied, group=replicas)
        self._buffers = list(without_frozen(network, saved_buffers(network)).values())
        self._partial = partial_statistics(network)
        self._kept_buffers = [buffer.clone() for buffer in self._buffers]
        # Without an optimizer wrapper (ZeRO 0 in float32) DeepSpeed would apply NaN, where the others skip the update,
        # and each stage of a pipeline would clip by a norm of its own.
        self._checks_gradients = not internals.has_optimizer_wrapper(engine)
        if self._checks_gradients:
            internals.clip_with(engine, self._clip)
        self.scales_loss = engine.fp16_enabled()
        self._seam_scale = SEAM_SCALE_MAX if self.scales_loss else 1.0
        self._seam_good = 0
        self._holder: tuple[nn.Module, str] | None = None  # of the exposed parameter, and its name there

    def observe_seam(self, applied: Outcome) -> None:
        """Adapt the scale of D's judging to whether its gradients were finite.

        The same rule as dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): halve on overflow, double
        after a number of good updates. Only in fp16, where the host waits for the device's answer.
        """
        if not self.scales_loss:
            return
        self._seam_good = self._seam_good + 1 if applied else 0
        if not applied:
            self._seam_scale = max(1.0, self._seam_scale / 2)
        elif self._seam_good % SEAM_SCALE_WINDOW == 0:
            self._seam_scale = min(SEAM_SCALE_MAX, self._seam_scale * 2)

    def _choose_kernels(self, work: Work) -> None:
        """Let phases of a penalty compute in a form that can be differentiated twice, and others use faster kernels.

        Called before backward passes too, as they may recompute layers.
        """
        phase, penalized = work.phase, work.loss is not None and work.loss.differentiates_inputs
        exact = penalized or phase.has_tangents or phase.gives_slopes
        if exact != self._is_exact:
            self._is_exact = exact
            for layer in self._exact_layers:
                layer.exact = exact

    def _holder_of(self, ending: str) -> tuple[nn.Module, str]:
        """Return the module that holds the exposed parameter, which is searched for once, and its name there."""
        self._holder = self._holder or parameter_at(self.network, ending)
        return self._holder

    def _exposing(self, ending: str) -> AbstractContextManager[Exposure]:
        return exposed(self.network, ending, self._holder_of(ending))

    def _weigh(self, work: Work, index: int, graph: Graph | None, grads: Tensor | None) -> None:
        """Weigh a micro-batch's gradients, and hand those at images on to the phase that pulls back.

        Given a graph, the exposed parameter is differentiated by; else the gradients at images are weighed.
        """
        assert work.weigh is not None, "a phase weighs"
        assert grads is not None, "a phase that weighs reads gradients"
        if graph is None:
            work.weigh(index, grads.chunk(2, dim=1))
        else:
            assert graph.weighed is not None, "the pass has exposed a parameter"
            work.weigh(index, gradients(*graph.weighed, grads))
        work.outputs[index] = grads

    def _scale_of(self, phase: Phase) -> float:
        """Return the factor on the loss of a phase with frozen parameters; losses that differentiate have their own."""
        return self._seam_scale if phase.sends else 1.0

    @property
    def loss_scale(self) -> float:
        """The factor on losses before the backward pass; 1 unless fp16."""
        return internals.loss_scale(self._engine) if self.scales_loss else 1.0

    def shards(self) -> list[Shard]:
        """Return this rank's part of the parameters and of the optimizer's state; tensors are live, not copies."""
        masters, states = internals.masters(self._engine), internals.optimizer_states(self._engine)
        return [
            Shard(master.detach().view(-1), state, pieces, self._copies)
            for master, state, pieces in zip(masters, states, self._pieces, strict=True)
        ]

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum a tensor, in place, over the ranks that compute the same layers."""
        return comm.sum_over_ranks(tensor, self._replicas)

    def publish(self) -> None:
        """Bring the network's parameters up to date with the shards' masters."""
        internals.publish(self._engine)

    def scalars(self) -> dict[str, float]:
        """Return the numbers to save beside the shards: counters and loss scales."""
        scaler = internals.loss_scaler_numbers(self._engine) if self.scales_loss else {}
        own = {"num_applied": self.outcomes.num_applied, "num_skipped": self.outcomes.num_skipped}
        seam = {"seam_scale": self._seam_scale, "seam_good": self._seam_good}
        return {**own, **seam, **{f"scaler.{key}": value for key, value in scaler.items()}}

    def load_scalars(self, values: dict[str, float]) -> None:
        """Restore the numbers that ``scalars`` returned."""
        num_applied, num_skipped = int(values["num_applied"]), int(values["num_skipped"])
        self.outcomes.restore(num_applied, num_skipped)
        scaler = {key.removeprefix("scaler."): v for key, v in values.items() if key.startswith("scaler.")}
        if self.scales_loss and scaler:  # saved in fp16
            self._seam_scale, self._seam_good = values["seam_scale"], int(values["seam_good"])
            internals.set_loss_scaler_numbers(self._engine, scaler)
        internals.set_counters(self._engine, num_applied + num_skipped, num_skipped)

    def load_optimizer_state(self, shard: int, state: dict[str, Any]) -> None:
        """Replace the optimizer's state of one shard: tensors laid out as its master, and the number ``step``."""
        state = state_of(self._engine.basic_optimizer, internals.keys(self._engine)[shard], state)
        internals.set_optimizer_state(self._engine, shard, state)

    def destroy(self) -> None:
        """Release the engine's hooks and buffers."""
        self._engine.destroy()

    def _set_rates(self, rates: Rates | None) -> None:
        assert rates is not None, "a step has rates"
        set_rates(self._engine.optimizer, rates)

    def _norm(self) -> Tensor:
        """Return the norm of this rank's averaged gradients."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def _clip(self) -> None:
        norm = torch.as_tensor(self.grad_norm)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._engine.gradient_clipping(), norm)

    def _update(self, step: Callable[[], None]) -> bool:
        """Let DeepSpeed update, unless gradients are checked and not finite; return whether it did."""
        is_finite = not self._checks_gradients or bool(torch.isfinite(torch.as_tensor(self.grad_norm)))
        if not is_finite:
            self.network.zero_grad(set_to_none=True)  # optimizers pass over parameters without a gradient
        with self._explained():
            step()
        return is_finite and self._engine.was_step_applied()

    def _begin_update(self) -> None:
        """Keep the buffers before an update's forward passes, in case it is skipped, and scale penalties."""
        if self._buffers:  # torch refuses an empty list
            torch._foreach_copy_(self._kept_buffers, self._buffers)
        scale = self.loss_scale / self._accumulation
        if self._penalized and scale != self._penalty_scale:
            self._penalty_scale = scale
            self._penalized[0].gradient_scale.fill_(scale)  # type: ignore[union-attr]

    def _count(self, applied: Outcome) -> None:
        """Count an update. Restore the buffers of a skipped one: running statistics may have overflowed too."""
        self.outcomes.add(applied)
        if self._partial:
            share(self._partial, self._replicas)
        if isinstance(applied, Tensor):
            for buffer, kept in zip(self._buffers, self._kept_buffers, strict=True):
                torch.where(applied, buffer, kept, out=buffer)
        elif not applied and self._buffers:
            torch._foreach_copy_(self._buffers, self._kept_buffers)
        self.after_update()

    def _reported_norm(self) -> Tensor | float:
        """Return the norm that DeepSpeed took of the last update's gradient."""
        norm = self._engine.get_global_grad_norm()
        return 0.0 if norm is None else norm  # `or` would ask a tensor, and wait for the device

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        """Keep parameters out of the graphs that are built inside the block."""
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._parameters:
                parameter.requires_grad_(True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn DeepSpeed's error at the smallest loss scale into a message."""
        try:
            yield
        except Exception as error:  # DeepSpeed has no type for it (fp16/loss_scaler.py)
            if "loss scale" not in str(error):
                raise
            raise UserError(
                "fp16",
                self.loss_scale,
                "is the smallest loss scale, and gradients still overflow: the run has diverged, or fp16 is too narrow",
                "resume from an older checkpoint with a lower learning rate, or use a bf16 file",
            ) from error
