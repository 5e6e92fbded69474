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

from bigsgan.engines.replays import keeping_norms
from bigsgan.models.dual import Dual, DualLayer, flat, of
from bigsgan.models.network import LayerStack
from bigsgan.runtime.compile_clock import CLOCK

DUAL_SINCE = "2.15"
"""The version of torch that compiles passes with tangents: what 2.8 to 2.13 make of them fails in the backward pass."""

_log = logging.getLogger(__name__)

_VARIANTS = 16
"""Of one piece of code: by whether state moves, what has gradients, and the number of samples in each phase."""


def _watch() -> None:
    """Have torch's compiler run this process's clock. torch's reset removes the callbacks."""
    handler = dynamo_callback.callback_handler
    if CLOCK.begin not in handler.start_callbacks:
        handler.register_start_callback(CLOCK.begin)
        handler.register_end_callback(CLOCK.end)


def _sharing(graph: GraphModule, inputs: list[Any]) -> Any:
    """inductor, of which a host's ranks compile a graph one after the other: all but the first find it in the cache.

    Only what makes no collectives waits, so that none stalls another rank's; the process's clock runs during the wait.
    """
    return compile_fx(graph, inputs, inner_compile=_one_by_one)


def _one_by_one(*arguments: Any, **options: Any) -> Any:
    with _host_lock():
        return compile_fx_inner(*arguments, **options)


@contextmanager
def _host_lock() -> Iterator[None]:
    """Keep out the host's other ranks that would find the same: torch's keys name the device by its number."""
    device = get_accelerator().current_device_name().replace(":", "_")
    with ExitStack() as stack:
        with suppress(OSError):  # a directory of others', a file system without locks: then each for itself
            os.makedirs(cache_dir(), exist_ok=True)
            file = stack.enter_context(open(os.path.join(cache_dir(), f"bigsgan_{device}.lock"), "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[..., Any]:
    """The network's function, compiled for each number of samples that it meets; the parameters stay the network's.

    Args:
        network: It has one backward pass: nodes that torch.compile makes cannot be differentiated again.
        unit: ``whole``, or ``layers`` for one after the other, whose gradients then arrive one layer after the other.
        cuda_graphs: Replay as CUDA graphs; what a pass yields then lasts until ``begin_update``.
    """
    compile = _compiler(network, cuda_graphs)
    fast = compile(network) if unit == "whole" else network.wrapped(compile)
    return keeping_norms(fast, network.spectral_layers()) if cuda_graphs else fast


def compiled_predicting(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[..., Any]:
    """The network's ``with_predictions``, compiled in the same way; of layers, all but what predicts."""
    compile = _compiler(network, cuda_graphs)
    fast = compile(network.with_predictions) if unit == "whole" else network.wrapped(compile).with_predictions
    return keeping_norms(fast, network.spectral_layers()) if cuda_graphs else fast


def compiled_dual(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[[Dual, int], Dual]:
    """The network's ``fold_dual``, compiled in the same way, or as it is before ``DUAL_SINCE``."""
    if TorchVersion(torch.__version__) < DUAL_SINCE:

        def eager(dual: Dual, segments: int) -> Dual:
            _tell_of_old_torch()
            return network.fold_dual(dual, segments)

        return eager
    # In one graph: where a graph broke, tangents would meet code that was compiled without them.
    compile = _compiler(network, cuda_graphs, fullgraph=True)
    if unit == "whole":
        fold: Callable[[Dual, int], Dual] = compile(network.fold_dual)
    else:
        layers = network.wrapped(lambda layer: compile(DualLayer(layer)))

        def fold(dual: Dual, segments: int) -> Dual:
            return of(layers.fold(*flat(dual), segments=segments))

    return keeping_norms(fold, network.spectral_layers()) if cuda_graphs else fold


@functools.cache
def _tell_of_old_torch() -> None:
    _log.warning("torch %s: passes with tangents are compiled from %s on", torch.__version__, DUAL_SINCE)


def _compiler(network: LayerStack, cuda_graphs: bool, fullgraph: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """torch.compile with what a network's passes need."""
    _watch()
    if hasattr(inductor, "deterministic"):  # since torch 2.10; 2.15 sets it with its other switches
        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    num_graphs = _VARIANTS * len(network.layers)  # layers share code, which torch else gives up after 8 graphs of
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * num_graphs)
    # CUDA graphs are torch's own matter: a mode goes with no backend but inductor by name.
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs else {"backend": _sharing}
    return lambda function: torch.compile(function, dynamic=False, fullgraph=fullgraph, **options)
