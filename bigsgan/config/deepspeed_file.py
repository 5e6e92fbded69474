"""Reads and checks a DeepSpeed JSON file before DeepSpeed is imported.

Each setting has one owner: the file owns ZeRO, offload, buckets, precision and communication, the recipe the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigsgan.config.deepspeed_keys import FILE, check_values
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import parse_json, read_text
from bigsgan.shipped import ROOT

# Settings that the recipe owns, as {key in the DeepSpeed file: key in the recipe}.
_RECIPE_OWNS = {
    "optimizer": "optimizer.{network}",
    "scheduler": "optimizer.{network}.decay",
    **dict.fromkeys(("monitor_config", "tensorboard", "csv_monitor", "wandb", "comet"), "monitor"),
    "activation_checkpointing": "engines.{network}.activation_checkpointing",
    "managed_gradient_accumulation": "accumulation",
    "data_efficiency": "data",
    "torch_autocast": "bf16 or fp16 in the same file (DeepSpeed's autocast does not cover the networks' calls)",
}

# Features that the engines do not support, as (section, key, remedy).
_REFUSED = (
    ("zero_optimization", "cpu_offload", 'write "offload_optimizer": {"device": "cpu"}'),
    ("zero_optimization", "cpu_offload_param", 'write "offload_param": {"device": "cpu"}'),
    ("zero_optimization", "zenflow", "remove it: the EMA needs up-to-date weights after each step"),
    ("bf16", "bf16_master_weights_and_grads", "remove it: the EMA and the checkpoints need float32 masters"),
    ("fp16", "fp16_master_weights_and_grads", "remove it: the EMA and the checkpoints need float32 masters"),
)

Precision = Literal["fp32", "bf16", "fp16"]
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LOW_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")


@dataclass(frozen=True)
class DeepSpeedFile:
    """A checked DeepSpeed file."""

    path: Path  # path of the file
    content: dict[str, Any]  # the file's own keys, unchanged
    stage: int  # ZeRO stage, 0 to 3
    precision: Precision  # type of parameters and activations
    offload_optimizer: str  # device of the optimizer's state: none, cpu, or nvme at ZeRO 3
    offload_parameters: str  # device of the parameters at ZeRO 3: none or cpu

    @property
    def uses_nvme(self) -> bool:
        """Whether the optimizer's state is offloaded to NVMe."""
        return self.offload_optimizer == "nvme"


def find_deepspeed_file(name: str, recipe_dir: Path | None) -> Path | None:
    """Look for ``name`` in the working directory, beside the recipe, and among the built-in files."""
    shipped = ROOT / "ds_configs" / f"{name.removesuffix('.json')}.json"
    for path in (Path.cwd() / name, *([recipe_dir / name] if recipe_dir else []), ROOT / name, shipped):
        # os.path, because Path.is_file raises if a name is too long or a directory may not be read.
        if os.path.isfile(path):
            return path.resolve()
    return None


def read_deepspeed_file(network: str, name: str, recipe_dir: Path | None, derived: dict[str, Any]) -> DeepSpeedFile:
    """Read the file that ``engines.<network>.ds_config`` names, by a path or as a built-in one.

    ``derived`` are values that follow from the recipe, such as ``train_batch_size``; the file may repeat them.

    Raises:
        UserError: The file does not exist, is not JSON, has an unknown key or one that the recipe owns, contradicts
            the recipe, or asks for a combination that is not supported.
    """
    field = f"engines.{network}.ds_config"
    path = find_deepspeed_file(name, recipe_dir)
    if path is None:
        remedy = "give the path of a DeepSpeed JSON file, or the name of a built-in one such as zero1"
        raise UserError(field, name, "does not exist", remedy)
    content = _read_json(field, path)
    _check_owner(field, network, path, content, derived)
    check_values(f"{path}: ", content, FILE)
    for section, key, remedy in _REFUSED:
        value = content.get(section, {}).get(key)
        if value is not None and value is not False:
            raise UserError(f"{path}: {section}.{key}", None, "is not supported", remedy)
    zero = content.get("zero_optimization", {})
    stage = _stage(path, zero)
    precision = _precision(path, content)
    _check_precision(path, content, stage, precision)
    _check_scaling(path, content, stage)
    where = f"{path}: zero_optimization.offload_optimizer"
    optimizer = _offload(where, zero.get("offload_optimizer"))
    if optimizer != "none" and stage == 0:
        remedy = "set zero_optimization.stage to 2"
        raise UserError(f"{where}.device", optimizer, "must be none at ZeRO 0", remedy)
    if optimizer == "nvme" and stage != 3:
        remedy = 'set zero_optimization.stage to 3, or write "cpu"'
        raise UserError(f"{where}.device", optimizer, f"must be cpu at ZeRO {stage}", remedy)
    if optimizer != "none" and (ratio := zero["offload_optimizer"].get("ratio", 1)) != 1:
        detail = "DeepSpeed 0.19 updates the rest with its own AdamW"
        raise UserError(f"{where}.ratio", ratio, "must be 1", "remove it, which offloads everything", detail)
    where = f"{path}: zero_optimization.offload_param"
    parameters = _offload(where, zero.get("offload_param"))
    if parameters != "none" and stage != 3:
        remedy = "set zero_optimization.stage to 3"
        raise UserError(f"{where}.device", parameters, f"must be none at ZeRO {stage}", remedy)
    if parameters == "nvme":
        remedy, detail = 'write "cpu"; offload_optimizer may be nvme', "DeepSpeed 0.19 fails to prefetch from NVMe"
        raise UserError(f"{where}.device", parameters, "must be none or cpu", remedy, detail)
    return DeepSpeedFile(path, content, stage, precision, optimizer, parameters)


def _check_precision(path: Path, content: dict[str, Any], stage: int, precision: Precision) -> None:
    for section, key, matters in (
        ("zero_optimization", "compute_grad_norm", stage in (1, 2)),
        ("bf16", "check_grad_overflow", precision == "bf16"),
    ):
        if matters and (value := content.get(section, {}).get(key, True)) is not True:
            problem = "must be true" + (", got null" if value is None else "")
            detail = "non-finite updates would not be skipped"
            raise UserError(f"{path}: {section}.{key}", value, problem, "remove it", detail)
    if precision == "fp16" and stage == 0:
        remedy = "set zero_optimization.stage to 1, as ds_configs/zero1_fp16.json does"
        detail = "DeepSpeed 0.19 does not scale the loss there"
        raise UserError(f"{path}: fp16.enabled", True, "must be false at ZeRO 0", remedy, detail)
    types = content.get("data_types", {})
    held, accumulates = types.get("param_dtype"), types.get("grad_accum_dtype")
    if held is not None and _SHORT.get(held, held) != precision:
        remedy = "remove it: bf16.enabled and fp16.enabled decide"
        raise UserError(f"{path}: data_types.param_dtype", held, f"must be {precision}", remedy)
    if stage == 0 and accumulates is not None and _SHORT.get(accumulates, accumulates) != precision:
        where, problem = f"{path}: data_types.grad_accum_dtype", f"must be {precision} at ZeRO 0"
        raise UserError(where, accumulates, problem, "set zero_optimization.stage to 1")


def _check_scaling(path: Path, content: dict[str, Any], stage: int) -> None:
    """Refuse scaling that DeepSpeed 0.19 does not support with reduce-scattered gradients."""
    if stage < 2 or content["zero_optimization"].get("reduce_scatter", True) is False:
        return
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value := content.get(key, "auto")) not in ("auto", default):
            problem = f"must be {'false' if default is False else default} at ZeRO {stage}"
            remedy, detail = "remove it, or set zero_optimization.stage to 1", "DeepSpeed 0.19 reduce-scatters there"
            raise UserError(f"{path}: {key}", value, problem, remedy, detail)


def _read_json(field: str, path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error, path)}", "fix its permissions") from None
    except ValueError as error:
        raise UserError(field, str(path), "must be valid JSON", "fix the file", str(error)) from None
    if not isinstance(content, dict):
        raise UserError(field, str(path), "must be a JSON object", 'write {"zero_optimization": {"stage": 1}}')
    return content


def _check_owner(field: str, network: str, path: Path, content: dict[str, Any], derived: dict[str, Any]) -> None:
    for key, owner in _RECIPE_OWNS.items():
        if key in content:
            remedy = f"remove it and use {owner.format(network=network)}"
            raise UserError(f"{path}: {key}", None, "must be unset, as the recipe owns it", remedy)
    for key, value in derived.items():
        given = content.get(key, "auto")
        if given not in ("auto", value):
            remedy = "remove it from the file; the recipe's batch, accumulation and clip_norm decide"
            raise UserError(f"{path}: {key}", given, f"must be {value}, as in the recipe", remedy, f"named by {field}")


def _stage(path: Path, zero: dict[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage", stage, "must be 0, 1, 2 or 3", "choose one of these")
    return stage


def _precision(path: Path, content: dict[str, Any]) -> Precision:
    enabled: list[Precision] = []
    for key in _LOW_PRECISIONS:
        on = content.get(key, {}).get("enabled", False)
        if not isinstance(on, bool):
            raise UserError(f"{path}: {key}.enabled", on, "must be true or false", "write true or false")
        if on:
            enabled.append(key)
    if len(enabled) == 2:
        raise UserError(f"{path}: fp16.enabled", True, "must be false with bf16.enabled", "enable only one of them")
    return enabled[0] if enabled else "fp32"


def _offload(where: str, section: dict[str, Any] | None) -> str:
    """Return the device that a section, which ``where`` names in messages, offloads to."""
    section = section or {}
    device = section.get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        problem = "must be none, cpu or nvme" + (", got null" if device is None else "")
        raise UserError(f"{where}.device", device, problem, "choose one of these")
    if device == "nvme" and not section.get("nvme_path"):
        raise UserError(f"{where}.nvme_path", None, "must be given", "give a directory on the NVMe drive")
    return device


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"duplicate key {key!r}")
        content[key] = value
    return content
