"""Reads files of torch.save and safetensors: tensors and plain values only, without executing code."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.modules import activation

from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import check_regular, check_stored

_PASSED_OVER = (
    *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
    "numpy.dtype",
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""NumPy's numbers, such as a trainer's best score, and DeepSpeed's settings."""


_IN_ITS_PLACE = {
    b"version https://git-lfs": ("is a pointer of Git LFS, not the file", "fetch the file with `git lfs pull`"),
    b"<!doctype": ("is a web page", "download the file itself"),
    b"<html": ("is a web page", "download the file itself"),
    bytes(32): ("begins with zeros only, as a download that was cut off", "download it again"),
}
"""What a failed download may leave instead of the file, by its first bytes."""


def check_file(option: str, path: Path) -> None:
    """Refuse a path that is not a file, and what a failed download may leave instead of the file.

    Raises:
        UserError: The path is missing, a directory, a pipe or a device; or it is a web page and the like.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            begins = file.read(64).lstrip(b"\t\n\r \xef\xbb\xbf").lower()
    except OSError as error:
        raise UserError(option, str(path), f"cannot be read: {reason(error, path)}", "give another file") from None
    for beginning, (problem, remedy) in _IN_ITS_PLACE.items():
        if begins.startswith(beginning):
            raise UserError(option, str(path), problem, remedy)


def _refuse_own(option: str, path: Path) -> None:
    with safe_open(path, "pt") as opened:
        header = opened.metadata() or {}
    if {"network", "recipe"} <= header.keys():
        remedy = f"begin a run with init_from.{header['network']}={path}"
        raise UserError(option, str(path), "is an export of bigsgan, not another project's file", remedy)


def read_content(option: str, path: Path) -> Any:
    """Return the content of a file that ``option`` names.

    Raises:
        UserError: The file cannot be read, or contains code.
    """
    check_file(option, path)
    try:
        check_stored(path)
    except ValueError as error:
        is_code = "/code/" in str(error)  # TorchScript
        what = "contains code, which is not executed" if is_code else f"cannot be read: {error}"
        remedy = "save the state dict alone, by torch.save" if is_code else "give a whole file that torch.save wrote"
        raise UserError(option, str(path), what, remedy) from None
    try:
        if path.suffix == ".safetensors":
            _refuse_own(option, path)
            return load_file(path)
        allowed: list[Any] = [(Arguments, "argparse.Namespace"), *((Inert, name) for name in _PASSED_OVER)]
        allowed += [(type(name, (Inert,), {}), f"{activation.__name__}.{name}") for name in activation.__all__]
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")  # torch warns of a pickle's version
            return torch.load(path, "cpu", weights_only=True)
    except UserError:
        raise
    except OSError as error:
        raise UserError(option, str(path), f"cannot be read: {reason(error, path)}", "give another file") from None
    except Exception as error:  # damaged bytes can make the reader raise anything
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = "cannot be read: it is damaged, or of another format"
        # For any damaged pickle, torch recommends running its code. All pickles except the oldest begin with 0x80.
        with open(path, "rb") as file:
            is_pickle = file.read(1) == b"\x80"
        if asked or ("weights_only" in str(error) and is_pickle):
            what = f"contains code{f' ({asked[1]})' if asked else ''}, which is not executed"
        remedy = "give a state dict of tensors only, as .pth or .safetensors"
        raise UserError(option, str(path), what, remedy) from None


class Inert:
    """Placeholder for a value that is not needed, such as a NumPy number: takes any arguments and does nothing."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Arguments(Inert):
    """Placeholder for a trainer's arguments.

    Attributes:
        values: Arguments by name.
    """

    __slots__ = ("values",)

    def __init__(self, *arguments: Any) -> None:
        self.values: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.values = dict(state) if isinstance(state, dict) else {}
