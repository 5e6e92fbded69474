"""Opens the encoders with which `bigsgan data encode` makes latents.

Shapes: n images, C channels, H x W pixels; latents (n, C', H', W').
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.config.data import Codec, Data
from bigsgan.data.autoencoders import (
    identity,
    in_chunks,
    load_folder,
    load_program,
    naming_program,
    read_folder,
    weights_digest,
)
from bigsgan.data.codecs import build_codec
from bigsgan.data.text_encoders import TextEncoder
from bigsgan.errors import UserError
from bigsgan.images.cosines import to_cosines
from bigsgan.images.size import Size

_FIELD = "--codec"
_FORMS = "give diffusers:FOLDER, torchscript:ENCODER,DECODER, dct, or dct:BLOCK"
_BLOCKS = ("2", "4", "8")


class Encoder(NamedTuple):
    """Makes latents."""

    codec: dict[str, Any]  # the recipe's section that decodes the latents
    about: dict[str, str]  # digests that identify the encoder
    # images (n, C, H, W) in [-1, 1] -> latents (n, C', H', W') float32, neither shifted nor scaled, or means and
    # standard deviations of a posterior (n, 2 * C', H', W')
    encode: Callable[[Tensor], Tensor]
    text: TextEncoder | None = None  # of captions beside the images


@torch.no_grad()
def open_encoder(text: str, channels: int, size: Size, device: torch.device) -> Encoder:
    """Open the encoder that ``--codec`` names, and check on one image that its latents can be decoded.

    Args:
        text: ``diffusers:FOLDER``, ``torchscript:ENCODER,DECODER``, ``dct`` or ``dct:BLOCK``.
        channels: C.
        size: H x W.
        device: The device on which it computes.

    Raises:
        UserError: There is no such codec, or it cannot be read or does not take such images.
    """
    kind, _, rest = text.partition(":")
    if kind == "diffusers" and rest:
        found = _folder(Path(rest), channels, size, device)
    elif kind == "torchscript" and rest.count(",") == 1 and all(rest.split(",")):
        encoder, decoder = map(Path, rest.split(","))
        found = _programs(encoder, decoder, channels, size, device)
    elif text == "dct" or (kind == "dct" and rest in _BLOCKS):
        block = int(rest or 2)
        found = Encoder({"kind": "dct", "block": block}, {}, lambda images: to_cosines(images, block))
    else:
        raise UserError(_FIELD, text, "must name a codec", _FORMS)
    keys: Any = {"kind": "latents", "root": "DST", "resolution": size, "image_channels": channels, "num_classes": 0}
    try:
        data = Data(**keys, codec=Codec(**found.codec))
    except UserError as error:
        if error.field != "data.resolution":
            raise
        remedy = error.remedy.replace("set data.resolution=", "give --resolution ")
        raise UserError("--resolution", size.value, error.problem, remedy) from None
    made = found.encode(torch.zeros(1, channels, *size, device=device))
    num, shape = data.channels, tuple(data.network_size)
    if made.shape not in [(1, times * num, *shape) for times in (1, 2)]:
        problem = f"makes latents of the shape {tuple(made.shape[1:])}, not {(num, *shape)} or {(2 * num, *shape)}"
        raise UserError(_FIELD, text, problem, "give another codec")
    build_codec(data, device).decode(made[:, :num])
    weights = identity(data.codec).weights
    return found._replace(about={**found.about, **({"weights": weights} if weights else {})})


def _folder(folder: Path, channels: int, size: Size, device: torch.device) -> Encoder:
    """Open an AutoencoderKL of diffusers."""
    about = read_folder(folder, _FIELD)
    if channels != about.image_channels:
        remedy = {1: "add --grey", 3: "remove --grey"}.get(about.image_channels, "give another autoencoder")
        problem = f"is of images with {about.image_channels} channels, not {channels}"
        raise UserError(_FIELD, str(folder), problem, remedy)
    network = load_folder(folder, _FIELD, device)

    def part(images: Tensor) -> Tensor:
        posterior = network.encode(images).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1)

    codec = {"kind": "diffusers", "path": str(folder), "factor": about.factor, "channels": about.channels}
    return Encoder(codec, {}, functools.partial(in_chunks, part, pixels=size.num_pixels))


def _programs(encoder: Path, decoder: Path, channels: int, size: Size, device: torch.device) -> Encoder:
    """Open programs of TorchScript. The encoder makes latents, or a tuple of means and standard deviations."""
    program = load_program(encoder, _FIELD, device)

    def run(images: Tensor) -> Any:
        with naming_program(encoder, _FIELD, f"images {tuple(images.shape)}", "give a program of images alone"):
            return program(images)

    def part(images: Tensor) -> Tensor:
        made = run(images)
        return (torch.cat(list(made), dim=1) if isinstance(made, tuple) else made).float()

    made = run(torch.zeros(1, channels, *size, device=device))
    first = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if not isinstance(first, Tensor) or first.ndim != 4 or first.shape[2] < 1 or size.height % first.shape[2]:
        problem = f"must make latents, or a tuple of means and deviations, of images (n, {channels}, H, W)"
        remedy = "give a program whose latents are (n, C, H / factor, W / factor)"
        raise UserError(_FIELD, str(encoder), problem, remedy)
    codec = {"kind": "torchscript", "path": str(decoder), "factor": size.height // first.shape[2]}
    codec["channels"] = first.shape[1]
    about = {"encoder": weights_digest([encoder], _FIELD)}
    return Encoder(codec, about, functools.partial(in_chunks, part, pixels=size.num_pixels))
