"""A network as a DeepSpeed PipelineEngine: a part of its layers on each rank, ZeRO 0 or 1 over the replicas.

DeepSpeed divides the ranks, holds masters and optimizer, reduces gradients and steps. The passes are our own:
DeepSpeed's schedules know one network and end every phase in a flush, its messages need fixed shapes, and its loss can
read only the last stage's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from torch import Tensor

from bigsgan.config.placement import Placement
from bigsgan.engines.base import Graph, MicroBatch, Work
from bigsgan.engines.deepspeed import internals
from bigsgan.engines.deepspeed_backed import DeepSpeedBacked
from bigsgan.engines.passes import Passes, training_passes
from bigsgan.engines.phases import Infers, Phase, Task
from bigsgan.engines.pipeline.layout import StageDivision
from bigsgan.engines.pipeline.partition import TensorSpec
from bigsgan.engines.pipeline.transport import Channel
from bigsgan.models import dual
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm

Entry = TypeVar("Entry", Tensor, TensorSpec)


def _floating(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.dtype.is_floating_point]


class PipelineEngine(DeepSpeedBacked):
    """The Engine protocol on a pipeline: each rank computes the tasks of its stage.

    Attributes:
        division: Stage s has the layers ``division[s]`` up to ``division[s + 1]``.
    """

    def __init__(
        self,
        engine: DeepSpeedPipelineEngine,
        network: LayerStack,
        placement: Placement,
        rank: int,
        division: StageDivision,
        channels: tuple[Channel, Channel],
        compile: str = "none",
    ) -> None:
        """Wrap an engine.

        Args:
            engine: The DeepSpeed engine.
            network: This stage's layers.
            placement: The ranks of all stages and replicas.
            rank: This process's rank.
            division: The division of the layers into stages.
            channels: The channels to the next stage and back.
            compile: The part to compile for training passes: none, layers or whole.
        """
        replicas = internals.replica_group(engine)
        super().__init__(engine, network, placement.replica(rank), placement.num_replicas, replicas)
        self.division: list[int] | None = division.bounds
        self._name, self._placement, self._boundaries = division.network, placement, division.boundaries
        self._received: list[Tensor] = []
        self._to_next, self._to_previous = channels
        self._stage = placement.stage(rank)
        self._is_first, self._is_last = self._stage == 0, self._stage == placement.num_stages - 1
        self._device = comm.device()
        self._eager, self._fast = training_passes(network, "none"), training_passes(network, compile)

    @torch.no_grad()
    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Return the outputs of one micro-batch without a graph. All stages call this together."""
        phase = Infers(1, len(inputs[0]), int(moving), network=self._name)
        work, task = Work(phase, lambda index, images: inputs), Task(0, "forward", 0)
        self.expect(phase, task)
        self.receive(phase, task)
        self.forward(work, 0, None)
        self.settle()
        if self._is_last:
            outputs = work.outputs[0]
        else:
            spec, *_ = self._boundaries.at(self._placement.num_stages, len(inputs[0]))
            outputs = spec.empty(self._device)
        source = self._placement.rank(self._placement.num_stages - 1, self.replica)
        dist.broadcast(outputs, source, group=internals.pipe_group(self._engine))
        return outputs

    def expect(self, phase: Phase, task: Task) -> None:
        """Prepare to receive a task's message from a neighbouring stage."""
        if task.kind == "forward" and not self._is_first:
            carry = self._boundaries.at(self._stage, phase.num_samples)
            if phase.has_tangents:
                carry = [*carry, *_floating(carry), TensorSpec(torch.Size((1,)), dual.EXPONENT)]
            self._to_next.expect(carry)
        if task.kind == "backward" and not self._is_last:
            entries = _floating(self._boundaries.at(self._stage + 1, phase.num_samples))
            self._to_previous.expect(entries * (1 + phase.has_tangents))

    def receive(self, phase: Phase, task: Task) -> None:
        """Wait for a task's message."""
        if task.kind == "forward" and not self._is_first:
            self._received = self._to_next.receive()
        if task.kind == "backward" and not self._is_last:
            self._received = self._to_previous.receive()

    def settle(self) -> None:
        """Wait until everything sent to other stages has arrived."""
        self._to_next.settle()
        self._to_previous.settle()

    def forward(self, work: Work, index: int, images: Tensor | None, tangents: Tensor | None = None) -> None:
        """Go forward through this stage, carrying tangents if the phase has some."""
        phase, moving = work.phase, index < work.phase.num_moving
        self._choose_kernels(work)
        if moving and index == 0:
            self._begin_update()
        num_segments = 1 if work.loss is None else work.loss.num_segments
        keeps_graph = phase.opens_graphs
        # Outside of training numbers of samples differ; an adaptive weight needs several backward passes of the last.
        is_fast = not (isinstance(phase, Infers) or phase.is_probe or (work.exposed and self._is_last))
        passes = self._fast if is_fast else self._eager
        with (
            self._frozen() if phase.frozen else nullcontext(),
            torch.set_grad_enabled(keeps_graph),
            self._exposing(work.exposed) if phase.exposes and self._is_last else nullcontext() as found,
            moving_state(self._stateful, moving),
        ):
            carry = list(work.inputs(index, images)) if self._is_first else self._take()
            if self._is_first and work.ahead:
                carry = list(self.network.part(0, work.ahead).fold(*carry))
                passes = training_passes(self.network.part(work.ahead, len(self.network.layers)), "none")
            if keeps_graph and (phase.frozen or not self._is_first):
                carry = [t.detach().requires_grad_() if t.is_floating_point() else t for t in carry]
            if tangents is not None:
                largest = partial(comm.largest_over_ranks, group=self._replicas)
                carry = dual.flat(dual.begin(tuple(carry), tangents, largest))
            targets = work.targets(index) if self._is_last and work.loss is not None else ()
            outputs, features, along = self._fold(passes, carry, num_segments, phase.has_tangents, targets)
            if self._is_last:
                self._end_forward(work, index, outputs, features, along)
        if not self._is_last:
            self._to_next.send(outputs)
        if keeps_graph:
            work.graphs[index] = Graph(outputs, carry)
        elif found is not None:
            work.graphs[index] = Graph((), weighed=(outputs[0], found.copy))

    def _fold(
        self, passes: Passes, carry: Sequence[Tensor], num_segments: int, has_tangents: bool, targets: MicroBatch
    ) -> tuple[list[Tensor], MicroBatch, Tensor | None]:
        """Return this stage's outputs, the features that the loss compares, and the tangents of the last outputs."""
        features: MicroBatch = ()
        if not has_tangents:
            if not targets:
                return list(passes.fold(*carry, segments=num_segments)), features, None
            output, predictions = passes.with_predictions(*carry, num=len(targets[0]), segments=num_segments)
            return [output], (predictions, *targets), None
        if targets:
            num = len(targets[0])
            found, predictions = passes.with_predictions_dual(dual.from_flat(carry), num, num_segments)
            features = (predictions, *targets)
        else:
            found = passes.fold_dual(dual.from_flat(carry), num_segments)
        if not self._is_last:
            return dual.flat(found), features, None
        output, along = dual.end(found)
        return [output], features, along

    def _end_forward(
        self, work: Work, index: int, outputs: list[Tensor], features: MicroBatch, along: Tensor | None
    ) -> None:
        """Replace outputs by losses, or append losses; keep images."""
        if work.loss is not None:
            outputs[:] = [work.loss(outputs[0], self._known_inputs(work, index), features, along)]
            return
        images, *more = outputs
        del outputs[1:]  # no gradient comes back to what no term reads
        if not work.phase.step:
            work.outputs[index] = images.detach()
        if along is not None:
            assert work.regularizer is not None, "G carries tangents for a regularizer"
            outputs.append(work.regularizer.along(along, self._known_inputs(work, index)))
        elif work.of_outputs is not None and work.phase.opens_graphs:
            inputs = self._known_inputs(work, index)
            outputs.append(work.of_outputs(images, more, inputs, work.targets(index)))

    def _known_inputs(self, work: Work, index: int) -> MicroBatch:
        """Return the inputs that the last stage knows: every stage draws G's alike; D's images are on the first."""
        return work.inputs(index, None) if self._name == "generator" else ()

    def step(self, work: Work) -> None:
        """Reduce the gradients over the replicas, update, and count it; either all stages apply an update or none."""
        self._set_rates(work.rates)
        internals.reduce_pipeline_gradients(self._engine)
        if self._checks_gradients:
            self.grad_norm = self._norm()
        applied = self._update(partial(internals.step_pipeline, self._engine))
        if not self._checks_gradients:
            self.grad_norm = self._reported_norm()
        self._count(applied)

    def backward(self, work: Work, index: int, grads: Tensor | None) -> None:
        """Go backward through this stage."""
        if work.weigh is not None and work.phase.graphs_from is None:
            self._weigh(work, index, None, grads)
            return
        outputs, carry, _ = graph = work.graphs.pop(index)
        frozen = work.phase.frozen
        self._choose_kernels(work)
        if work.weigh is not None:
            self._weigh(work, index, graph, grads)
            return
        scale = self._scale_of(work.phase) if frozen else self.loss_scale / self._accumulation
        if not self._is_last:
            received = self._take()
            outputs = _floating(outputs)
        elif work.loss is None:
            received = [torch.full_like(loss, scale) for loss in outputs[1:]]
            if grads is None:  # no other network judges the images
                outputs = outputs[1:]
            else:
                received.insert(0, work.weighted(index, grads) * scale)
        else:
            received = [torch.full_like(outputs[0], scale)]
        pairs = [(o, g) for o, g in zip(outputs, received, strict=True) if o.requires_grad]
        with self._frozen() if frozen else nullcontext():  # a checkpointed layer is recomputed
            if pairs:  # none where a stage has frozen layers alone and its inputs need no gradient
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if not frozen:
            internals.accumulate_gradients(self._engine)
        leaves = _floating(carry)
        if not self._is_first:
            self._to_previous.send([t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves])
        elif frozen:
            assert leaves[0].grad is not None
            assert work.gradient is not None, "a phase with frozen parameters is asked for a gradient"
            grad = leaves[0].grad.float() / scale
            work.outputs[index] = work.gradient(index, leaves[0].detach(), grad)

    def _take(self) -> list[Tensor]:
        received, self._received = self._received, []
        return received

    def _norm(self) -> Tensor:
        """Return the norm of the gradient over all stages."""
        square = super()._norm().square()
        dist.all_reduce(square, group=internals.pipe_group(self._engine))
        return square.sqrt()
