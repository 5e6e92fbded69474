"""What networks see of images, and back: the codec of a recipe.

Shapes: n images, C channels, R pixels a side; latents (n, C', R', R').
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.errors import UserError, reason
from bigsgan.images.cosines import from_cosines, to_cosines
from bigsgan.runtime.extras import require


class Codec(Protocol):
    """Turns images into what networks see, and what networks make into images."""

    def encode(self, images: Tensor) -> Tensor:
        """Images (n, C, R, R) in [-1, 1], or what the data holds of them -> latents (n, C', R', R') float32."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (n, C', R', R') -> images (n, C, R, R) float32, not clipped."""
        ...


def build_codec(data: Data, device: torch.device) -> Codec:
    """Build the codec that a recipe's ``data`` section describes.

    Raises:
        UserError: Its autoencoder cannot be read, or has latents of another size.
    """
    kind = data.codec.kind
    return Pixels() if kind == "pixels" else Cosines(data) if kind == "dct" else Autoencoder(data, device)


class Pixels:
    """The images themselves."""

    def encode(self, images: Tensor) -> Tensor:
        """The images."""
        return images

    def decode(self, latents: Tensor) -> Tensor:
        """The images."""
        return latents


class Cosines:
    """The cosine transform of blocks."""

    def __init__(self, data: Data) -> None:
        self._options = data.codec.block, data.codec.scale or 1.0

    def encode(self, images: Tensor) -> Tensor:
        """Transform."""
        return to_cosines(images, *self._options)

    def decode(self, latents: Tensor) -> Tensor:
        """Transform back."""
        return from_cosines(latents, *self._options)


class Autoencoder:
    """An AutoencoderKL of diffusers in a local folder; networks see (z - shift) * scale, both from its config.json."""

    def __init__(self, data: Data, device: torch.device) -> None:
        """Read its configuration; its weights are read where they are first needed."""
        section = data.codec
        self._folder, self._device, self._network = Path(str(section.path)), device, None
        try:
            about: dict[str, Any] = json.loads((self._folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            remedy = "give the folder of an AutoencoderKL, with config.json and its weights"
            problem = f"cannot be read: {reason(error)}"
            raise UserError("data.codec.path", section.path, problem, remedy) from None
        factor, channels = 2 ** (len(about.get("block_out_channels", [])) - 1), about.get("latent_channels")
        for name, wanted, given in (("factor", factor, section.factor), ("channels", channels, section.channels)):
            if wanted != given:
                problem = f"must be {wanted} with this autoencoder"
                raise UserError(f"data.codec.{name}", given, problem, f"set data.codec.{name}={wanted}")
        self._scale = section.scale or float(about.get("scaling_factor", 1.0))
        self._shift = float(about.get("shift_factor") or 0.0)

    def encode(self, images: Tensor) -> Tensor:
        """Latents as the autoencoder makes them, shifted and scaled: the data holds no images."""
        return (images - self._shift) * self._scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """What the decoder makes."""
        return self._loaded().decode(latents.float() / self._scale + self._shift).sample

    def _loaded(self) -> Any:
        if self._network is None:
            require("diffusers", "data.codec.kind", "diffusers")
            library = importlib.import_module("diffusers")
            try:
                network = library.AutoencoderKL.from_pretrained(  # safetensors alone: a pickle may hold code
                    self._folder,
                    local_files_only=True,
                    use_safetensors=True,
                    low_cpu_mem_usage=False,
                    torch_dtype=torch.float32,
                )
            except (OSError, ValueError) as error:
                remedy = "give the folder of an AutoencoderKL with safetensors"
                problem = f"cannot be read: {reason(error)}"
                raise UserError("data.codec.path", str(self._folder), problem, remedy) from None
            self._network = network.to(self._device).eval().requires_grad_(False)
        return self._network
