"""Reads and checks a DeepSpeed JSON file before DeepSpeed is imported.

Each setting has one owner: the file owns ZeRO, offload, buckets, precision and communication, the recipe the rest.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigsgan.config.deepspeed_elsewhere import TAKEN, no_autotuning, refuse_elsewhere, take
from bigsgan.config.deepspeed_keys import FILE, OF_NVME, OF_STAGES, ON_BY_DEFAULT, check_values
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import parse_json, read_text
from bigsgan.shipped import ROOT

Precision = Literal["fp32", "bf16", "fp16"]
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LOW_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")


@dataclass(frozen=True)
class DeepSpeedFile:
    """A checked DeepSpeed file."""

    path: Path  # path of the file
    content: dict[str, Any]  # the file's own keys that have an effect
    stage: int  # ZeRO stage, 0 to 3
    precision: Precision  # type of parameters and activations
    offload_optimizer: str  # device of the optimizer's state: none, cpu, or nvme at ZeRO 3
    offload_parameters: str  # device of the parameters at ZeRO 3: none or cpu
    note: str = ""  # a line for the user: what the file leaves open, or leaves to the recipe

    @property
    def uses_nvme(self) -> bool:
        """Whether the optimizer's state is offloaded to NVMe."""
        return self.offload_optimizer == "nvme"

    @property
    def profiles(self) -> bool:
        """Whether DeepSpeed profiles the network's operations once."""
        return bool(self.content.get("flops_profiler", {}).get("enabled", False))


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
        _refuse_experiment(name)
        remedy = "give the path of a DeepSpeed JSON file, or the name of a built-in one such as zero1"
        raise UserError(field, name, "does not exist", remedy)
    written = _read_json(field, path)
    found = refuse_elsewhere(path, network, written)
    content = check_values(f"{path}: ", found, FILE)
    notes = [*_taken(found, content)]
    _check_derived(field, path, content, derived)
    _check_reports(path, content)
    zero = content.get("zero_optimization", {})
    stage, precision = _stage(path, zero), _precision(path, content)
    _check_precision(path, content, stage, precision)
    _check_scaling(path, content, stage)
    optimizer, parameters = _check_offload(f"{path}: zero_optimization", zero, stage)
    if open_keys := _open(found):
        notes.append(f'"auto" is the default of {", ".join(open_keys)} (ZeRO {stage}, {precision})')
    if left := [key for key in _open(written) if key not in open_keys]:
        notes.append(f'"auto" switches nothing on: {", ".join(left)}')
    notes += _idle(content, optimizer)
    if unused := _unused(content, stage, optimizer):
        of_nvme = "" if optimizer == "nvme" else " without NVMe"
        notes.append(f"ZeRO {stage}{of_nvme} does not use {', '.join(unused)}")
    note = f"{path}: {'; '.join(notes)}" if notes else ""
    return DeepSpeedFile(path, content, stage, precision, optimizer, parameters, note)


def _taken(found: dict[str, Any], content: dict[str, Any]) -> Iterator[str]:
    """Remove from a file's values what it does not decide; yield what the user should know of it."""
    if taken := list(take(found, content)):
        yield f"the recipe, or `bigsgan export`, decides instead of {', '.join(taken)}"
    logger, profiler = content.get("comms_logger"), content.get("flops_profiler", {})
    if logger is not None and not logger.get("enabled", bool(logger)):
        del content["comms_logger"]  # DeepSpeed takes its presence for true (0.19.8)
    if profiler.pop("output_file", None) and profiler.get("enabled"):
        yield "flops_profiler writes flops_*.txt in `out` instead of output_file"


def _unused(content: dict[str, Any], stage: int, optimizer: str) -> list[str]:
    """Return the keys that are for other ZeRO stages, and for NVMe if that is not used."""
    zero = content.get("zero_optimization", {})
    given = [key for key, value in zero.items() if value is not False or key in ON_BY_DEFAULT]
    found = [key for key in given if stage not in OF_STAGES.get(key, (stage,))]
    if optimizer != "nvme":
        section = zero.get("offload_optimizer") or {}
        found += [f"offload_optimizer.{key}" for key in OF_NVME if section.get(key)]
        found += ["aio"] if content.get("aio") else []
    return found


def _idle(content: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yield which keys have no effect beside others."""
    if content.get("zero_force_ds_cpu_optimizer") and optimizer == "none":
        yield "zero_force_ds_cpu_optimizer has no effect without an optimizer on the host"
    if content.get("zero_allow_untested_optimizer") is False:
        yield "zero_allow_untested_optimizer stays true"
    scaling = content.get("fp16", {})
    moves = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    if (
        scaling.get("enabled")
        and scaling.get("loss_scale")
        and (unused := [f"fp16.{key}" for key in moves if key in scaling])
    ):
        yield f"with a constant fp16.loss_scale {', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect"


def _open(content: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the keys of a file that are "auto", but for those of the recipe."""
    found = []
    for key, value in content.items():
        if value == "auto" and prefix + key not in TAKEN:
            found.append(prefix + key)
        elif isinstance(value, dict) and key not in TAKEN and value.get("enabled") is not False:
            found += _open(value, f"{prefix}{key}.")
    return found


def _check_offload(where: str, zero: dict[str, Any], stage: int) -> tuple[str, str]:
    """Return the devices of the optimizer's state and of the parameters; ``where`` names the ZeRO section."""
    optimizer = _offload(f"{where}.offload_optimizer", zero.get("offload_optimizer"))
    field = f"{where}.offload_optimizer.device"
    if optimizer != "none" and stage == 0:
        remedy = "set zero_optimization.stage to 2"
        raise UserError(field, optimizer, "must be none at ZeRO 0", remedy)
    if optimizer == "nvme" and stage != 3:
        remedy = 'set zero_optimization.stage to 3, or write "cpu"'
        raise UserError(field, optimizer, f"must be cpu at ZeRO {stage}", remedy)
    if optimizer != "none" and (ratio := zero["offload_optimizer"].get("ratio", 1)) != 1:
        field, detail = f"{where}.offload_optimizer.ratio", "DeepSpeed 0.19 updates the rest with its own AdamW"
        raise UserError(field, ratio, "must be 1", "remove it, which offloads everything", detail)
    parameters = _offload(f"{where}.offload_param", zero.get("offload_param"))
    field = f"{where}.offload_param.device"
    if parameters != "none" and stage != 3:
        remedy = "set zero_optimization.stage to 3"
        raise UserError(field, parameters, f"must be none at ZeRO {stage}", remedy)
    if parameters == "nvme":
        remedy, detail = 'write "cpu"; offload_optimizer may be nvme', "DeepSpeed 0.19 fails to prefetch from NVMe"
        raise UserError(field, parameters, "must be none or cpu", remedy, detail)
    if parameters == "cpu":
        _refuse_nvme_keys(f"{where}.offload_param", zero["offload_param"])
    return optimizer, parameters


def _refuse_nvme_keys(where: str, section: dict[str, Any]) -> None:
    """Refuse what only parameters on NVMe would read."""
    for key, default in (("nvme_path", None), ("buffer_count", 5), ("buffer_size", 1e8), ("max_in_cpu", 1e9)):
        if (value := section.get(key, default)) != default:
            raise UserError(f"{where}.{key}", value, "must be unset with device cpu", "remove it", "it is of NVMe")


def _check_reports(path: Path, content: dict[str, Any]) -> None:
    """Refuse reports that DeepSpeed logs at a level that is not shown, and a log of no collectives."""
    logger = content.get("comms_logger", {})
    if logger.get("prof_all", True) is False and not logger.get("prof_ops"):
        remedy = "name collectives in prof_ops, such as all_reduce, or remove prof_all"
        raise UserError(f"{path}: comms_logger.prof_all", False, "must be true without prof_ops", remedy)
    if logger.get("prof_ops") and logger.get("prof_all", True):
        problem, detail = "must be empty unless prof_all is false", "all collectives are counted"
        raise UserError(f"{path}: comms_logger.prof_ops", logger["prof_ops"], problem, "set prof_all to false", detail)
    reports = {
        "dump_state": content.get("dump_state", False),
        "comms_logger.verbose": logger.get("verbose", False),
    }
    for key, is_on in reports.items():
        if is_on and content.get("log_level") not in ("debug", "info"):
            problem, detail = "must be false without log_level", "DeepSpeed's own log shows errors alone"
            raise UserError(f"{path}: {key}", True, problem, 'add "log_level": "info", or remove it', detail)


def _check_precision(path: Path, content: dict[str, Any], stage: int, precision: Precision) -> None:
    for section, key, matters in (
        ("zero_optimization", "compute_grad_norm", True),
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
        if (value := content.get(key, default)) != default:
            problem = f"must be {'false' if default is False else default} at ZeRO {stage}"
            remedy, detail = "remove it, or set zero_optimization.stage to 1", "DeepSpeed 0.19 reduce-scatters there"
            raise UserError(f"{path}: {key}", value, problem, remedy, detail)


def _refuse_experiment(name: str) -> None:
    """Refuse an experiment of `deepspeed --autotuning`, which gives JSON in base64 in place of a file."""
    with suppress(ValueError):
        content = parse_json(base64.urlsafe_b64decode(name))
        if isinstance(content, dict) and "autotuning" in content:
            raise no_autotuning()


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


def _check_derived(field: str, path: Path, content: dict[str, Any], derived: dict[str, Any]) -> None:
    for key, value in derived.items():
        given = content.get(key, value)
        if given != value:
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
