"""Makes a network's engine from a run's plan: network, initialisation, optimizer, DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.utils import groups, logger
from pydantic import ValidationError
from torch import nn

from bigsgan import comm
from bigsgan.config import RunPlan
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.recipe import derived_keys
from bigsgan.config.sections import Optimizer
from bigsgan.engines import nvme, zero_private
from bigsgan.engines.native_ops import build_async_io, build_cpu_adam
from bigsgan.engines.zero import Root, ZeroEngine
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.layers import BatchStatistics
from bigsgan.models.network import LayerStack, initialize

# DeepSpeed's own sizes of communication buckets by stage, in elements. A network smaller than that gets smaller ones:
# at these sizes they cost 311 bytes a parameter on a GAN of 6.6 million.
_BUCKETS = {
    1: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    2: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    3: {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000},
}


_log = logging.getLogger(__name__)


def build_engine(plan: RunPlan, network: str) -> ZeroEngine:
    """Build ``generator`` or ``discriminator`` with its own DeepSpeed engine.

    Raises:
        UserError: This machine cannot do what the DeepSpeed file asks for.
    """
    file = plan.deepspeed_files[network]
    _check_machine(network, file)
    if file.stage == 3 and not plan.recipe.engine(network).activation_checkpointing:
        _log.warning(
            "%s: between forward and backward, spectral normalisation keeps a copy of every weight whole on each rank; "
            "engines.%s.activation_checkpointing=true keeps them sharded",
            network,
            network,
        )
    logger.setLevel(logging.ERROR)  # its warnings (an untested optimizer, say) ask nothing of the user
    config = deepspeed_config(plan, network)
    _let_deepspeed_check(file, config)
    release = _offload_to_nvme(plan, network, config) if file.uses_nvme else None
    stack = _build_initialized(plan, network, file, config)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in stack.parameters())
    _size_buckets(config["zero_optimization"], numel)
    root = Root(stack)
    optimizer = _build_optimizer(getattr(plan.recipe.optimizer, network), stack, file)
    groups.mpu = None  # a pipeline engine built earlier in this process would lend its ranks to this one
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    if file.uses_nvme:
        zero_private.keep_gradients_in_memory(engine)
    # DeepSpeed broadcasts parameters and not buffers.
    comm.broadcast(stack.buffers())
    if comm.world_size() > 1:
        for module in stack.modules():
            if isinstance(module, BatchStatistics):
                module.average_over_ranks, module.num_ranks = comm.mean_over_ranks, comm.world_size()
    return ZeroEngine(engine, root, comm.rank(), release)


def deepspeed_config(plan: RunPlan, network: str) -> dict[str, Any]:
    """The DeepSpeed file completed with what follows from the recipe, and without DeepSpeed's silent defaults."""
    file = plan.deepspeed_files[network]
    content = {key: value for key, value in file.content.items() if value != "auto"}
    return {
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own Adam works on offloaded shards and needs no compiler
        **content,
        "zero_optimization": {"stage": 0, **content.get("zero_optimization", {})},
        **derived_keys(plan.recipe, network, plan.world_size),
    }


def _build_initialized(plan: RunPlan, network: str, file: DeepSpeedFile, config: dict[str, Any]) -> LayerStack:
    """Build the network and initialise it; at stage 3 sharded from the first parameter on."""
    seed = plan.recipe.seed if network == "generator" else plan.recipe.seed + 2**32
    if file.stage < 3:
        stack = build_network(plan.recipe, network)
        initialize(stack, seed)
        return stack.to(comm.device())
    with deepspeed.zero.Init(config_dict_or_path=config):
        stack = build_network(plan.recipe, network)
    for module in stack.modules():  # zero.Init gives buffers the parameters' type and place
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=torch.float32, device=comm.device()))

    def gather(parameters: list[nn.Parameter]) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)

    initialize(stack, seed, gather, writes=comm.rank() == 0)
    return stack


def _build_optimizer(section: Optimizer, stack: LayerStack, file: DeepSpeedFile) -> torch.optim.Optimizer:
    parameters = list(stack.parameters())
    lr, decay, eps = section.lr, section.weight_decay, section.eps
    beta1, beta2 = section.betas
    if section.kind == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=section.momentum, weight_decay=decay, fused=True)
    if section.kind == "rmsprop":
        return torch.optim.RMSprop(parameters, lr, beta2, eps, decay, section.momentum, foreach=True)
    if file.offload_optimizer != "none" and file.content.get("zero_force_ds_cpu_optimizer", False):
        cpu_adam = build_cpu_adam()
        return cpu_adam(parameters, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, adamw_mode=False)
    return torch.optim.Adam(parameters, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True)


def _offload_to_nvme(plan: RunPlan, network: str, config: dict[str, Any]) -> Callable[[], None]:
    """Complete the section for NVMe; return what removes the swap files."""
    file = plan.deepspeed_files[network]
    buffers = nvme.num_swap_buffers(file, getattr(plan.recipe.optimizer, network))
    path, release = nvme.open_swap_directory(file, network, comm.rank())
    build_async_io()
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": str(path), "buffer_count": buffers}
    return release


def _size_buckets(zero: dict[str, Any], numel: int) -> None:
    for key, limit in _BUCKETS.get(zero["stage"], {}).items():
        zero.setdefault(key, max(1, min(limit, numel)))


def _let_deepspeed_check(file: DeepSpeedFile, config: dict[str, Any]) -> None:
    """Have DeepSpeed read its configuration before any engine is built: it knows what its sections may hold."""
    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        section = next((name for name, value in config.items() if isinstance(value, dict) and key in value), "")
        where = ".".join([section, *map(str, first["loc"])])
        problem = f"is refused by DeepSpeed ({first['msg']})"
        raise UserError(f"{file.path}: {where}", first["input"], problem, "mend or remove it") from None
    except (AssertionError, TypeError, ValueError, DeepSpeedConfigError) as error:
        raise UserError(str(file.path), None, f"is refused by DeepSpeed ({error})", "mend the file") from None


def _check_machine(network: str, file: DeepSpeedFile) -> None:
    accelerator = get_accelerator()
    if file.precision == "fp16" and not accelerator.is_fp16_supported():
        raise UserError(
            f"engines.{network}.ds_config",
            str(file.path),
            f"asks for fp16, which this {accelerator.device_name()} cannot compute",
            "use a bf16 file such as ds_configs/zero1_bf16.json",
        )
    if file.precision == "bf16" and not accelerator.is_bf16_supported():
        raise UserError(
            f"engines.{network}.ds_config",
            str(file.path),
            f"asks for bf16, which this {accelerator.device_name()} cannot compute",
            "use an fp16 file such as ds_configs/zero1_fp16.json",
        )
    if file.uses_nvme:
        nvme.check_nvme(network, file)
