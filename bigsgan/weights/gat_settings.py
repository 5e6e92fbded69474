"""Reads the arguments in a checkpoint of the public GAT code, and the images seen by its updates.

Our penalties are multiplied by ``every``; theirs are not. A learning rate is for a width of 768 in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigsgan.config import NETWORKS
from bigsgan.weights.settings import SNAPSHOT, Options, Settings, half_life_nimg, images_seen, known

_WIDTH, _DECAY = 768, 0.999
_MOST_IMAGES = 1 << 20
_BF16 = {"bf16": True, "no": False}
_OF_SHAPES = ("model", "modelD", "num_classes", "resolution", "qk_norm")
_OF_THE_MACHINE = (
    *("output_dir", "exp_name", "logging_dir", "report_to", "wandb_name", "sampling_steps", "eval_steps"),
    *("resume_step", "data_dir", "allow_tf32", "epochs", "checkpointing_steps", "latest_checkpointing_steps"),
    *("num_workers", "fused_attn"),
)


def checkpoint_settings(
    path: Path, args: Mapping[str, Any], steps: Any, has_heads: bool
) -> tuple[Settings, int | None]:
    """A checkpoint's settings, and the images seen; None if it does not tell them.

    Args:
        path: Path of the checkpoint.
        args: Arguments of its trainer.
        steps: Number of its updates.
        has_heads: Whether its discriminator predicts a teacher's features, so that the recipe has a teacher.

    Raises:
        UserError: An argument is of another type.
    """
    options = Options(path, {key: value for key, value in args.items() if isinstance(key, str)})
    for name in (*_OF_SHAPES, *_OF_THE_MACHINE):
        options.value(name)
    left: list[str] = []
    keys: dict[str, Any] = {**_optimizers(options), **_penalties(options, left)}
    if has_heads:
        keys |= _teacher(options, left)
    keys |= known({"seed": options.value("seed")})
    batch, nimg = options.value("batch_size"), None
    accumulation = options.value("gradient_accumulation_steps")
    if type(batch) is int and 0 < batch < _MOST_IMAGES and accumulation in (None, 1):
        keys |= {"batch": batch, "ema": {"half_life_nimg": half_life_nimg(batch, _DECAY)}}
        nimg = images_seen(batch, steps)
        if type(most := options.value("max_train_steps")) is int and nimg is not None and most * batch > nimg:
            keys["total_nimg"] = most * batch
    elif args:  # the public loop counts the micro-batches of both networks together
        left += ["batch_size", "gradient_accumulation_steps"]
    precision = options.value("mixed_precision")
    if precision in _BF16:
        keys |= {f"{network}.bf16": _BF16[precision] for network in NETWORKS}
    elif precision is not None:
        left.append("mixed_precision")
    return Settings(SNAPSHOT, keys, (*left, *options.left())), nimg


def _optimizers(options: Options) -> dict[str, Any]:
    names = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay", "max_grad_norm")
    lr, beta1, beta2, eps, decay, norm = (options.number(name) for name in names)
    if lr is None or beta1 is None or beta2 is None:
        return {}
    section = {"kind": "adamw", "lr": lr, "reference_width": _WIDTH, "betas": [float(beta1), float(beta2)]}
    section |= known({"eps": eps, "weight_decay": decay, "clip_norm": norm})
    return {f"optimizer.{network}": section for network in NETWORKS}


def _penalties(options: Options, left: list[str]) -> dict[str, Any]:
    """R1 and R2, unless their ``every`` differ, which a recipe does not allow. A gamma of 0 is off."""
    found = {name: (options.number(f"{name}_gamma"), options.value(f"{name}_every")) for name in ("R1", "R2")}
    keys: dict[str, Any] = {f"objective.{name.lower()}": None for name, (gamma, _) in found.items() if gamma == 0}
    used = {name: (gamma, every) for name, (gamma, every) in found.items() if gamma}
    turns = [every for _, every in used.values()]
    if not all(type(every) is int and every > 0 and every == turns[0] for every in turns):
        left += [f"{name}_{key}" for name in used for key in ("gamma", "every")]
        return keys
    return keys | {
        f"objective.{name.lower()}": {"weight": gamma / every, "every": every, "form": "finite_difference"}
        for name, (gamma, every) in used.items()
    }


def _teacher(options: Options, left: list[str]) -> dict[str, Any]:
    """The teacher's weight, above 0 in a recipe; the public loss is ``disc_loss + proj_coeff * (class + patches)``."""
    weight = options.number("proj_coeff")
    if weight == 0:
        left.append("proj_coeff")
    return {"objective.teacher.weight": weight} if weight else {}
