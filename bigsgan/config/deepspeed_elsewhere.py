"""Keys of DeepSpeed files that are not the file's to set: what the recipe owns, and what DeepSpeed has removed.

Files for Accelerate or the Hugging Face Trainer have an optimizer, a scheduler, and "auto" for what a program fills in.
They load: the recipe decides, and a line says so. What else asks for a feature names the recipe's way to have it. A
feature that is switched off asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigsgan.errors import UserError

_NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
TAKEN = (
    *("optimizer", "scheduler", "steps_per_print", *_NUMBERS),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
)
"""Keys that are left out, as the recipe has others for them, or `bigsgan export`."""

_PLAN = "use `bigsgan plan`, which finds the layout of both networks"
_RECIPE = "must be unset, as the recipe owns it"
_REMOVED = "is removed from DeepSpeed 0.19.8"
_MISSING = "is not supported"

_EXPORT = "remove it; `bigsgan export --dtype bf16` writes smaller weights"
_SHARDING = "remove it; engines.{network}.pipeline_stages divides a network over few ranks, with replicas on the others"
_PARALLEL = "remove it; a network is divided by engines.{network}.pipeline_stages or ZeRO 3"
_ORDER = "remove it; data is shown in the random order of `seed`, and objective and optimizer may change over time"
_MONITOR = (_RECIPE, "remove it and use monitor")
ELSEWHERE = {
    **dict.fromkeys(("monitor_config", "tensorboard", "csv_monitor", "wandb", "comet"), _MONITOR),
    "activation_checkpointing": (_RECIPE, "remove it and use engines.{network}.activation_checkpointing"),
    "checkpoint": (_RECIPE, "remove it and use checkpoints; `bigsgan import --from universal` reads DeepSpeed's"),
    "compile": (_RECIPE, "remove it and use engines.{network}.compile"),
    "data_efficiency": (_RECIPE, _ORDER),
    "dataloader_drop_last": (_RECIPE, "remove it; all batches have `batch` images"),
    "managed_gradient_accumulation": (_RECIPE, "remove it and use accumulation"),
    "pipeline": (_RECIPE, "remove it and use engines.{network}.pipeline_stages"),
    "torch_autocast": (_RECIPE, "remove it and use bf16 or fp16; DeepSpeed's autocast does not cover D's judging"),
    "autotuning": (_MISSING, f"remove it and {_PLAN}"),
    "tensor_parallel": (_MISSING, _PARALLEL),
    "expert_parallel": (_MISSING, _PARALLEL),
    "use_data_before_expert_parallelism": (_MISSING, _PARALLEL),
    "sequence_parallel_size": (_MISSING, _PARALLEL),
    "seq_parallel_communication_data_type": (_MISSING, "remove it and use communication_data_type"),
    "hybrid_engine": (_MISSING, "remove it; `bigsgan sample` makes images without engines"),
    "datastates_ckpt": (_MISSING, "remove it; checkpoints.background writes while training continues"),
    "vocabulary_size": (_MISSING, "remove it; images have no vocabulary"),
    "weight_quantization": (_MISSING, _EXPORT),
    "bfloat16": ("is the old name of bf16", "rename it to bf16"),
    "amp": (_REMOVED, "remove it and use bf16 or fp16"),
    "compression_training": (_REMOVED, _EXPORT),
    "quantize_training": (_REMOVED, _EXPORT),
    "eigenvalue": (_REMOVED, _EXPORT),
    "curriculum_learning": (_REMOVED, _ORDER),
    "elasticity": (_REMOVED, "remove it and use `python -m bigsgan.elastic`; any checkpoint fits any number of ranks"),
    "graph_harvesting": (_REMOVED, "remove it and use engines.{network}.cuda_graphs"),
    "nebula": (_REMOVED, "remove it; checkpoints.background writes while training continues"),
    "progressive_layer_drop": (_REMOVED, "remove it; engines.{network}.activation_checkpointing saves memory"),
    "sparse_attention": (_REMOVED, "remove it; {network}.attention says where there is attention"),
    "sparse_gradients": (_REMOVED, "remove it; gradients of embeddings are reduced like others"),
    "zero_optimization.mics_shard_size": (_REMOVED, _SHARDING),
    "zero_optimization.mics_hierarchical_params_gather": (_REMOVED, _SHARDING),
    "zero_optimization.zeropp_loco_param": (_REMOVED, "remove it; gradients are not quantized"),
    "zero_optimization.cpu_offload": (_MISSING, 'write "offload_optimizer": {{"device": "cpu"}}'),
    "zero_optimization.cpu_offload_param": (_MISSING, 'write "offload_param": {{"device": "cpu"}}'),
    "zero_optimization.zenflow": (_MISSING, "remove it: the EMA needs up-to-date weights after each step"),
    "bf16.bf16_master_weights_and_grads": (_MISSING, "remove it: the EMA and the checkpoints need float32 masters"),
    "fp16.fp16_master_weights_and_grads": (_MISSING, "remove it: the EMA and the checkpoints need float32 masters"),
}
"""Problem and remedy, by key, of what a file cannot ask for."""

_PARALLEL_SIZES = ("sequence_parallel_size", "autotp_size", "tp_size")
"""Numbers of ranks that share a network or a sequence; 1 switches this off."""

_REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def refuse_elsewhere(path: Path, network: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content without features of ``ELSEWHERE`` that are switched off.

    Raises:
        UserError: The file asks for such a feature.
    """
    optimizer = content.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    if isinstance(kind, str) and kind.lower() in _REMOVED_OPTIMIZERS:
        remedy = f'use optimizer.{network}; "communication_data_type": "bf16" halves what float32 gradients send'
        raise UserError(f"{path}: optimizer.type", kind, _REMOVED, remedy)

    def kept(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        left = {}
        for key, value in section.items():
            if found := ELSEWHERE.get(prefix + key):
                if (value != {} or prefix) and _asks(value, key):  # zenflow is on where it is empty
                    raise UserError(f"{path}: {prefix}{key}", None, found[0], found[1].format(network=network))
            else:
                left[key] = kept(value, f"{key}.") if isinstance(value, dict) and not prefix else value
        return left

    return kept(content, "")


def take(content: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Remove ``TAKEN`` from ``given``, a file's values without "auto"; yield what asked for something.

    Numbers stay: they have to be the recipe's, which the caller checks.
    """
    for name in TAKEN:
        *sections, key = name.split(".")
        found, values = content, given
        for section in sections:
            found, values = found.get(section, {}), values.get(section, {})
        value = found.get(key) if isinstance(found, dict) else None
        if name not in _NUMBERS:
            values.pop(key, None)
        if value == "auto" or not (name in _NUMBERS or value is None or value is False):
            yield key


def no_autotuning() -> UserError:
    """Return the message about `--autotuning`. DeepSpeed's launcher shows what follows the word "error"."""
    return UserError("--autotuning", None, "is an error: it tunes one engine, and a GAN has two", _PLAN)


def _asks(value: object, key: str = "") -> bool:
    """Whether the value of a feature, or of its ``key``, switches it on."""
    if isinstance(value, dict) and value:
        return _asks(value.get("enabled", True)) and any(_asks(each, name) for name, each in value.items())
    if key in _PARALLEL_SIZES and type(value) is int and value == 1:
        return False
    return not (value is None or value is False or value in ("auto", -1, 0))
