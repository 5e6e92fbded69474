"""A network's training passes through torch.compile."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import config as dynamo
from torch._inductor.codecache import cache_dir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule
from torch.torch_version import TorchVersion
from torch.utils._triton import has_triton

from bigsgan.config import RunPlan
from bigsgan.engines.replays import keeping_norms
from bigsgan.errors import UserError
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.build import build_network
from bigsgan.models.dual import Dual, DualLayer, flat, from_flat
from bigsgan.models.layers import RankAverages, SpectralLayer
from bigsgan.models.network import LayerStack

GRAPHS_SINCE = "2.15"
"""The version of torch whose lifetimes of results were studied; see replays.py."""

DUAL_SINCE = "2.15"
"""The first version of torch that compiles passes with tangents; code from 2.8 to 2.13 fails in the backward pass."""

_log = logging.getLogger(__name__)

_MOVING = (SpectralLayer, BatchStatistics)

_VARIANTS = 16
"""Graphs of one function: they differ by moving state, inputs with gradients, and the samples in each phase."""


class _Watch:
    """Knows since when torch is compiling, from torch's callbacks."""

    def __init__(self) -> None:
        self.since: float | None = None

    def register(self) -> None:
        handler = dynamo_callback.callback_handler
        if self._begin not in handler.start_callbacks:  # torch's reset removes them
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def _begin(self, arguments: Any) -> None:
        self.since = time.monotonic()

    def _end(self, arguments: Any) -> None:
        self.since = None


_watch = _Watch()


def seconds_compiling() -> float:
    """Return how long torch has been compiling for this process's networks; 0 if it is not compiling now."""
    since = _watch.since
    return 0.0 if since is None else time.monotonic() - since


def _sharing(graph: GraphModule, inputs: list[Any]) -> Any:
    """Compile with inductor, one rank of the host after the other: all but the first find the graph in the cache.

    Ranks wait only before code without collectives, so that none stalls another; ``seconds_compiling`` counts the wait.
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


def compiled(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[..., Any]:
    """Return the network's function, compiled for each number of samples that it meets; it shares the parameters.

    Args:
        network: The network; compiled passes cannot be differentiated twice.
        unit: ``whole``, or ``layers`` to compile each layer, so that gradients arrive layer by layer.
        cuda_graphs: Replay as CUDA graphs; the results of a pass then last until ``begin_update``.
    """
    compile = _compiler(network, cuda_graphs)
    fast = compile(network) if unit == "whole" else network.wrapped(compile)
    return keeping_norms(fast, network.spectral_layers()) if cuda_graphs else fast


def compiled_predicting(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[..., Any]:
    """Return ``with_predictions``, compiled in the same way; by layers, the part that predicts is not compiled."""
    compile = _compiler(network, cuda_graphs)
    fast = compile(network.with_predictions) if unit == "whole" else network.wrapped(compile).with_predictions
    return keeping_norms(fast, network.spectral_layers()) if cuda_graphs else fast


def compiled_dual(network: LayerStack, unit: str, cuda_graphs: bool = False) -> Callable[[Dual, int], Dual]:
    """Return the network's ``fold_dual``, compiled in the same way; not compiled before torch ``DUAL_SINCE``."""
    if TorchVersion(torch.__version__) < DUAL_SINCE:

        def eager(dual: Dual, segments: int) -> Dual:
            _tell_of_old_torch()
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
def _tell_of_old_torch() -> None:
    _log.warning("torch %s: passes with tangents are compiled from %s on", torch.__version__, DUAL_SINCE)


def _compiler(network: LayerStack, cuda_graphs: bool, fullgraph: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return torch.compile with the options that a network's passes need."""
    _watch.register()
    num_graphs = _VARIANTS * len(network.layers)  # layers share code; torch stops compiling it after 8 graphs
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * num_graphs)
    # CUDA graphs need a mode, and torch takes a mode with no other backend than inductor by name.
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs else {"backend": _sharing}
    return lambda function: torch.compile(function, dynamic=False, fullgraph=fullgraph, **options)


def check_compiler(plan: RunPlan, network: str) -> None:
    """Check that torch.compile can work on this machine, if the recipe asks for it.

    Args:
        plan: The run's plan.
        network: ``generator`` or ``discriminator``.

    Raises:
        UserError: A compiler or Triton is missing, or the network cannot be compiled with recomputation.
    """
    field, unit = f"engines.{network}.compile", plan.engines[network].section.compile
    if unit == "none":
        return
    if get_accelerator().device_name() == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            problem = f"needs a C++ compiler, {compiler} is not installed"
            raise UserError(field, unit, problem, f"install one, name one in CXX, or set {field}=none")
    elif not has_triton():
        raise UserError(field, unit, "needs Triton for this device", f"install it, or set {field}=none")
    if plan.engines[network].section.activation_checkpointing:
        # A pass moves state that it uses, and its recomputation does not. They are compiled separately, and would keep
        # different tensors.
        moving = _first_of(plan, network, _MOVING)
        if moving is not None:
            problem = f"must be none with activation_checkpointing of layers that update state in forward ({moving})"
            raise UserError(
                field, unit, problem, f"set {field}=none, or engines.{network}.activation_checkpointing=false"
            )


def check_cuda_graphs(plan: RunPlan, network: str) -> None:
    """Check that CUDA graphs can be used, if the recipe asks for them.

    Args:
        plan: The run's plan.
        network: ``generator`` or ``discriminator``.

    Raises:
        UserError: The device, torch's version, the gradient reduction or a layer does not allow them.
    """
    if not plan.engines[network].section.cuda_graphs:
        return
    field, file = f"engines.{network}.cuda_graphs", plan.engines[network].file
    device = get_accelerator().device_name()
    if device != "cuda":
        raise UserError(field, True, f"must be false on this device ({device})", f"set {field}=false")
    if TorchVersion(torch.__version__) < GRAPHS_SINCE:
        problem = f"must be false with torch {torch.__version__}, before {GRAPHS_SINCE} graphs may be overwritten"
        raise UserError(field, True, problem, f"install torch {GRAPHS_SINCE}, or set {field}=false")
    alone = file.stage == 0 and plan.placement(network).num_replicas == 1
    if not (alone or plan.engines[network].reduces_by_group or plan.engines[network].averages_by_group):
        if plan.engines[network].is_stock:
            problem = f"must be false with engines.stock_deepspeed={plan.recipe.engines.stock_deepspeed}"
            raise UserError(field, True, problem, f"set {field}=false, or engines.stock_deepspeed=neither")
        problem = f"must be false with the gradient reduction of {file.path}"
        raise UserError(field, True, problem, f"set {field}=false, or use a file such as ds_configs/zero2.json")
    num_replicas, averaging = plan.placement(network).num_replicas, _first_of(plan, network, (RankAverages,))
    if num_replicas > 1 and averaging is not None:
        problem = f"must be false with layers that average over {num_replicas} ranks in forward ({averaging})"
        raise UserError(field, True, problem, f"set {field}=false, or start one rank")


def _first_of(plan: RunPlan, network: str, kinds: tuple[type, ...]) -> str | None:
    """Return the class name of the first layer of a network that is one of these kinds; None if there is none."""
    with torch.device("meta"):
        modules = build_network(plan.recipe, network).modules()
    return next((type(module).__name__ for module in modules if isinstance(module, kinds)), None)
