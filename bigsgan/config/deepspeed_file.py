"""Reads and checks a DeepSpeed JSON file before DeepSpeed is imported.

One owner for each number: the file owns ZeRO, offload, buckets, precision and communication, the recipe owns the rest.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigsgan.config.deepspeed_keys import FILE, check_values
from bigsgan.errors import UserError
from bigsgan.paths import read_text
from bigsgan.shipped import ROOT

_MOST_BYTES = 1 << 20

# What the recipe owns, as (key in the DeepSpeed file, key in the recipe). ``{network}`` is generator or discriminator.
_RECIPE_OWNS = {
    "optimizer": "optimizer.{network}",
    "scheduler": "optimizer.{network}.decay",
    "monitor_config": "report_nimg (TensorBoard and metrics.jsonl are always written)",
    "tensorboard": "report_nimg (TensorBoard and metrics.jsonl are always written)",
    "csv_monitor": "report_nimg (TensorBoard and metrics.jsonl are always written)",
    "wandb": "report_nimg (TensorBoard and metrics.jsonl are always written)",
    "comet": "report_nimg (TensorBoard and metrics.jsonl are always written)",
    "activation_checkpointing": "engines.{network}.activation_checkpointing",
    "managed_gradient_accumulation": "accumulation",
    "data_efficiency": "data",
    "torch_autocast": "bf16 or fp16 of the same file (the seam calls the network outside of DeepSpeed's autocast)",
}

# Features that the engines cannot honour, as (section, key, remedy).
_REFUSED = (
    ("zero_optimization", "cpu_offload", 'write "offload_optimizer": {"device": "cpu"}'),
    ("zero_optimization", "cpu_offload_param", 'write "offload_param": {"device": "cpu"}'),
    ("zero_optimization", "zenflow", "remove it: the average needs all weights to be up to date after each step"),
    ("bf16", "bf16_master_weights_and_grads", "remove it: the average and the checkpoints need float32 masters"),
    ("fp16", "fp16_master_weights_and_grads", "remove it: the average and the checkpoints need float32 masters"),
)

Precision = Literal["fp32", "bf16", "fp16"]
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LOW_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")


@dataclass(frozen=True)
class DeepSpeedFile:
    """A checked DeepSpeed file.

    Attributes:
        path: Where it was read from.
        content: The file's own keys, unchanged.
        stage: ZeRO stage, 0 to 3.
        precision: Of parameters and activations.
        offload_optimizer: Device of the optimizer's state: none, cpu, or nvme at stage 3.
        offload_parameters: Device of the parameters at stage 3: none or cpu.
    """

    path: Path
    content: dict[str, Any]
    stage: int
    precision: Precision
    offload_optimizer: str
    offload_parameters: str

    @property
    def uses_nvme(self) -> bool:
        """Whether the optimizer's state is offloaded to NVMe."""
        return self.offload_optimizer == "nvme"


def find_deepspeed_file(name: str, recipe_dir: Path | None) -> Path | None:
    """Look ``name`` up in the working directory, beside the recipe, and among those that ship, by path or by name."""
    shipped = ROOT / "ds_configs" / f"{name.removesuffix('.json')}.json"
    for path in (Path.cwd() / name, *([recipe_dir / name] if recipe_dir else []), ROOT / name, shipped):
        # os.path, because Path.is_file raises where a name is too long or a directory may not be read.
        if os.path.isfile(path):
            return path.resolve()
    return None


def read_deepspeed_file(network: str, name: str, recipe_dir: Path | None, derived: dict[str, Any]) -> DeepSpeedFile:
    """Read the file that ``engines.<network>.ds_config`` names.

    Args:
        network: ``generator`` or ``discriminator``.
        name: The path as the recipe gives it.
        recipe_dir: Directory of the recipe, for relative paths.
        derived: Values that follow from the recipe, such as ``train_batch_size``; the file may repeat them.

    Raises:
        UserError: The file is missing, is not JSON, holds what the recipe owns, contradicts the recipe, or asks for
            what cannot work.
    """
    field = f"engines.{network}.ds_config"
    path = find_deepspeed_file(name, recipe_dir)
    if path is None:
        remedy = "give the path of a DeepSpeed JSON file, or the name of one that ships, such as zero1"
        raise UserError(field, name, "does not exist", remedy)
    content = _read_json(field, path)
    _check_owner(field, network, path, content, derived)
    _check_keys(path, content)
    zero = content.get("zero_optimization", {})
    stage = _stage(path, zero)
    precision = _precision(path, content)
    _check_precision(path, content, stage, precision)
    _check_scaling(path, content, stage)
    optimizer = _offload(path, zero, "offload_optimizer")
    if optimizer != "none" and stage == 0:
        where = f"{path}: zero_optimization.offload_optimizer.device"
        raise UserError(where, optimizer, "needs ZeRO stage 1 or more", "set zero_optimization.stage to 2")
    if optimizer == "nvme" and stage != 3:
        where = f"{path}: zero_optimization.offload_optimizer.device"
        raise UserError(where, optimizer, "needs ZeRO stage 3", 'set zero_optimization.stage to 3, or write "cpu"')
    if optimizer != "none" and (ratio := zero["offload_optimizer"].get("ratio", 1)) != 1:
        where = f"{path}: zero_optimization.offload_optimizer.ratio"
        problem = "is not supported: DeepSpeed 0.19 updates the part that is not offloaded with an AdamW of its own"
        raise UserError(where, ratio, problem, "remove it, which offloads all")
    parameters = _offload(path, zero, "offload_param")
    if parameters != "none" and stage != 3:
        where = f"{path}: zero_optimization.offload_param.device"
        raise UserError(where, parameters, "needs ZeRO stage 3", "set zero_optimization.stage to 3")
    if parameters == "nvme":
        where = f"{path}: zero_optimization.offload_param.device"
        problem = "is not supported: DeepSpeed 0.19 fails as it prefetches parameters from there"
        raise UserError(where, parameters, problem, 'write "cpu"; offload_optimizer may be nvme')
    return DeepSpeedFile(path, content, stage, precision, optimizer, parameters)


def _check_precision(path: Path, content: dict[str, Any], stage: int, precision: Precision) -> None:
    checks = [("zero_optimization", "compute_grad_norm", stage in (1, 2))]
    checks.append(("bf16", "check_grad_overflow", precision == "bf16"))
    for section, key, matters in checks:
        if matters and (value := content.get(section, {}).get(key, True)) is not True:
            problem = "would apply gradients that are not finite, which every other engine skips"
            raise UserError(f"{path}: {section}.{key}", value, problem, "remove it")
    if precision == "fp16" and stage == 0:
        raise UserError(
            f"{path}: fp16.enabled",
            True,
            "does not train at ZeRO stage 0 (DeepSpeed 0.19 leaves the loss unscaled there)",
            "set zero_optimization.stage to 1, as ds_configs/zero1_fp16.json does",
        )
    types = content.get("data_types", {})
    held, accumulates = types.get("param_dtype"), types.get("grad_accum_dtype")
    if held is not None and _SHORT.get(held, held) != precision:
        remedy = "remove it: bf16.enabled and fp16.enabled decide"
        raise UserError(f"{path}: data_types.param_dtype", held, f"contradicts the file's {precision}", remedy)
    if stage == 0 and accumulates is not None and _SHORT.get(accumulates, accumulates) != precision:
        where, problem = f"{path}: data_types.grad_accum_dtype", f"does not go with {precision} at ZeRO stage 0"
        raise UserError(where, accumulates, problem, "set zero_optimization.stage to 1")


def _check_scaling(path: Path, content: dict[str, Any], stage: int) -> None:
    """Refuse what DeepSpeed 0.19 asserts of gradients that are reduce-scattered."""
    if stage < 2 or content["zero_optimization"].get("reduce_scatter", True) is False:
        return
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value := content.get(key, "auto")) not in ("auto", default):
            problem = f"is not supported by DeepSpeed 0.19 at ZeRO stage {stage}, whose gradients are reduce-scattered"
            raise UserError(f"{path}: {key}", value, problem, "remove it, or set zero_optimization.stage to 1")


def _read_json(field: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path, _MOST_BYTES), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read ({error})", "mend its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(field, str(path), f"is not valid JSON: {error}", "mend the file") from None
    if not isinstance(content, dict):
        raise UserError(field, str(path), "holds no JSON object", 'write {"zero_optimization": {"stage": 1}}')
    return content


def _check_owner(field: str, network: str, path: Path, content: dict[str, Any], derived: dict[str, Any]) -> None:
    for key, owner in _RECIPE_OWNS.items():
        if key in content:
            remedy = f"remove it and use {owner.format(network=network)}"
            raise UserError(f"{path}: {key}", content[key], "is set there, but the recipe owns it", remedy)
    for key, value in derived.items():
        given = content.get(key, "auto")
        if given not in ("auto", value):
            raise UserError(
                f"{path}: {key}",
                given,
                f"contradicts the recipe, from which {value} follows ({field})",
                "remove it from the file; the recipe's batch, accumulation and clip_norm decide",
            )


def _check_keys(path: Path, content: dict[str, Any]) -> None:
    check_values(f"{path}: ", content, FILE)
    for name, key, remedy in _REFUSED:
        value = content.get(name, {}).get(key)
        if value is not None and value is not False:
            raise UserError(f"{path}: {name}.{key}", value, "is not supported", remedy)


def _stage(path: Path, zero: dict[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage", stage, "is no ZeRO stage", "set 0, 1, 2 or 3")
    return stage


def _precision(path: Path, content: dict[str, Any]) -> Precision:
    enabled: list[Precision] = []
    for key in _LOW_PRECISIONS:
        on = content.get(key, {}).get("enabled", False)
        if not isinstance(on, bool):
            raise UserError(f"{path}: {key}.enabled", on, "is not true or false", "write true or false")
        if on:
            enabled.append(key)
    if len(enabled) == 2:
        raise UserError(f"{path}: fp16.enabled", True, "but bf16.enabled is true too", "enable one of them")
    return enabled[0] if enabled else "fp32"


def _offload(path: Path, zero: dict[str, Any], key: str) -> str:
    where, section = f"{path}: zero_optimization.{key}", zero.get(key) or {}
    if not isinstance(section, dict):
        raise UserError(where, section, "is not an object", 'write {"device": "cpu"}')
    device = section.get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f"{where}.device", device, "is no offload device", "set none, cpu or nvme")
    if device == "nvme" and not section.get("nvme_path"):
        raise UserError(f"{where}.nvme_path", None, "is missing", "give a directory on the NVMe drive")
    return device


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"key {key!r} stands twice")
        content[key] = value
    return content
