"""A network as a DeepSpeed PipelineEngine: a part of its layers on each rank, ZeRO stage 0 or 1 over the replicas.

DeepSpeed divides the ranks, holds masters and optimizer, reduces gradients and steps. The passes are our own, because
its schedules know one network and end every phase in a flush, its messages want shapes that never change, and its loss
has to be of the last stage's outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor

from bigsgan.engines import deepspeed_private
from bigsgan.engines.base import LossFunction, Rates, Regularizer
from bigsgan.engines.deepspeed_backed import DeepSpeedBacked
from bigsgan.engines.pipeline.layout import Division
from bigsgan.engines.pipeline.program import Deferred, Program
from bigsgan.engines.pipeline.schedule import Phase, Task
from bigsgan.engines.pipeline.transport import Channel
from bigsgan.engines.sequences import MicroBatch, MicroBatches
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack
from bigsgan.placement import Placement

_Graph = tuple[list[Tensor], list[Tensor]]
"""Of a forward pass through a stage: the carry that came in, as leaves, and what came out."""


class PipelineEngine(DeepSpeedBacked):
    """The Engine protocol on a pipeline: phases are collected in a program and computed together.

    Attributes:
        division: Stage s has the layers ``division[s]`` up to ``division[s + 1]``.
    """

    def __init__(
        self,
        engine: DeepSpeedPipelineEngine,
        network: LayerStack,
        name: str,
        placement: Placement,
        rank: int,
        division: Division,
        channels: tuple[Channel, Channel],
        program: Program,
        *,
        recomputes: bool,
        clip_norm: float,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: DeepSpeed's.
            network: This stage's layers.
            name: ``generator`` or ``discriminator``.
            placement: Of all stages and replicas.
            rank: This process's.
            division: Of the layers into stages.
            channels: To the next stage and back.
            program: Where phases are collected.
            recomputes: Whether ``backward`` repeats the forward pass instead of keeping its activations.
            clip_norm: Largest norm of a gradient, 0 for any; where DeepSpeed does not clip.
        """
        super().__init__(engine, network, placement.replica(rank), placement.num_replicas)
        self.division: list[int] | None = division.bounds
        self._name, self._placement, self._boundaries = name, placement, division.boundaries
        self._program, self._received = program, list[Tensor]()
        self._to_next, self._to_previous = channels
        self._stage = placement.stage(rank)
        self._is_first, self._is_last = self._stage == 0, self._stage == placement.num_stages - 1
        self._recomputes, self._clip_norm = recomputes, clip_norm
        self._device = next(network.parameters()).device
        # Without an optimizer wrapper NaN would be applied, and each stage would clip by a norm of its own.
        self._checks_gradients = not deepspeed_private.has_optimizer_wrapper(engine)
        self._begun: _Run | None = None

    def infer(self, micro_batches: MicroBatches, moving: bool = False) -> Sequence[Tensor]:
        """Outputs without a graph, on the last stage."""
        return self._outputs(self._ask(micro_batches, moving="always" if moving else "never"))

    @torch.no_grad()
    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Outputs of one micro-batch without a graph, on all stages, at once."""
        asked = self.infer(MicroBatches.given([inputs]), moving)
        self._program.flush(observed=False)
        outputs = asked[0]
        if not self._is_last:
            (spec,) = self._boundaries.at(self._placement.num_stages, len(inputs[0]))
            outputs = spec.empty(self._device)
        source = self._placement.rank(self._placement.num_stages - 1, self.replica)
        dist.broadcast(outputs, source, group=deepspeed_private.pipe_group(self._engine))
        return outputs

    def train(self, micro_batches: MicroBatches, loss: LossFunction, rates: Rates) -> None:
        """Update on the mean loss of the micro-batches."""
        self._ask(micro_batches, moving="first", backward=True, step=True, loss=loss, rates=rates)

    def forward(self, micro_batches: MicroBatches, regularizer: Regularizer | None = None) -> Sequence[Tensor]:
        """Outputs, detached, on the last stage; their graphs are kept, or will be computed again."""
        assert regularizer is None, "no stage sees the whole network"
        self._begun = self._ask(micro_batches, moving="first", keeps_graph=not self._recomputes)
        return self._outputs(self._begun)

    def backward(self, output_grads: Sequence[Tensor], rates: Rates) -> None:
        """Update on a loss of which only the gradient at the outputs is known."""
        begun, self._begun = self._begun, None
        assert begun is not None, "forward comes first"
        if self._recomputes:
            self._ask(begun.inputs, backward=True, step=True, output_grads=output_grads, rates=rates)
        else:
            self._ask(begun.inputs, completes=begun, backward=True, step=True, output_grads=output_grads, rates=rates)

    def input_grads(self, micro_batches: MicroBatches, loss: LossFunction) -> Sequence[Tensor]:
        """d(loss)/d(first input), float32, on the first stage."""
        run = self._ask(micro_batches, backward=True, frozen=True, loss=loss)
        return Deferred(self._program, run, len(micro_batches), run.input_grads)

    def finish(self) -> None:
        """Compute all that was asked for. Every rank calls this."""
        self._program.finish()

    def settle(self) -> None:
        """Wait until all that was sent to other stages has arrived."""
        self._to_next.settle()
        self._to_previous.settle()

    def _outputs(self, run: _Run) -> Deferred:
        return Deferred(self._program, run, run.phase.num, run.outputs)

    def _ask(
        self,
        inputs: MicroBatches,
        *,
        moving: Literal["never", "first", "always"] = "never",
        keeps_graph: bool = False,
        completes: _Run | None = None,
        backward: bool = False,
        step: bool = False,
        frozen: bool = False,
        loss: LossFunction | None = None,
        output_grads: Sequence[Tensor] | None = None,
        rates: Rates | None = None,
    ) -> _Run:
        """Add a phase to the program."""
        phase = Phase(
            network=self._name,
            num=len(inputs),
            num_samples=inputs.num_samples,
            forward=completes is None,
            backward=backward,
            step=step,
            frozen=frozen,
            images_from=self._number_of(inputs.source) if completes is None else None,
            grads_from=self._number_of(output_grads),
            graphs_from=None if completes is None else self._program.number(completes),
        )
        run = _Run(
            engine=self,
            phase=phase,
            inputs=inputs,
            moving=moving,
            keeps_graph=keeps_graph or (backward and completes is None),
            loss=loss,
            output_grads=output_grads,
            rates=rates,
            graphs={} if completes is None else completes.graphs,
        )
        self._program.add(run)
        return run

    def _number_of(self, sequence: Sequence[Tensor] | None) -> int | None:
        """Number of the phase in the program that a sequence is computed from."""
        found: object = sequence
        while found is not None and not isinstance(found, Deferred):
            found = getattr(found, "source", None)
        return None if found is None else self._program.number(found.run)

    def expect(self, run: _Run, task: Task) -> None:
        """Prepare to receive a task's message from a neighbouring stage."""
        num_samples = run.phase.num_samples
        if task.kind == "forward" and not self._is_first:
            self._to_next.expect(self._boundaries.at(self._stage, num_samples))
        if task.kind == "backward" and not self._is_last:
            carry = self._boundaries.at(self._stage + 1, num_samples)
            self._to_previous.expect([spec for spec in carry if spec.dtype.is_floating_point])

    def receive(self, task: Task) -> None:
        """Wait for a task's message."""
        if task.kind == "forward" and not self._is_first:
            self._received = self._to_next.receive()
        if task.kind == "backward" and not self._is_last:
            self._received = self._to_previous.receive()

    def compute(self, run: _Run, task: Task) -> None:
        """Compute one task of a phase."""
        with self._frozen() if run.phase.frozen else nullcontext():  # backward too, which may recompute
            if task.kind == "forward":
                self._forward_pass(run, task.micro_batch)
            elif task.kind == "backward":
                self._backward_pass(run, task.micro_batch)
            else:
                assert run.rates is not None, "a step has rates"
                self._step(run.rates)

    def _forward_pass(self, run: _Run, index: int) -> None:
        moving = run.moving == "always" or (run.moving == "first" and index == 0)
        if run.moving == "first" and index == 0:
            self._begin_update()
        carry = list(run.inputs[index]) if self._is_first else self._take()
        if run.keeps_graph and not (self._is_first and not run.phase.frozen):
            carry = [t.detach().requires_grad_() if t.is_floating_point() else t for t in carry]
        with torch.set_grad_enabled(run.keeps_graph), moving_state(self._stateful, moving):
            outputs = list(self.network.fold(*carry, segments=1 if run.loss is None else run.loss.num_segments))
            if self._is_last and run.loss is not None:
                outputs = [run.loss(outputs[0], ())]
            elif self._is_last:
                run.outputs[index] = outputs[0].detach()
        if not self._is_last:
            self._to_next.send(outputs)
        if run.keeps_graph:
            run.graphs[index] = carry, outputs

    def _backward_pass(self, run: _Run, index: int) -> None:
        carry, outputs = run.graphs.pop(index)
        scale = self._seam_scale if run.phase.frozen else self.loss_scale / self._accumulation
        if not self._is_last:
            grads = self._take()
            outputs = [tensor for tensor in outputs if tensor.is_floating_point()]
        elif run.output_grads is not None:
            grads = [run.output_grads[index] * scale]
        else:
            grads = [torch.full_like(outputs[0], scale)]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if not run.phase.frozen:
            deepspeed_private.accumulate_gradients(self._engine)
        leaves = [tensor for tensor in carry if tensor.is_floating_point()]
        if not self._is_first:
            self._to_previous.send([t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves])
        elif run.phase.frozen:
            assert leaves[0].grad is not None
            run.input_grads[index] = leaves[0].grad.float() / self._seam_scale

    def _take(self) -> list[Tensor]:
        received, self._received = self._received, []
        return received

    def _step(self, rates: Rates) -> None:
        """Reduce the gradients over the replicas, update, and keep count; all stages apply an update or none does."""
        self._set_rates(rates)
        deepspeed_private.reduce_pipeline_gradients(self._engine)
        finite = True
        if self._checks_gradients:
            self.grad_norm = self._norm()
            finite = bool(torch.isfinite(self.grad_norm))
            if not finite:
                self.network.zero_grad(set_to_none=True)
            elif self._clip_norm:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, self.grad_norm)
        with self._explained():
            deepspeed_private.step_pipeline(self._engine)
        if not self._checks_gradients:
            self.grad_norm = self._reported_norm()
        self._count(finite and self._engine.was_step_applied())

    def _norm(self) -> Tensor:
        """Norm of the gradient of all stages."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=deepspeed_private.pipe_group(self._engine))
        return square.sqrt()


@dataclass
class _Run:
    """A phase with what its tasks read and yield on this rank."""

    engine: PipelineEngine
    phase: Phase
    inputs: MicroBatches
    moving: Literal["never", "first", "always"]
    keeps_graph: bool
    loss: LossFunction | None
    output_grads: Sequence[Tensor] | None
    rates: Rates | None
    graphs: dict[int, _Graph]
    outputs: dict[int, Tensor] = field(default_factory=dict)
    input_grads: dict[int, Tensor] = field(default_factory=dict)

    def expect(self, task: Task) -> None:
        """Prepare to receive what the task needs."""
        self.engine.expect(self, task)

    def receive(self, task: Task) -> None:
        """Wait for it."""
        self.engine.receive(task)

    @property
    def settle(self) -> Callable[[], None]:
        """Waits until all that the network's tasks sent has arrived."""
        return self.engine.settle

    def compute(self, task: Task) -> None:
        """Compute the task."""
        self.engine.compute(self, task)
