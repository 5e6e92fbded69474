"""Translates ``training_options.json`` and snapshots of NVIDIA's trainers to keys of a recipe.

The file is beside the snapshots of stylegan2-ada-pytorch, stylegan3 and R3GAN, which is built on them. It leaves out
values that equal the training loop's defaults, so the defaults belong to the settings too. Settings of the machine,
such as ``num_gpus`` and ``batch_gpu``, and paths are not taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigsgan.config.augmentation import ADA_PIPELINES
from bigsgan.weights import stylegan
from bigsgan.weights.settings import SNAPSHOT, Options, Settings, known, not_of, read_options
from bigsgan.weights.stylegan_pickle import ForeignNetwork, Snapshot

FILE = "training_options.json"

_LOOP = {
    "random_seed": 0, "total_kimg": 25_000, "kimg_per_tick": 4, "image_snapshot_ticks": 50,
    "network_snapshot_ticks": 50,
}  # fmt: skip
_ADA = {
    **_LOOP, "ema_kimg": 10, "ema_rampup": None, "G_reg_interval": 4, "D_reg_interval": 16, "augment_p": 0,
    "ada_target": None, "ada_interval": 4, "ada_kimg": 500, "loss_kwargs.style_mixing_prob": 0.9,
    "loss_kwargs.r1_gamma": 10, "loss_kwargs.pl_batch_shrink": 2, "loss_kwargs.pl_decay": 0.01,
    "loss_kwargs.pl_weight": 2,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "stylegan2-ada": _ADA,
    "stylegan3-style2": {
        **_ADA, "ema_rampup": 0.05, "G_reg_interval": None, "loss_kwargs.style_mixing_prob": 0,
        "loss_kwargs.pl_weight": 0,
    },
    "r3gan": _LOOP,
}  # fmt: skip
"""Defaults of the training loops and losses, by source."""

_READ_ELSEWHERE = (
    *("G_kwargs", "D_kwargs", "loss_kwargs.class_name", "training_set_kwargs.class_name", "augment_kwargs.class_name"),
    *("training_set_kwargs.resolution", "training_set_kwargs.use_labels", "G_opt_kwargs.class_name"),
    *("D_opt_kwargs.class_name",),
)
"""Settings that the networks tell themselves, or that are compared below."""

_TRANSFORMATIONS = {
    "xflip": "flip", "rotate90": "quarter_turns", "xint": "shift", "scale": "scale", "rotate": "rotation",
    "aniso": "stretch", "xfrac": "translation", "brightness": "brightness", "contrast": "contrast",
    "lumaflip": "luma_flip", "hue": "hue", "saturation": "saturation", "imgfilter": "filter", "noise": "noise",
    "cutout": "cutout",
}  # fmt: skip
"""Arguments of ``AugmentPipe`` that multiply p, and our names; its others are ranges, which are fixed here."""


def snapshot_settings(snapshot: Snapshot) -> Settings:
    """Settings in the snapshot itself: whether images are mirrored, the augmentations, and what Freeze-D keeps."""
    keys: dict[str, Any] = {}
    left = []
    data = snapshot.training_set
    if data is not None and isinstance(data.get("xflip"), bool):
        keys["data.horizontal_flip"] = data["xflip"]
    pipe = snapshot.networks.get("augment_pipe")
    if pipe is not None:
        if (pipeline := _pipeline(pipe.init_kwargs)) is None:
            left.append("augment_pipe's arguments")
        else:
            keys["augmentation.pipeline"] = pipeline
    elif data is not None and snapshot.unaugmented:
        keys["augmentation"] = None
    if "D" in snapshot.networks:
        blocks, layers = stylegan.frozen(snapshot.networks["D"])
        if blocks:
            keys["init_from.freeze_discriminator"] = blocks
        if layers:
            left.append(f"freeze_layers for {layers} more, a part of a block")
    return Settings(SNAPSHOT, keys, tuple(left))


def augmentation_p(pipe: ForeignNetwork | None) -> float | None:
    """Probability p of a snapshot's augmentations, at most 1; None if it is unknown."""
    p = None if pipe is None else pipe.state.get("p")
    if p is None or p.numel() != 1 or not math.isfinite(float(p)) or float(p) < 0:
        return None
    return min(1.0, float(p))


def file_settings(source: str, path: Path) -> Settings:
    """Settings in ``training_options.json`` of ``stylegan2-ada``, ``stylegan3-style2`` or ``r3gan``.

    Raises:
        UserError: The file cannot be read, is something else, or has a value of another type.
    """
    options = Options(path, read_options(path), _DEFAULTS[source])
    loss = "R3GANLoss" if source == "r3gan" else "StyleGAN2Loss"
    if options.value("loss_kwargs.class_name") != f"training.loss.{loss}":
        raise not_of(path, f"{source}'s training")
    keys = _common(options)
    keys |= _r3gan(options) if source == "r3gan" else _stylegan2(options)
    for name in _READ_ELSEWHERE:
        options.value(name)
        options.section(name)
    return Settings(str(path), keys, options.left())


def _common(options: Options) -> dict[str, Any]:
    found = {
        "seed": options.value("random_seed"),
        "batch": options.value("batch_size"),
        "total_nimg": _nimg(options, "total_kimg"),
        "data.horizontal_flip": options.value("training_set_kwargs.xflip"),
    }
    tick = found["report_nimg"] = _nimg(options, "kimg_per_tick")
    for key, name in (("sample_nimg", "image_snapshot_ticks"), ("checkpoint_nimg", "network_snapshot_ticks")):
        ticks = options.number(name)
        found[key] = None if not ticks or tick is None else round(ticks * tick)
    return known(found)


def _stylegan2(options: Options) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "generator.style_mixing": options.number("loss_kwargs.style_mixing_prob"),
        "objective.r1": None,
        "objective.path_length": None,
        "augmentation": _augmentation(options),
        "ema": {"half_life_nimg": _nimg(options, "ema_kimg"), "ramp": options.number("ema_rampup")},
    }
    # Without lazy regularization, penalties are part of every update.
    every = {network: options.value(f"{network}_reg_interval") or 1 for network in "GD"}
    if gamma := options.number("loss_kwargs.r1_gamma"):
        keys["objective.r1"] = {"weight": gamma, "every": every["D"]}
    weight, decay, shrink = (options.value(f"loss_kwargs.pl_{name}") for name in ("weight", "decay", "batch_shrink"))
    if weight:
        section = {"weight": weight, "every": every["G"], "decay": decay, "batch_shrink": shrink}
        keys["objective.path_length"] = section
    for network, letter in (("generator", "G"), ("discriminator", "D")):
        if (adam := _adam(options, letter)) is not None:
            keys[f"optimizer.{network}"] = adam
    return keys | _group(options)


def _group(options: Options) -> dict[str, int]:
    """The group of the minibatch deviation, if it has as many images as a GPU computed at a time."""
    at_a_time, epilogue = options.value("batch_gpu"), options.value("D_kwargs.epilogue_kwargs")
    group = epilogue.get("mbstd_group_size", 4) if isinstance(epilogue, dict) else 4
    if type(at_a_time) is not int or at_a_time < 1 or (type(group) is int and group <= at_a_time):
        options.leave("batch_gpu")  # nothing depends on it
        return {}
    return {"discriminator.mbstd_group": at_a_time}


def _adam(options: Options, letter: str) -> dict[str, Any] | None:
    """The optimizer of a network, if it is Adam; its numbers stay as they are, as in the shipped recipes."""
    section = f"{letter}_opt_kwargs"
    found = {key: options.value(f"{section}.{key}") for key in ("lr", "betas", "eps")}
    if options.value(f"{section}.class_name") != "torch.optim.Adam" or found["lr"] is None:
        options.leave(section)
        return None
    return {"kind": "adam", **{key: _as_floats(value) for key, value in known(found).items()}}


def _as_floats(value: Any) -> Any:
    """Convert a list's 0 and 1 to floats, as in ``[0, 0.99]``."""
    return [float(n) if n in (0, 1) else n for n in value] if isinstance(value, list) else value


def _augmentation(options: Options) -> dict[str, Any] | None:
    multipliers, p, target = options.section("augment_kwargs"), options.number("augment_p"), options.value("ada_target")
    interval, ramp_nimg = options.value("ada_interval"), _nimg(options, "ada_kimg")
    if not multipliers or (target is None and not p):
        return None
    found = {"kind": "ada", "p": p, "target": target, "interval": interval, "ramp_nimg": ramp_nimg}
    return {**found, **_pipeline_key(options, multipliers)}


def _pipeline_key(options: Options, multipliers: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = _pipeline(multipliers)
    if pipeline is None:
        options.leave("augment_kwargs")
        return {}
    return {"pipeline": pipeline}


def _pipeline(arguments: Mapping[str, Any]) -> str | None:
    """Name of the pipeline with these arguments of ``AugmentPipe``; None if none has these strengths and ranges."""
    given = {key: value for key, value in arguments.items() if key != "class_name" and value != 0}
    ours = {_TRANSFORMATIONS.get(key, key): value for key, value in given.items()}
    return next((name for name, multipliers in ADA_PIPELINES.items() if multipliers == ours), None)


def _r3gan(options: Options) -> dict[str, Any]:
    """R3GAN's settings: each number goes from a base value to a final one along a cosine of its own duration."""
    keys: dict[str, Any] = {}
    if options.value("training_set_kwargs.use_labels"):  # the loss gives fakes the classes of the reals beside them
        keys |= {"objective.reuse_fakes": True, "objective.fake_labels": "data"}
    multipliers = options.section("augment_kwargs")
    lr, beta2, gamma, ema, p = (_cosine(options, name) for name in ("lr", "beta2", "gamma", "ema", "aug"))
    if lr and beta2 and lr[2] == beta2[2]:
        for network, letter in (("generator", "G"), ("discriminator", "D")):
            options.value(f"{letter}_opt_kwargs.betas")  # the loop replaces them by 0 and the schedule
            section = {"kind": "adam", "lr": lr[0], "betas": [0.0, beta2[0]], "final_beta2": beta2[1]}
            section |= {"decay": "cosine", "final_lr": lr[1], "decay_nimg": lr[2]}
            keys[f"optimizer.{network}"] = {**section, **known({"eps": options.value(f"{letter}_opt_kwargs.eps")})}
    else:
        options.leave("lr_scheduler")
        options.leave("beta2_scheduler")
    if gamma:
        section = {"weight": gamma[0], "final_weight": gamma[1], "decay_nimg": gamma[2], "every": 1}
        keys |= {"objective.r1": section, "objective.r2": dict(section)} if gamma[0] else {}
    if ema and ema[0] == 0:
        keys["ema"] = {"half_life_nimg": round(ema[1]), "warmup_nimg": ema[2]}
    else:
        options.leave("ema_scheduler")
    if p and multipliers and (p[0] or p[1]):
        section = {"kind": "ada", "p": p[0], "final_p": p[1], "ramp_nimg": p[2]}
        keys["augmentation"] = {**section, **_pipeline_key(options, multipliers)}
    elif not multipliers:
        keys["augmentation"] = None
    return keys


def _cosine(options: Options, name: str) -> tuple[float, float, int] | None:
    """(base value, final value, images) of a scheduler; None if it has other settings, or lacks one of these."""
    name = f"{name}_scheduler"
    numbers = [options.number(f"{name}.{key}") for key in ("base_value", "final_value", "total_nimg")]
    others = [key for key in options.section(name) if key not in ("base_value", "final_value", "total_nimg")]
    base, final, total = numbers
    if base is None or final is None or total is None or others:
        options.leave(name)
        return None
    return base, final, round(total)


def _nimg(options: Options, name: str) -> int | None:
    number = options.number(name)
    return None if number is None else round(1000 * number)
