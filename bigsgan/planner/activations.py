"""Memory of a network's passes on micro-batches of any size, from traces on two sizes.

A layer holds a constant, such as copies of its weights, and a fixed number of bytes for each sample. So two traces are
enough for any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bigsgan.adversarial.objectives import DiscriminatorObjective
from bigsgan.adversarial.terms import JudgedOutputs, stateless_terms
from bigsgan.adversarial.terms.path_length import PathLengthPenalty
from bigsgan.config import Recipe, RunPlan
from bigsgan.config.families.base import judged_outputs
from bigsgan.config.objective import PathLength, num_images
from bigsgan.engines.base import DTYPES
from bigsgan.engines.frozen import check_frozen, frozen_layout, hold_frozen
from bigsgan.engines.pipeline.layout import build_on_meta, meta_inputs
from bigsgan.engines.zero import Pass, Root
from bigsgan.errors import UserError
from bigsgan.models import meta_gpu
from bigsgan.models.build import has_closed_layers
from bigsgan.models.layers import RankAverages, TwiceDifferentiable
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics
from bigsgan.planner.census import Census, Stretch
from bigsgan.planner.layers import LayerTape, Mode, trace_layers, watched
from bigsgan.planner.passes import Passes, WholePass
from bigsgan.planner.teaching import Predicting, Program, empty_targets, trace_program

_META = torch.device("meta")
_SMALLEST = 2
"""Least number of samples of a trace: batch statistics need more than one."""

Segments = Fraction | int
"""Samples of a micro-batch, for each of a whole segment of it."""

T = TypeVar("T")


class Traces:
    """Traces of a recipe's networks. Layouts of one recipe share them, and each uses the layers and sizes it needs."""

    def __init__(self) -> None:
        self._networks: dict[tuple, LayerStack] = {}
        self._exact_layers: dict[tuple, list[TwiceDifferentiable]] = {}
        self._tapes: dict[tuple, tuple[list[LayerTape], list[LayerTape]]] = {}
        self._wholes: dict[tuple, tuple[WholePass, WholePass]] = {}
        self._passes: dict[tuple, Passes] = {}
        self._programs: dict[str, Program | None] = {}

    def program(self, recipe: Recipe, name: str) -> Program | None:
        """The teacher's, or another, as ``trace_program`` finds it, once."""
        if name not in self._programs:
            self._programs[name] = trace_program(recipe, name)
        return self._programs[name]

    def network(self, plan: RunPlan, network: str) -> LayerStack:
        """A network with all its layers, on the meta device."""
        key = self._network_key(plan, network)
        if key not in self._networks:
            self._networks[key] = build_on_meta(plan, network)
            check_frozen(plan, network)
            hold_frozen(plan, network, self._networks[key], 0, lambda whole, own: None, _META)
            self._exact_layers[key] = self._networks[key].exact_layers()
        return self._networks[key]

    def passes(
        self,
        plan: RunPlan,
        network: str,
        mode: Mode,
        segments: Segments,
        num_samples: int,
        bounds: tuple[int, int],
    ) -> Passes:
        """Passes of layers ``bounds[0]`` to ``bounds[1] - 1``, with ``num_samples`` in a segment on one replica."""
        checkpointing = plan.engines[network].section.activation_checkpointing
        key = self._key(plan, network), mode, segments
        is_node, file = has_closed_layers(plan.recipe, network), plan.engines[network].file
        is_node &= file.stage < 3 and mode != "train with tangents"
        together = DTYPES[file.precision].itemsize if is_node else 0
        whole_key = (*key, num_samples, bounds, checkpointing, together)
        found = self._passes.get(whole_key)
        if found is None:
            if key not in self._tapes:
                trace = partial(self._trace_tapes, plan, network, mode, segments)
                self._tapes[key] = self._at_two_sizes(plan, network, trace)
            unit = self._unit(plan, network)
            pairs = zip(*(tapes[slice(*bounds)] for tapes in self._tapes[key]), strict=True)
            tapes = [_at_size(first, second, unit, num_samples) for first, second in pairs]
            found = Passes(tapes, checkpointing, together)
            self._passes[whole_key] = found
        return found

    def entering(
        self, plan: RunPlan, network: str, mode: Mode, segments: Segments, num_samples: int, layer: int
    ) -> tuple[int, int]:
        """Bytes of the inputs of a layer, which is not the first, and of their gradients."""
        before = self.passes(plan, network, mode, segments, num_samples, (layer - 1, layer))
        return before.returned, before.gradients

    def penalized(self, plan: RunPlan, network: str, num_samples: int) -> WholePass:
        """A network's passes when a penalty differentiates them twice: exact R1 in D, path length in G."""
        key = self._key(plan, network), plan.engines[network].section.activation_checkpointing
        if key not in self._wholes:
            stack = self.prepared(plan, network)
            trace = partial(trace_generator, plan, stack)
            if network == "discriminator":
                trace = partial(trace_discriminator, plan, stack, program=self.program(plan.recipe, "teacher"))
            self._choose_kernels(plan, network, True)
            self._wholes[key] = self._at_two_sizes(plan, network, trace)
        return _at_size(*self._wholes[key], self._unit(plan, network), num_samples)

    def _network_key(self, plan: RunPlan, network: str) -> tuple:
        engine, frozen = plan.engines[network], frozen_layout(plan, network)
        recomputes = frozen.is_gathered and engine.section.activation_checkpointing
        return network, engine.file.precision, engine.section.frozen.precision, frozen, recomputes

    def _key(self, plan: RunPlan, network: str) -> tuple:
        return *self._network_key(plan, network), plan.placement(network).num_replicas > 1, plan.on_gpus

    def prepared(self, plan: RunPlan, network: str) -> LayerStack:
        """A network whose layers average their statistics as replicas do."""
        stack, num_replicas = self.network(plan, network), plan.placement(network).num_replicas
        stack.checkpointing = plan.engines[network].section.activation_checkpointing
        stack.requires_grad_(True)
        for module in stack.modules():
            if isinstance(module, RankAverages):
                module.average_over_ranks = torch.clone if num_replicas > 1 else None
                module.num_ranks = num_replicas
        return stack

    def _choose_kernels(self, plan: RunPlan, network: str, exact: bool) -> None:
        """Choose kernels as engines do, but not for tangents' directions, which are never the fullest moment."""
        for layer in self._exact_layers[self._network_key(plan, network)]:
            layer.exact = exact

    def _trace_tapes(
        self, plan: RunPlan, network: str, mode: Mode, segments: Segments, num_samples: int
    ) -> list[LayerTape]:
        stack = self.prepared(plan, network)
        stack.checkpointing = False
        self._choose_kernels(plan, network, mode == "train with tangents")
        ahead = PathLength.ahead if network == "generator" else 0
        predicting = None
        if stack.predicts and mode != "judge":
            empty = partial(empty_targets, plan.recipe, self.program(plan.recipe, "teacher"))
            predicting = partial(Predicting, num=num_samples, empty_targets=empty)
        inputs = meta_inputs(plan, network, int(num_samples * segments))
        return trace_layers(stack, inputs, mode, math.ceil(segments), ahead, predicting)

    def _at_two_sizes(self, plan: RunPlan, network: str, trace: Callable[[int], T]) -> tuple[T, T]:
        unit = self._unit(plan, network)
        with meta_gpu.stands_for_gpu(plan.on_gpus):
            return trace(unit), trace(2 * unit)

    def _unit(self, plan: RunPlan, network: str) -> int:
        """The fewest samples that the network takes at a time."""
        size, largest = _SMALLEST, plan.recipe.batch
        while size < largest:
            try:
                getattr(plan.recipe, network).check_micro_batch(size)
                break
            except UserError:
                size += 1
        objective = plan.recipe.objective
        if network == "discriminator":
            return size * objective.batch_shrink
        return size * objective.path_length.batch_shrink if objective.path_length else size


def _at_size(first: Any, second: Any, unit: int, num_samples: int) -> Any:
    """Extrapolate two traces, of ``unit`` samples and of twice as many, to ``num_samples``: all numbers are linear."""

    def between(a: Any, b: Any) -> Any:
        return a + (b - a) * (num_samples - unit) // unit

    if isinstance(first, Stretch):
        if len(first.live) != len(second.live):  # grouped convolutions differentiated twice: more samples, more moments
            first, second = first.condensed(), second.condensed()
        return Stretch(np.maximum(between(first.live, second.live), 0), first.arrived)
    if isinstance(first, tuple):
        parts = [_at_size(a, b, unit, num_samples) for a, b in zip(first, second, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first if first == second or isinstance(first, bool) else between(first, second)


def trace_discriminator(
    plan: RunPlan, stack: LayerStack, num_samples: int, program: Program | None = None
) -> WholePass:
    """Trace D's passes of an update with its penalties, and with the predicted features of a teacher's ``program``."""
    *_, last = stack.layers.values()
    judged = JudgedOutputs(judged_outputs(plan.recipe.discriminator), lambda: getattr(last, "output_sizes", ()))
    objective = DiscriminatorObjective(stateless_terms(plan.objective, judged), Statistics(_META), d_step=0)
    shrink = plan.objective.batch_shrink
    inputs = meta_inputs(plan, "discriminator", num_images(objective.num_segments, num_samples, shrink))
    root = Root(stack)

    def compute() -> Tensor:
        targets = empty_targets(plan.recipe, program, num_samples) if stack.predicts else ()
        return root(inputs, Pass(loss=objective, targets=targets))[0]

    return _trace_whole(stack, inputs, compute)


def trace_generator(plan: RunPlan, stack: LayerStack, num_samples: int) -> WholePass:
    """Trace G's passes of an update with path length regularization."""
    section = plan.recipe.objective.path_length
    assert section is not None
    penalty = PathLengthPenalty(section, Statistics(_META), _META, torch.clone)
    inputs = meta_inputs(plan, "generator", num_samples)
    root = Root(stack)

    def compute() -> Tensor:
        images, value = root(inputs, Pass(regularizer=penalty))
        return (images * torch.empty_like(images)).sum() + value

    return _trace_whole(stack, inputs, compute)


def _trace_whole(stack: LayerStack, inputs: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> WholePass:
    census = Census()
    with watched(stack, census):
        census.ignore(inputs)
        with census:
            value = compute()
            forward = census.take()
            census.goes_backward = True
            value.backward()
            return WholePass(forward, forward.end, census.take())
