"""Reads and checks a DeepSpeed JSON file before DeepSpeed is imported.

One owner for each number: the file owns ZeRO, offload, buckets, precision and communication, the recipe owns the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigsgan.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]

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

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class DeepSpeedFile:
    """A checked DeepSpeed file.

    Attributes:
        path: Where it was read from.
        content: The file's own keys, unchanged.
        stage: ZeRO stage, 0 to 3.
        precision: Of parameters and activations.
        offload_optimizer: Device of the optimizer's state: none, cpu or nvme.
        offload_parameters: Device of the parameters at stage 3: none, cpu or nvme.
    """

    path: Path
    content: dict[str, Any]
    stage: int
    precision: Precision
    offload_optimizer: str
    offload_parameters: str

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to NVMe."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)


def find_deepspeed_file(name: str, recipe_dir: Path | None) -> Path | None:
    """Look ``name`` up in the working directory, beside the recipe, and in the repository."""
    for base in (Path.cwd(), recipe_dir, REPOSITORY):
        if base is not None and (base / name).is_file():
            return (base / name).resolve()
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
        raise UserError(field, name, "does not exist", "give the path of a DeepSpeed JSON file, such as ds_configs/zero1.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except (OSError, ValueError) as error:
        raise UserError(field, str(path), f"is not valid JSON: {error}", "mend the file") from None
    if not isinstance(content, dict):
        raise UserError(field, str(path), "holds no JSON object", "write {...}")
    _check_owner(field, network, path, content, derived)
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError(f"{path}: zero_optimization", zero, "is not an object", 'write {"stage": 1}')
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage", stage, "is no ZeRO stage", "set 0, 1, 2 or 3")
    precision = _precision(path, content)
    if precision == "fp16" and stage == 0:
        raise UserError(
            f"{path}: fp16.enabled", True, "does not train at ZeRO stage 0 (DeepSpeed 0.19 leaves the loss unscaled there)",
            "set zero_optimization.stage to 1, as ds_configs/zero1_fp16.json does",
        )
    optimizer, parameters = (_offload(path, zero, key) for key in ("offload_optimizer", "offload_param"))
    if optimizer != "none" and stage == 0:
        raise UserError(f"{path}: zero_optimization.offload_optimizer.device", optimizer, "needs ZeRO stage 1 or more", "set stage to 2")
    if parameters != "none" and stage != 3:
        raise UserError(f"{path}: zero_optimization.offload_param.device", parameters, "needs ZeRO stage 3", "set stage to 3")
    return DeepSpeedFile(path, content, stage, precision, optimizer, parameters)


def _check_owner(field: str, network: str, path: Path, content: dict[str, Any], derived: dict[str, Any]) -> None:
    for key, owner in _RECIPE_OWNS.items():
        if key in content:
            raise UserError(
                f"{path}: {key}", None, "is set there, but the recipe owns it",
                f"remove it and use {owner.format(network=network)}",
            )
    for key, value in derived.items():
        given = content.get(key, "auto")
        if given not in ("auto", value):
            raise UserError(
                f"{path}: {key}", given, f"contradicts the recipe, from which {value} follows ({field})",
                "remove it from the file; the recipe's batch, accumulation and clip_norm decide",
            )


def _precision(path: Path, content: dict[str, Any]) -> Precision:
    enabled = []
    for key in ("bf16", "fp16"):
        section = content.get(key, {})
        on = section.get("enabled", False) if isinstance(section, dict) else section
        if not isinstance(section, dict) or not isinstance(on, bool):
            raise UserError(f"{path}: {key}", section, "is not an object with a boolean `enabled`", 'write {"enabled": true}')
        if on:
            enabled.append(key)
    if len(enabled) == 2:
        raise UserError(f"{path}: bf16, fp16", None, "are both enabled", "enable one of them")
    return "fp32" if not enabled else ("bf16" if enabled == ["bf16"] else "fp16")


def _offload(path: Path, zero: dict[str, Any], key: str) -> str:
    section = zero.get(key) or {}
    device = section.get("device", "none") if isinstance(section, dict) else section
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f"{path}: zero_optimization.{key}.device", device, "is no offload device", "set none, cpu or nvme")
    if device == "nvme" and not section.get("nvme_path"):
        raise UserError(f"{path}: zero_optimization.{key}.nvme_path", None, "is missing", "give a directory on the NVMe drive")
    return device


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} stands twice")
    return dict(pairs)
