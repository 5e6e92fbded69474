"""Reads training settings from BigGAN-PyTorch's ``state_dict.pth``: its arguments, and the updates made.

A batch there has ``batch_size`` times ``num_D_accumulations`` images, and each of D's steps takes one batch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bigsgan.errors import UserError
from bigsgan.weights.settings import (
    NONE,
    OPTION,
    Options,
    Settings,
    half_life_nimg,
    images_seen,
    known,
    not_of,
    short,
)
from bigsgan.weights.tensor_file import Inert, read_content

_RELU = ("relu", "inplace_relu", "ir")

_USUAL: dict[str, Any] = {
    "z_var": 1.0, "G_fp16": False, "D_fp16": False, "G_mixed_precision": False, "D_mixed_precision": False,
    "num_G_SVs": 1, "num_D_SVs": 1, "num_G_SV_itrs": 1, "num_D_SV_itrs": 1, "which_train_fn": "GAN", "ema": True,
}  # fmt: skip
"""Arguments that no recipe has, with the values that need none; arguments that only affect reports are not listed."""

_ONLY = {"G_nl": _RELU, "D_nl": _RELU, "G_activation": _RELU, "D_activation": _RELU, "norm_style": ("bn",)}
"""Arguments that change a network although no tensor tells them, with the values that our layers support.

The project makes ``G_activation`` of ``G_nl``: a module, or its text in a file that others have made.
"""

_MOST_IMAGES = 1 << 20


def file_beside(weights: Path) -> Path:
    """Path of ``state_dict.pth`` beside ``G.pth``, ``G_ema.pth``, or a copy of these such as ``G_ema_best0.pth``."""
    suffix = weights.stem.removeprefix("G").removeprefix("_ema")
    return weights.with_name(f"state_dict{suffix}.pth")


def file_settings(path: Path, norm_eps: float | None) -> tuple[Settings, int | None]:
    """The file's settings, and the images seen by G; None if the file does not tell them.

    ``norm_eps`` is ``BN_eps`` if the user has given it, and takes precedence over the file's.

    Raises:
        UserError: The file cannot be read, is something else, or has a value of another type.
    """
    try:
        content = read_content(OPTION, path)
    except UserError as error:
        remedy = f"give another file, or {OPTION} {NONE}"
        raise UserError(OPTION, str(path), error.problem, remedy, error.detail) from None
    config = content.get("config") if isinstance(content, dict) else None
    if not isinstance(config, dict) or "num_D_steps" not in config or not all(isinstance(key, str) for key in config):
        raise not_of(path, "BigGAN-PyTorch")
    options = Options(path, config)
    _refuse_others(options)
    keys: dict[str, Any] = {"objective.d_steps": options.value("num_D_steps"), "seed": options.value("seed")}
    keys["data.horizontal_flip"] = options.value("augment")
    if norm_eps is None:
        keys["generator.norm_eps"] = options.number("BN_eps")
    for network, letter in (("generator", "G"), ("discriminator", "D")):
        # The paper's strength of the orthogonal regularization; the project adds half of its gradient.
        if (strength := options.number(f"{letter}_ortho")) is not None:
            keys[f"objective.orthogonal.{network}"] = strength / 2
        betas = [options.number(f"{letter}_B{i}") for i in (1, 2)]
        if (lr := options.number(f"{letter}_lr")) is not None and None not in betas:
            section = {"kind": "adam", "lr": lr, "betas": [float(beta or 0) for beta in betas]}
            keys[f"optimizer.{network}"] = {**section, **known({"eps": options.number("adam_eps")})}
    left = [name for name, usual in _USUAL.items() if config.get(name, usual) != usual]
    left += ["num_epochs", *(["augment's crops"] if config.get("augment") else [])]
    nimg = None
    if batches := _batches(options):
        keys |= {**batches, "ema": _ema(options, batches["batch"])}
        nimg = images_seen(batches["batch"], content.get("itr"))
    else:
        left += ["batch_size", "G_batch_size"]
    told = tuple(name.replace("activation", "nl") for name in _ONLY if options.value(name) is not None)
    return Settings(str(path), known(keys), tuple(left), told), nimg


def _refuse_others(options: Options) -> None:
    """Refuse networks that train with other layers than ours."""
    own_module = options.value("cross_replica") is True or options.value("mybn") is True  # norm_style has no effect
    for name, supported in _ONLY.items():
        value = options.value(name)
        if isinstance(value, Inert):
            value = type(value).__name__
        if isinstance(value, str) and re.fullmatch(r"((torch\.)?nn\.)?ReLU(\(.*\))?", value):
            value = "relu"
        if value is not None and value not in supported and not (name == "norm_style" and own_module):
            problem = f"has {name} {short(value)}, which is not supported"
            remedy = f"give a network with {name} {supported[0]}, or {OPTION} {NONE} to import it as such a one"
            raise UserError(OPTION, str(options.path), problem, remedy)


def _batches(options: Options) -> dict[str, Any] | None:
    """Batch and micro-batches; None if the two networks' updates take different numbers of images."""
    names = ("batch_size", "num_D_accumulations", "num_G_accumulations")
    at_once, d_parts, g_parts = (options.value(name) for name in names)
    if not all(type(n) is int and 0 < n < _MOST_IMAGES for n in (at_once, d_parts, g_parts)):
        return None
    g_at_once = max(at_once, int(options.number("G_batch_size") or 0))
    if g_at_once * g_parts != at_once * d_parts:
        return None
    found: dict[str, Any] = {"batch": at_once * d_parts, "accumulation": d_parts}
    return found if g_parts == d_parts else {**found, "engines.generator.accumulation": g_parts}


def _ema(options: Options, batch: int) -> dict[str, Any] | None:
    """The EMA's section, with a half-life in images for the decay of each update; None without an EMA."""
    decay, start = options.number("ema_decay"), options.number("ema_start")
    if options.value("ema") is not True or decay is None or not 0 < decay < 1:
        return None
    return {"half_life_nimg": half_life_nimg(batch, decay), "start_nimg": round(batch * (start or 0))}
