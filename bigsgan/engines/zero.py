"""A network as a DeepSpeedEngine: ZeRO 0 to 3, with or without offload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from bigsgan.engines.base import Graph, LossFunction, MicroBatch, Regularizer, TwiceDifferentiated, Work
from bigsgan.engines.deepspeed import internals
from bigsgan.engines.deepspeed.averaged_gradients import AveragedGradients
from bigsgan.engines.deepspeed.device_skip import DeviceSkip
from bigsgan.engines.deepspeed.prefetching import Prefetching
from bigsgan.engines.deepspeed.tangents import let_tangents_through
from bigsgan.engines.deepspeed_backed import DeepSpeedBacked
from bigsgan.engines.outcomes import Outcome
from bigsgan.engines.passes import training_passes
from bigsgan.models import dual
from bigsgan.models.frozen import without_frozen
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm, division


@dataclass(frozen=True)
class Pass:
    """How a root goes forward."""

    moving: bool = False  # whether batch statistics and power iterations move
    loss: LossFunction | None = None
    regularizer: Regularizer | None = None
    of_outputs: Callable[[Tensor, Sequence[Tensor], MicroBatch, MicroBatch], Tensor] | None = None  # see ``Work``
    tangents: Tensor | None = None  # they begin after the first ``ahead`` layers, which are not compiled then
    ahead: int = 0  # without tangents, inputs enter after these layers; without a loss, only they are computed
    targets: MicroBatch = ()  # what the loss compares with the network's predictions
    trains: bool = True  # whether it is of training; outside, numbers of samples differ, so that nothing is compiled
    unhooked: list[Tensor] | None = None  # takes the images as they are before DeepSpeed hooks them


class Root(nn.Module):
    """The one root module of an engine: losses are computed inside its forward pass.

    DeepSpeed hooks an engine's outputs. A penalty that differentiates them outside would run the engine's backward
    bookkeeping (0.19.8, runtime/engine.py:3019). With the penalty inside, the only output is the loss.
    """

    def __init__(
        self, network: LayerStack, compile: str = "none", cuda_graphs: bool = False, gathers: bool = False
    ) -> None:
        """Wrap a network.

        Args:
            network: The network, with its weights or this rank's shards of them.
            compile: The part to compile for training passes: none, layers or whole.
            cuda_graphs: Whether to replay the compiled part as CUDA graphs.
            gathers: Whether hooks of layers gather their parameters.
        """
        super().__init__()
        self.network, self.replays = network, cuda_graphs
        network.is_closed = network.is_closed and not gathers
        self._passes = training_passes(network, compile, cuda_graphs, gathers)
        self.stateful = network.stateful_layers()

    def forward(self, inputs: MicroBatch, run: Pass) -> tuple[Tensor, ...]:
        """Return the images or logits alone, their loss alone, or images and a loss of G's own.

        Passes that are differentiated twice or read for their features are not compiled.
        """
        first, *more = self._compute(inputs, run)
        if run.unhooked is not None:
            run.unhooked.append(first)
            first = first.view_as(first)  # another tensor to DeepSpeed's hooks
        return first, *more

    def _compute(self, inputs: MicroBatch, run: Pass) -> tuple[Tensor, ...]:
        loss, regularizer, ahead = run.loss, run.regularizer, run.ahead
        if run.tangents is not None:
            return self._with_tangents(inputs, run, run.tangents)
        is_fast = run.trains and not (loss is not None and loss.differentiates_inputs)
        network = self._passes.forward if is_fast else self.network
        rest: MicroBatch = ()
        if loss is not None and loss.differentiates_inputs:
            inputs, rest = cast("TwiceDifferentiated", loss).split(inputs)
            inputs = (inputs[0].detach().requires_grad_(True), *inputs[1:])
        features: Sequence[Tensor] = ()
        with moving_state(self.stateful, run.moving):
            if regularizer is not None:
                outputs, inner = regularizer.forward(self.network, inputs)
            elif run.of_outputs is not None:
                outputs, *more = self._passes.fold(*inputs)
                return outputs, run.of_outputs(outputs, more, inputs, run.targets)
            elif loss is None:
                return self.network.part(0, ahead).fold(*inputs) if ahead else (network(*inputs),)
            elif ahead:
                outputs = self.network.part(ahead, len(self.network.layers))(*inputs)
            elif run.targets:
                predicting = self._passes.with_predictions if is_fast else self.network.with_predictions
                num = len(run.targets[0])
                outputs, predictions = predicting(*inputs, num=num, segments=loss.num_segments)
                features = (predictions, *run.targets)
            elif loss.reads_features:
                outputs, features = self.network.with_features(*inputs, segments=loss.num_segments)
            else:
                outputs = network(*inputs, segments=loss.num_segments)
        # Outside ``moving_state``: a gradient taken here recomputes checkpointed layers, whose state must move once.
        if rest:
            outputs = cast("TwiceDifferentiated", loss).join(outputs, network(*rest))
        if regularizer is not None:
            return outputs, regularizer.penalty(outputs, inner, inputs)
        assert loss is not None
        return (loss(outputs, inputs, features),)

    def _with_tangents(self, inputs: MicroBatch, run: Pass, tangents: Tensor) -> tuple[Tensor, ...]:
        loss, ahead = run.loss, run.ahead
        num_segments = 1 if loss is None else loss.num_segments
        features: MicroBatch = ()
        with moving_state(self.stateful, run.moving):
            carry = self.network.part(0, ahead).fold(*inputs) if ahead else inputs
            fold = self.network.part(ahead, len(self.network.layers)).fold_dual if ahead else self._passes.fold_dual
            largest = partial(comm.largest_over_ranks, group=division.part())
            first = dual.begin(carry, tangents, largest)
            if run.targets:  # not compiled
                found, predictions = self.network.with_predictions_dual(first, len(run.targets[0]), num_segments)
                features = (predictions, *run.targets)
            else:
                found = fold(first, num_segments)
        outputs, along = dual.end(found)
        if loss is not None:
            return (loss(outputs, inputs, features, along),)
        assert run.regularizer is not None
        return outputs, run.regularizer.along(along, inputs)


class ZeroEngine(DeepSpeedBacked):
    """The Engine protocol on ZeRO, for a network that lies whole on each rank.

    Rule of this class: exactly one engine forward, one backward and one step for each micro-batch. Anything else loses
    gradients silently at some ZeRO stage (deepspeed 0.19.8: forward, forward, backward, backward at ZeRO 3).
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        root: Root,
        release: Callable[[], None] | None = None,
        averaged: AveragedGradients | None = None,
        device_skip: DeviceSkip | None = None,
        stock: bool = False,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: The DeepSpeed engine.
            root: The engine's module.
            release: Removes resources made for the engine outside of it, such as swap files.
            averaged: Averages gradients, and is waited for before they are used. While they travel, DeepSpeed's step of
                a micro-batch waits for the network's next task, so that the other network can compute meanwhile.
            device_skip: Makes the steps where the device, not the host, decides whether to update.
            stock: Whether DeepSpeed keeps its own buffers and prefetching.
        """
        super().__init__(engine, root.network, comm.rank(), comm.world_size(), division.part())
        self.division: list[int] | None = None
        self.replays = root.replays
        self._root, self._release, self._averaged, self._device_skip = root, release, averaged, device_skip
        self._is_step_open = False
        self._gathers_for_double_backward = engine.zero_optimization_stage() == 3 and not self.network.checkpointing
        # Outside of this network's backward passes, the other network needs their memory.
        self._gradient_buffers = [] if stock else internals.gradient_buffers(engine)
        internals.release(self._gradient_buffers)
        self._prefetching = Prefetching(engine, stock)
        self._kind: Hashable = None  # kind of the last pass through the engine that goes backward
        if engine.zero_optimization_stage() == 3:
            let_tangents_through(engine)
        self._later: Sequence[nn.Parameter] = ()  # parameters of the modules behind an exposed one
        self._until_backward = ExitStack()  # contexts that last from a micro-batch's forward to its backward pass

    def _nothing(self, *about: Any) -> None:
        """Do nothing: a task needs nothing from other ranks."""

    expect = receive = settle = _nothing

    def forward(self, work: Work, index: int, images: Tensor | None, tangents: Tensor | None = None) -> None:
        """Go forward with a micro-batch."""
        inputs = work.inputs(index, images)
        if self._is_step_open:
            self._step()
        phase, moving = work.phase, index < work.phase.num_moving
        self._choose_kernels(work)
        if moving and index == 0:
            self._begin_update()
        if phase.frozen:
            self._judge(work, index, inputs, moving)
        elif phase.opens_graphs:
            self._go_forward(work, index, inputs, moving, tangents)
        elif phase.exposes:
            self._expose(work, index, inputs, moving)
        else:
            work.outputs[index] = self._infer(inputs, moving, trains=True)

    def backward(self, work: Work, index: int, grads: Tensor | None) -> None:
        """Go backward; the gradients may travel until the network's next task."""
        if work.weigh is not None and work.phase.graphs_from is None:
            self._weigh(work, index, None, grads)
            return
        self._choose_kernels(work)
        graph = work.graphs[index] if work.phase.keeps_graphs else work.graphs.pop(index)
        if work.phase.frozen:
            self._differentiate(work, index, graph)
            return
        if work.weigh is not None:
            self._prefetching.expect("weigh")  # whose passes are never complete, so that no record is made or compared
            with self._pinned(self._later):  # hooks gather them for one backward pass only
                self._weigh(work, index, graph, grads)
            self._prefetching.end()
            return
        loss, *more = graph.outputs
        if grads is not None:  # at images; the value of their product means nothing
            loss = (loss * work.weighted(index, grads)).sum() + sum(more)
        elif more:  # behind images that no other network judges
            (loss,) = more
        del graph, more
        internals.take(self._gradient_buffers)
        self._prefetching.back_to(self._kind)
        self._engine.backward(loss)
        self._until_backward.close()
        self._is_step_open = True
        is_last = index == work.phase.num - 1
        if not is_last and (self._averaged is None or not self._averaged.overlaps):
            self._step()

    def step(self, work: Work) -> None:
        """Update, and keep count."""
        self._set_rates(work.rates)
        self._step()

    def infer_everywhere(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Return the outputs of one micro-batch without a graph."""
        return self._infer(inputs, moving, trains=False)

    @torch.no_grad()
    def note_foreign_uses(self, inputs: MicroBatch) -> None:
        """Make a first pass, in which DeepSpeed notes the modules that use parameters of others; a collective.

        torch's attention does so with its last map. What DeepSpeed (0.19.8) notes within a pass that it records, it
        misses in that record. Buffers of foreign modules stay as they are.
        """
        moved = without_frozen(self.network, dict(self.network.named_buffers()))
        kept = [(buffer, buffer.clone()) for buffer in moved.values()]
        self._prefetching.expect("notes")
        self._root(inputs, Pass(trains=False))
        for buffer, value in kept:
            buffer.copy_(value)

    def destroy(self) -> None:
        """Release the engine's hooks and buffers, and everything made for it."""
        if self._averaged is not None:
            self._averaged.close()
        super().destroy()
        if self._release is not None:
            self._release()

    @torch.no_grad()
    def _infer(self, inputs: MicroBatch, moving: bool, trains: bool) -> Tensor:
        self._prefetching.expect("infer")
        (outputs,) = self._root(inputs, Pass(moving, trains=trains))
        return outputs

    def _go_forward(self, work: Work, index: int, inputs: MicroBatch, moving: bool, tangents: Tensor | None) -> None:
        """Go forward through the engine."""
        twice = work.phase.num_twice > 0
        self._kind = twice, tangents is not None
        self._prefetching.expect(self._kind)
        targets = work.targets(index)  # before parameters are gathered
        if twice and self._gathers_for_double_backward:
            self._until_backward.enter_context(self._pinned(self._parameters))
        images: list[Tensor] | None = [] if work.exposed and work.phase.keeps_graphs else None
        how = work.loss, work.regularizer, work.of_outputs, tangents, work.ahead, targets
        graph = Graph(self._engine(inputs, run=Pass(moving, *how, unhooked=images)))
        if images:
            module, name = self._holder_of(work.exposed)
            graph = graph._replace(weighed=(images[0], module.get_parameter(name)))
        work.graphs[index] = graph
        if not work.phase.step:
            work.outputs[index] = graph.outputs[0].detach()

    def _expose(self, work: Work, index: int, inputs: MicroBatch, moving: bool) -> None:
        """Go forward without a graph, except from one parameter to the images."""
        self._prefetching.expect("expose")
        with self._exposing(work.exposed) as found:
            (images,) = self._root(inputs, Pass(moving, trains=False))
        work.graphs[index], self._later = Graph((), weighed=(images, found.copy)), [*found.later.values()]
        work.outputs[index] = images.detach()

    def _judge(self, work: Work, index: int, inputs: MicroBatch, moving: bool) -> None:
        """Use the bare network with frozen parameters, as the engine's hooks would count this as a backward pass."""
        if work.ahead:
            self._prefetching.expect("ahead")
            with torch.no_grad():
                inputs = self._root(inputs, Pass(moving, ahead=work.ahead))
        self._prefetching.expect(work.phase.label)
        self._until_backward.enter_context(self._frozen())
        first, trains = inputs[0].detach().requires_grad_(True), not work.phase.is_probe
        run = Pass(moving, work.loss, ahead=work.ahead, trains=trains)
        work.graphs[index] = Graph(self._root((first, *inputs[1:]), run), (first,))

    def _differentiate(self, work: Work, index: int, graph: Graph) -> None:
        assert work.gradient is not None, "a phase with frozen parameters is asked for a gradient"
        (loss,), (first,), scale = graph.outputs, graph.inputs, self._scale_of(work.phase)
        (grads,) = torch.autograd.grad(loss * scale, first)
        self._until_backward.close()
        self._prefetching.end()
        work.outputs[index] = work.gradient(index, first.detach(), grads.float() / scale)

    def _pinned(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Hold parameters gathered, for a double backward or several backward passes."""
        self._prefetching.settle()
        return internals.pinned(parameters)

    def _step(self) -> None:
        """Step the engine, which updates on the last micro-batch only, and keep count."""
        self._is_step_open = False
        if self._averaged is not None:
            self._averaged.wait()
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
            return
        if self._checks_gradients:
            self.grad_norm = norm = self._norm()
            if self._device_skip is not None:
                self._device_skip.judge(norm)
        applied: Outcome = self._update(self._engine.step) if self._device_skip is None else self._device_skip.step()
        internals.release(self._gradient_buffers)
        if not self._checks_gradients:
            self.grad_norm = self._reported_norm()
        self._count(applied)
