"""Reads training settings from ``train_opt.txt`` of the public pix2pix: a line of text for each option.

Its losses of D are half of ours, which makes no difference to Adam. Its schedules count epochs, but the file does not
tell the size of the data set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bigsgan.config import NETWORKS
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import read_text
from bigsgan.weights.settings import NONE, OPTION, Options, Settings, not_of

FILE = "train_opt.txt"

_LINE = re.compile(r" *(\w+): ([^\t]*)(?:\t\[default: .*)?")
_WORDS = {"True": True, "False": False, "None": None}
_LOSSES = {"vanilla": ("non_saturating", 1.0), "lsgan": ("least_squares", 0.5)}
"""Our loss, and the factor from their loss of G to ours."""
_EPOCHS = ("n_epochs", "n_epochs_decay", "niter", "niter_decay", "lr_policy", "epoch_count")


def file_settings(path: Path) -> Settings:
    """The file's settings.

    Raises:
        UserError: The file cannot be read, is something else, or has a value of another type.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason(error, path)}"
        raise UserError(OPTION, str(path), problem, f"give another file, or {OPTION} {NONE}") from None
    content = {match[1]: _value(match[2].strip()) for line in lines if (match := _LINE.fullmatch(line))}
    if not {"model", "netG", "no_dropout"} <= content.keys():
        raise not_of(path, "pix2pix")
    options = Options(path, content)
    keys: dict[str, Any] = {}
    left: list[str] = []
    if type(no_dropout := options.value("no_dropout")) is bool:
        keys["generator.dropout"] = not no_dropout
    if options.value("model") == "pix2pix":
        keys |= _training(options, left)
        keys |= _data(options, left)
        left += [name for name in _EPOCHS if name in content]
    else:  # CycleGAN's: only its generator is imported
        left.append("all of another model's training")
    return Settings(str(path), keys, tuple(left))


def _training(options: Options, left: list[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    batch, lr, beta1, l1 = (options.number(name) for name in ("batch_size", "lr", "beta1", "lambda_L1"))
    if batch is not None:
        keys["batch"] = batch
    if lr is not None and beta1 is not None:
        for network in NETWORKS:
            keys[f"optimizer.{network}"] = {"kind": "adam", "lr": lr, "betas": [float(beta1), 0.999]}
    mode = options.value("gan_mode")
    if mode in ("vanilla", "lsgan") and l1 is not None:
        keys["objective.loss"], share = _LOSSES[mode]
        keys["objective.l1"] = share * l1
    else:
        left += ["gan_mode", "lambda_L1"]
    return keys


def _data(options: Options, left: list[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    direction, no_flip = options.value("direction"), options.value("no_flip")
    if direction in ("AtoB", "BtoA"):
        keys["data.input_side"] = "left" if direction == "AtoB" else "right"
    if type(no_flip) is bool:
        keys["data.horizontal_flip"] = not no_flip
    load, crop = options.value("load_size"), options.value("crop_size")
    if options.value("preprocess") != "resize_and_crop" or type(load) is not int or type(crop) is not int:
        left.append("preprocess")
        return keys
    keys["data.crop_from"] = load if load > crop else None
    if str(options.value("netG")).startswith("resnet"):  # its weights fit images of any size
        keys["data.resolution"] = crop
    return keys


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
