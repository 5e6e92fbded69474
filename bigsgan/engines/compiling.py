"""A network's training passes through torch.compile.

Only networks that are compiled need this module: torch's compiler takes seconds to import.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch._inductor.codecache import cache_dir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule
from torch.torch_version import TorchVersion

from bigsgan.engines.deepspeed.layer_gathers import Hooked, gathered_layers
from bigsgan.engines.replays import keeping_norms
from bigsgan.models.dual import Dual, DualLayer, flat, from_flat
from bigsgan.models.network import LayerStack
from bigsgan.runtime.compile_clock import CLOCK

DUAL_SINCE = "2.15"
"""The first version of torch that compiles passes with tangents; code from 2.8 to 2.13 fails in the backward pass."""

_log = logging.getLogger(__name__)

_VARIANTS = 16
"""Graphs of one function: they differ by moving state, inputs with gradients, and the samples in each phase."""


def _watch() -> None:
    """Have torch's compiler run this process's clock. torch's reset removes the callbacks."""
    handler = dynamo_callback.callback_handler
    if CLOCK.begin not in handler.start_callbacks:
        handler.register_start_callback(CLOCK.begin)
        handler.register_end_callback(CLOCK.end)


def _compile_in_turn(graph: GraphModule, inputs: list[Any]) -> Any:
    """Compile with inductor, one rank of the host after the other: all but the first find the graph in the cache.

    Ranks wait only before code without collectives, so that none stalls another; the process's clock counts the wait.
    """
    return compile_fx(graph, inputs, inner_compile=_one_by_one)


def _one_by_one(*arguments: Any, **options: Any) -> Any:
    with _host_lock():
        return compile_fx_inner(*arguments, **options)


@contextmanager
def _host_lock() -> Iterator[None]:
    """Keep out the host's other ranks on the same device: torch's cache keys contain the device's number."""
    device = get_accelerator().current_device_name().replace(":", "_")
    with ExitStack() as stack:
        with suppress(OSError):  # without access or locks in this directory, each rank compiles for itself
            os.makedirs(cache_dir(), exist_ok=True)
            file = stack.enter_context(open(os.path.join(cache_dir(), f"bigsgan_{device}.lock"), "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def passes(network: LayerStack, unit: str, cuda_graphs: bool = False, gathers: bool = False) -> tuple[Any, ...]:
    """Return a network's first four ``Passes``, compiled for each number of samples that they meet.

    They share the parameters, and cannot be differentiated twice.

    Args:
        network: The network, or a stage's part of it.
        unit: ``whole``, or ``layers`` to compile each layer, so that gradients arrive layer by layer; the part that
            predicts a teacher's features is not compiled then.
        cuda_graphs: Replay as CUDA graphs; the results of a pass then last until ``begin_update``.
        gathers: Layers have hooks, which gather parameters and are not compiled; for ``layers``.
    """
    compile = _compiler(network, cuda_graphs)
    if gathers:
        whole = gathered_layers(network)
        layers = network.wrapped(lambda layer: Hooked(layer, compile(layer.forward)) if layer in whole else layer)
        return layers, layers.fold, layers.with_predictions, network.fold_dual
    if unit == "whole":
        fast = [compile(each) for each in (network, network.fold, network.with_predictions)]
    else:
        layers = network.wrapped(compile)
        fast = [layers, layers.fold, layers.with_predictions]
    if cuda_graphs:
        fast = [keeping_norms(each, network.spectral_layers()) for each in fast]
    return *fast, compiled_dual(network, unit, cuda_graphs)


def compiled_dual(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[[Dual, int], Dual]:
    """Return the network's ``fold_dual``, compiled in the same way; not compiled before torch ``DUAL_SINCE``."""
    if TorchVersion(torch.__version__) < DUAL_SINCE:

        def eager(dual: Dual, segments: int) -> Dual:
            _warn_of_old_torch()
            return network.fold_dual(dual, segments)

        return eager
    # In one graph: after a graph break, tangents would meet code that was compiled without them.
    compile = _compiler(network, cuda_graphs, fullgraph=True)
    if unit == "whole":
        fold: Callable[[Dual, int], Dual] = compile(network.fold_dual)
    else:
        layers = network.wrapped(lambda layer: compile(DualLayer(layer)))

        def fold(dual: Dual, segments: int) -> Dual:
            return from_flat(layers.fold(*flat(dual), segments=segments))

    return keeping_norms(fold, network.spectral_layers()) if cuda_graphs else fold


@functools.cache
def _warn_of_old_torch() -> None:
    _log.warning("torch %s: passes with tangents are compiled from %s on", torch.__version__, DUAL_SINCE)


def _compiler(network: LayerStack, cuda_graphs: bool, fullgraph: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return torch.compile with the options that a network's passes need."""
    _watch()
    if hasattr(inductor, "deterministic"):  # since torch 2.10; 2.15 sets it with its other switches
        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    num_graphs = _VARIANTS * len(network.layers)  # layers share code; torch stops compiling it after 8 graphs
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * num_graphs)
    # With torch 2.11's default, code that was compiled for frozen parameters serves the same ones when they train.
    dynamo.skip_tensor_guards_with_matching_dict_tags = False
    # CUDA graphs need a mode, and torch takes a mode with no other backend than inductor by name.
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs else {"backend": _compile_in_turn}
    return lambda function: torch.compile(function, dynamic=False, fullgraph=fullgraph, **options)
