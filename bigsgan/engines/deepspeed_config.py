"""DeepSpeed's configuration of an engine, from the DeepSpeed file and the recipe, checked against the machine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from bigsgan.config import RunPlan
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed import nvme
from bigsgan.engines.optimizer import num_state_tensors
from bigsgan.errors import UserError

# DeepSpeed's own sizes by ZeRO stage, in elements: they cost 311 bytes a parameter on a GAN of 6.6 million.
_LARGEST = {
    0: {},
    1: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    2: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    3: {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000, "sub_group_size": 1_000_000_000},
}
_SHARE = 0.06
"""Memory for the elements that are handled at a time, as a share of what a network holds on a rank."""
_LEAST = 2**18
"""Fewest elements for a message, or a call of an optimizer."""
_LEAST_OF_RANK = 2**15
"""Fewest elements of a message for each rank."""
_FLOAT = 4
PART_MULTIPLE = 8
"""A rank's part of a flat group has a multiple of this many elements: 16 bytes of half types, NCCL's widest copies."""


def checked_config(plan: RunPlan, network: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration, checked against the machine and by DeepSpeed itself.

    Raises:
        UserError: The machine does not support it, or DeepSpeed refuses it.
    """
    file = plan.engines[network].file
    _check_machine(network, file)
    _check_torch(network, plan.engines[network].optimizer)
    config = deepspeed_config(plan, network)
    _let_deepspeed_check(file, config, plan)
    return config


def deepspeed_config(plan: RunPlan, network: str) -> dict[str, Any]:
    """Return the DeepSpeed file's content, completed from the recipe, and without DeepSpeed's silent defaults."""
    file = plan.engines[network].file
    return {
        "steps_per_print": None,
        # This timer waits for the device in each forward pass and step (0.19.8).
        "timers": {"throughput": {"enabled": plan.engines[network].is_stock}},
        "zero_force_ds_cpu_optimizer": False,  # torch's own Adam works on offloaded shards and needs no compiler
        **file.content,
        "zero_allow_untested_optimizer": True,  # all of engines/optimizer.py are tested
        "zero_optimization": {
            "stage": 0,
            **({"overlap_comm": True} if plan.engines[network].overlaps else {}),
            **file.content.get("zero_optimization", {}),
        },
        **plan.engines[network].derived,
    }


def size_buckets(config: dict[str, Any], plan: RunPlan, network: str, numel: int) -> None:
    """Choose the sizes that ``config`` leaves open, in place: how many elements are reduced, and updated, at a time.

    ``numel`` is the number of parameters in the network's layers on this rank.
    """
    file, zero = plan.engines[network].file, config["zero_optimization"]
    sizes = dict(_LARGEST[zero["stage"]])
    weight = DTYPES[file.precision].itemsize
    handled = {
        "reduce_bucket_size": 2 * weight,  # the bucket and its copy that is sent
        "sub_group_size": weight + (_FLOAT if weight < _FLOAT else 0),  # an update copies gradients
        "stage3_prefetch_bucket_size": 2 * weight,  # the bucket, and the parameters that are copied out of it
    }
    if file.offload_optimizer != "none":  # updates then use the host's memory
        sizes.pop("sub_group_size", None)
    for key, largest in sizes.items():
        size = min(numel, _at_a_time(plan, network, numel, handled[key])) if key in handled else numel
        zero.setdefault(key, max(2, min(largest, size + size % 2)))  # DeepSpeed asks for even numbers (0.19.8)
    if "allgather_bucket_size" in zero:  # DeepSpeed asks for a multiple of its parts' alignment (0.19.8)
        zero["allgather_bucket_size"] += -zero["allgather_bucket_size"] % PART_MULTIPLE


class AtATime(NamedTuple):
    """How many elements ZeRO 0 copies at a time; the other ZeRO stages have sizes in their files."""

    reduced: int  # to reduce their gradients
    updated: int  # to update them: gradients below float32 are converted for it


def stage_0_at_a_time(plan: RunPlan, network: str, numel: int) -> AtATime:
    """Choose these numbers by the memory that the network's layers on this rank, of ``numel`` parameters, take."""
    weight = DTYPES[plan.engines[network].file.precision].itemsize
    return AtATime(_at_a_time(plan, network, numel, weight), _at_a_time(plan, network, numel, _FLOAT))


def _at_a_time(plan: RunPlan, network: str, numel: int, handled: int) -> int:
    """Return how many elements, at ``handled`` bytes each, cost a small share of the memory that the network takes."""
    least = max(_LEAST, _LEAST_OF_RANK * plan.placement(network).num_replicas)
    return max(least, int(_SHARE * numel * _bytes_of_parameter(plan, network) / handled))


def _bytes_of_parameter(plan: RunPlan, network: str) -> float:
    """Return ZeRO's bytes a parameter on a rank's device (Rajbhandari et al. 2020, arXiv 1910.02054, section 5)."""
    file, num = plan.engines[network].file, plan.placement(network).num_replicas
    weight = gradient = DTYPES[file.precision].itemsize
    has_masters = file.stage > 0 or weight < _FLOAT
    states = _FLOAT * (has_masters + num_state_tensors(plan.engines[network].optimizer, file))
    held = {"weight": float(weight), "gradient": float(gradient), "states": float(states)}
    for name in ("states", "gradient", "weight")[: file.stage]:
        held[name] /= num
    if file.offload_optimizer != "none":
        held["states"] = 0.0
    return sum(held.values())


def zero_settings(plan: RunPlan, network: str, numel: int) -> DeepSpeedZeroConfig:
    """Return the ZeRO section for an engine with ``numel`` parameters on this rank, with DeepSpeed's defaults."""
    config = deepspeed_config(plan, network)
    size_buckets(config, plan, network, numel)
    return DeepSpeedZeroConfig(**config["zero_optimization"])


def _let_deepspeed_check(file: DeepSpeedFile, config: dict[str, Any], plan: RunPlan) -> None:
    """Have DeepSpeed check its configuration before any engine is built."""
    on_all_ranks = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.world_size
    try:
        DeepSpeedConfig({**config, "train_batch_size": on_all_ranks})  # DeepSpeed counts no pipeline stages here
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"is not valid for DeepSpeed: {first['msg']}"
        if not first["loc"]:  # the error is about several keys together
            raise UserError(str(file.path), None, problem, "fix it") from None
        key = str(first["loc"][0])
        section = next((name for name, value in config.items() if isinstance(value, dict) and key in value), "")
        where = ".".join([section, *map(str, first["loc"])])
        raise UserError(f"{file.path}: {where}", first["input"], problem, "fix or remove it") from None
    except (AssertionError, TypeError, ValueError, DeepSpeedConfigError) as error:
        raise UserError(str(file.path), None, f"is not valid for DeepSpeed: {error}", "fix the file") from None


def _check_torch(network: str, optimizer: Optimizer) -> None:
    if optimizer.kind == "muon" and not hasattr(torch.optim, "Muon"):
        problem, remedy = (
            f"needs torch 2.9 or later, and this is {torch.__version__}",
            "update torch, or set it to adamw",
        )
        raise UserError(f"optimizer.{network}.kind", "muon", problem, remedy)


def _check_machine(network: str, file: DeepSpeedFile) -> None:
    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if file.precision in supported and not supported[file.precision]():
        (other,) = supported.keys() - {file.precision}
        raise UserError(
            f"engines.{network}.ds_config",
            str(file.path),
            f"sets {file.precision}, which this {accelerator.device_name()} does not support",
            f"use another precision, such as ds_configs/zero1_{other}.json",
        )
    if file.uses_nvme:
        nvme.check_nvme(network, file)
