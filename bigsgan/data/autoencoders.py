"""Opens autoencoders on disk: AutoencoderKL of diffusers in a folder, and programs of TorchScript.

Shapes: n images, C channels, H x W pixels; latents (n, C', H', W').
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.config.data import Codec
from bigsgan.errors import UserError, counted, reason
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import check_regular, parse_json, read_text

_PIXELS_AT_A_TIME = 2**18
"""Pixels of all images that are decoded or encoded together: enough for four images of 256x256."""

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_PARTS = "diffusion_pytorch_model-*.safetensors"
"""Weights in several files, in a folder that has ``_INDEX``."""

_DEFAULT_SCALE = 0.18215
"""diffusers' default (0.42.1): config.json of older autoencoders, such as sd-vae-ft-mse, gives no scale."""

_READ_BYTES = 1 << 24
_FOLDER = "give the folder of an autoencoder of diffusers, with config.json and its weights"
PATH = "data.codec.path"
_FAILED = "The following operation failed"
"""What TorchScript's errors begin with; their last line says what failed."""


class About(NamedTuple):
    """An autoencoder's description in its config.json."""

    factor: int  # how many times shorter the sides of its latents are than those of images
    channels: int  # C'
    scale: float  # networks see (z - shift) * scale
    shift: float  # see `scale`
    image_channels: int = 3


class Identity(NamedTuple):
    """Identifies an autoencoder."""

    weights: str  # digest of the files with its weights
    scaling: str  # how latents are shifted and scaled, in words


def identity(section: Codec) -> Identity:
    """Return the identity of a recipe's autoencoder; its texts are empty if the codec has none.

    Raises:
        UserError: The autoencoder cannot be read, is incomplete, or has latents of another size than the recipe says.
    """
    if section.kind == "diffusers":
        about = check_folder(section)
        files = _weights_of(Path(str(section.path)), PATH)
        return Identity(weights_digest(files), f"scale {about.scale:g}, shift {about.shift:g}")
    if section.kind == "torchscript":
        return Identity(weights_digest([Path(str(section.path))]), f"scale {section.scale or 1.0:g}")
    return Identity("", "")


def check_folder(section: Codec) -> About:
    """Compare a folder's configuration with the recipe's section; return it with the scale to use.

    Raises:
        UserError: The folder cannot be read, or its latents have another size.
    """
    about = read_folder(Path(str(section.path)), PATH)
    for name, wanted, given in (
        ("factor", about.factor, section.factor),
        ("channels", about.channels, section.channels),
    ):
        if wanted != given:
            problem = f"must be {wanted} with this autoencoder"
            raise UserError(f"data.codec.{name}", given, problem, f"set data.codec.{name}={wanted}")
    return about._replace(scale=section.scale or about.scale)


def read_folder(folder: Path, field: str) -> About:
    """Read config.json of a folder; ``field`` is the key or option that named it.

    Raises:
        UserError: It cannot be read, or is not that of an AutoencoderKL.
    """

    def refuse(problem: str) -> UserError:
        return UserError(field, str(folder), problem, _FOLDER)

    about = read_config(folder, field)
    for key in ("latents_mean", "latents_std"):
        if about.get(key) is not None:
            raise refuse(f"has {key} in its config.json, and one scale for all channels is supported alone")
    widths: Any = about.get("block_out_channels")
    channels: Any = about.get("latent_channels")
    scale, shift = about.get("scaling_factor", _DEFAULT_SCALE), about.get("shift_factor")
    colours: Any = about.get("in_channels", 3)
    for key, value, fits in (
        ("block_out_channels", widths, isinstance(widths, list) and 0 < len(widths) <= 16),
        ("latent_channels", channels, _is_number(channels) and channels == int(channels) > 0),
        ("in_channels", colours, _is_number(colours) and colours == int(colours) > 0),
        ("scaling_factor", scale, _is_number(scale) and 0 < scale < float("inf")),
        ("shift_factor", shift, shift is None or (_is_number(shift) and abs(shift) < float("inf"))),
    ):
        if not fits:
            found = f"{key} {json.dumps(value)}" if key in about else f"no {key}"
            raise refuse(f"has {found} in its config.json")
    return About(2 ** (len(widths) - 1), int(channels), float(scale), float(shift or 0.0), int(colours))


def read_config(folder: Path, field: str, classes: Sequence[str] = ("AutoencoderKL",)) -> dict[str, Any]:
    """Return config.json of a folder with a network of one of these classes of diffusers, by default the first.

    Raises:
        UserError: It cannot be read, or is that of another class.
    """
    try:
        found: Any = parse_json(read_text(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise UserError(field, str(folder), f"cannot be read: {reason(error)}", _FOLDER) from None
    if not isinstance(found, dict):
        problem = f"has a config.json that is not that of an {classes[0]}: it must be a JSON object"
        raise UserError(field, str(folder), problem, _FOLDER)
    if (name := found.setdefault("_class_name", classes[0])) not in classes:
        raise UserError(field, str(folder), f"is of the class {name}, not {' or '.join(classes)}", _FOLDER)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def load_folder(folder: Path, field: str, device: torch.device, name: str = "AutoencoderKL") -> Any:
    """Return the network of a folder, of a class of diffusers, in float32 and evaluation mode.

    Raises:
        UserError: The package diffusers is not installed, or weights are missing, damaged or incomplete.
    """
    require("diffusers", field, str(folder))
    check_readable(_weights_of(folder, field), field)
    library = importlib.import_module("diffusers")
    try:
        network, loaded = getattr(library, name).from_pretrained(  # only safetensors, as a pickle may hold code
            folder,
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # OSError, SafetensorError, RuntimeError for other shapes, TypeError for other options
        raise UserError(field, str(folder), f"cannot be read: {reason(error)}", _FOLDER) from None
    if missing := sorted(loaded["missing_keys"]):  # diffusers only warns, and fills them at random
        problem = f"has no weights for {counted(len(missing), 'tensor')}, such as {missing[0]}"
        raise UserError(field, str(folder), problem, "give all files of the autoencoder")
    return network.to(device).eval().requires_grad_(False)


def load_program(path: Path, field: str, device: torch.device) -> Any:
    """Return a program of TorchScript, in evaluation mode.

    Raises:
        UserError: The file cannot be read.
    """
    check_readable([path], field)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit")  # is deprecated, and taken here
            return torch.jit.load(str(path), map_location=device).eval()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, OSError) as error:
        detail = next(iter(str(error).splitlines()), "").partition(". ")[0]
        remedy = "save it with torch.jit.save"
        raise UserError(field, str(path), "must be a TorchScript file", remedy, detail) from None


@contextmanager
def naming_program(path: str | Path, field: str, given: str, remedy: str) -> Iterator[None]:
    """Turn what a user's program raises inside the block into a message.

    Raises:
        UserError: It fails at what it is ``given``.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = lines[-1 if lines[0].startswith(_FAILED) else 0]
        raise UserError(field, str(path), f"fails at {given}: {text}", remedy) from None


def _weights_of(folder: Path, field: str) -> list[Path]:
    files = [folder / _WEIGHTS]
    if not os.path.isfile(files[0]) and os.path.isfile(folder / _INDEX):
        files = sorted(folder.glob(_PARTS))
    if not files or not os.path.isfile(files[0]):
        raise UserError(field, str(folder), f"cannot be read: it has no {_WEIGHTS}", _FOLDER)
    return files


def check_readable(files: list[Path], field: str) -> None:
    """Open files, and read nothing.

    Raises:
        UserError: A file cannot be opened.
    """
    with _reported(files, field):
        for file in files:
            check_regular(file)
            open(file, "rb").close()


def weights_digest(files: list[Path], field: str = PATH) -> str:
    """Return the digest of files of weights.

    Raises:
        UserError: A file cannot be read.
    """
    with _reported(files, field):
        states = []
        for file in files:
            check_regular(file)
            found = file.stat()
            states.append((str(file), found.st_size, found.st_mtime_ns))
        return _digest_of(tuple(states))


@contextmanager
def _reported(files: list[Path], field: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "give a file that exists and can be read"
        raise UserError(field, str(files[0]), f"cannot be read: {reason(error, files[0])}", remedy) from None


@functools.lru_cache(maxsize=8)
def _digest_of(states: tuple[tuple[str, int, int], ...]) -> str:
    """Return the SHA-256 of files. Cached, as sd-vae-ft-mse has 335 MB; ``states`` changes when a file does."""
    digest = hashlib.sha256()
    for path, size, _ in states:
        digest.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def in_chunks(function: Callable[[Tensor], Tensor], tensors: Tensor, pixels: int) -> Tensor:
    """Apply a function to a few samples at a time; ``pixels`` is the number of pixels of one sample's image.

    An autoencoder's activations are large, and share memory with the optimizers' states when a run reports samples.
    """
    return torch.cat([function(part) for part in tensors.split(max(1, _PIXELS_AT_A_TIME // pixels))])
