"""Whether a recipe's networks can be compiled, and replayed as CUDA graphs, on this machine."""

from __future__ import annotations

import logging
import os
import shutil

import torch
from deepspeed.accelerator import get_accelerator
from torch.torch_version import TorchVersion
from torch.utils._triton import has_triton

from bigsgan.config import RunPlan
from bigsgan.errors import UserError
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.build import network_on_meta
from bigsgan.models.layers import RankAverages, SpectralLayer

_log = logging.getLogger(__name__)

COMPILED_SINCE = "2.11"
"""The first version of torch whose compiled updates were compared with plain PyTorch's."""
GRAPHS_SINCE = "2.15"
"""The version of torch whose lifetimes of results were studied; see replays.py."""

_MOVING = (SpectralLayer, BatchStatistics)


def check_compiler(plan: RunPlan, network: str) -> None:
    """Check that torch.compile can work on this machine, if the recipe asks for it.

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
    if TorchVersion(torch.__version__) < COMPILED_SINCE:
        text = f"compiled updates were compared with plain PyTorch's from {COMPILED_SINCE} on"
        remedy = "compare them on this machine by `bigsgan doctor --only arithmetic.compiled`"
        _log.warning("%s: torch is %s, and %s: %s", field, torch.__version__, text, remedy)
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
    needs_no_reduction = file.stage == 0 and plan.placement(network).num_replicas == 1
    if not (needs_no_reduction or plan.engines[network].reduces_by_group or plan.engines[network].averages_by_group):
        if plan.engines[network].is_stock:
            problem = f"must be false with engines.stock_deepspeed={plan.recipe.engines.stock_deepspeed}"
            raise UserError(field, True, problem, f"set {field}=false, or engines.stock_deepspeed=neither")
        problem = f"must be false with DeepSpeed's own gradient reduction, which {file.path} asks for"
        raise UserError(field, True, problem, f"set {field}=false, or use a file such as ds_configs/zero2.json")
    num_replicas, averaging = plan.placement(network).num_replicas, _first_of(plan, network, (RankAverages,))
    if num_replicas > 1 and averaging is not None:
        problem = f"must be false with layers that average over {num_replicas} ranks in forward ({averaging})"
        raise UserError(field, True, problem, f"set {field}=false, or start one rank")


def _first_of(plan: RunPlan, network: str, kinds: tuple[type, ...]) -> str | None:
    """Return the class name of the first layer of a network that is one of these kinds; None if there is none."""
    modules = network_on_meta(plan.recipe, network).modules()
    return next((type(module).__name__ for module in modules if isinstance(module, kinds)), None)
