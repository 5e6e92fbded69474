"""DeepSpeed's configuration of an engine: the file, what follows from the recipe, and what the machine can do."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from bigsgan.config import RunPlan
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.recipe import derived_keys
from bigsgan.engines import nvme
from bigsgan.errors import UserError

# DeepSpeed's own sizes of communication buckets by stage, in elements. A network smaller than that gets smaller ones:
# at these sizes they cost 311 bytes a parameter on a GAN of 6.6 million.
_BUCKETS = {
    1: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    2: {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    3: {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000},
}


def checked_config(plan: RunPlan, network: str) -> dict[str, Any]:
    """DeepSpeed's configuration, after asking the machine and DeepSpeed itself whether they can do it.

    Raises:
        UserError: They cannot.
    """
    file = plan.deepspeed_files[network]
    _check_machine(network, file)
    config = deepspeed_config(plan, network)
    _let_deepspeed_check(file, config, plan)
    return config


def deepspeed_config(plan: RunPlan, network: str) -> dict[str, Any]:
    """The DeepSpeed file completed with what follows from the recipe, and without DeepSpeed's silent defaults."""
    file = plan.deepspeed_files[network]
    content = {key: value for key, value in file.content.items() if value != "auto"}
    return {
        "steps_per_print": None,
        "zero_force_ds_cpu_optimizer": False,  # torch's own Adam works on offloaded shards and needs no compiler
        **content,
        "zero_allow_untested_optimizer": True,  # all of engines/optimizer.py are tested
        "zero_optimization": {"stage": 0, **content.get("zero_optimization", {})},
        **derived_keys(plan, network),
    }


def size_buckets(config: dict[str, Any], numel: int) -> None:
    """Give the communication buckets that the file leaves open a size that fits a network of ``numel`` parameters."""
    zero = config["zero_optimization"]
    for key, limit in _BUCKETS.get(zero["stage"], {}).items():
        zero.setdefault(key, max(2, min(limit, numel + numel % 2)))  # an even number is asked for (0.19.8)


def zero_settings(plan: RunPlan, network: str, numel: int) -> DeepSpeedZeroConfig:
    """The section about ZeRO as an engine with ``numel`` parameters on this rank gets it, with DeepSpeed's defaults."""
    config = deepspeed_config(plan, network)
    size_buckets(config, numel)
    return DeepSpeedZeroConfig(**config["zero_optimization"])


def _let_deepspeed_check(file: DeepSpeedFile, config: dict[str, Any], plan: RunPlan) -> None:
    """Have DeepSpeed read its configuration before any engine is built: it knows what its sections may hold."""
    on_all_ranks = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * plan.world_size
    try:
        DeepSpeedConfig({**config, "train_batch_size": on_all_ranks})  # it knows nothing of pipelines yet
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
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if file.precision in supported and not supported[file.precision]():
        (other,) = supported.keys() - {file.precision}
        raise UserError(
            f"engines.{network}.ds_config",
            str(file.path),
            f"asks for {file.precision}, which this {accelerator.device_name()} cannot compute",
            f"use another precision, such as ds_configs/zero1_{other}.json",
        )
    if file.uses_nvme:
        nvme.check_nvme(network, file)
