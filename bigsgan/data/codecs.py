"""The codec of a recipe: turns images into the form that networks see, and back.

Shapes: n images, C channels, H x W pixels; latents (n, C', H', W').
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.autoencoders import PATH, check_folder, in_chunks, load_folder, load_program, naming_program
from bigsgan.errors import UserError
from bigsgan.images.cosines import from_cosines, to_cosines


class Codec:
    """Encodes images for networks, and decodes what networks make. This one leaves images as they are."""

    def encode(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W) in [-1, 1], or the data's encoded images -> latents (n, C', H', W') float32."""
        return images

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (n, C', H', W') -> images (n, C, H, W) float32, not clipped."""
        return latents


def build_codec(data: Data, device: torch.device) -> Codec:
    """Build the codec that a recipe's ``data`` section describes.

    Raises:
        UserError: The autoencoder cannot be read, or has latents of another size.
    """
    kind = data.codec.kind
    return Codec() if kind == "pixels" else Cosines(data) if kind == "dct" else Autoencoder(data, device)


class Cosines(Codec):
    """The cosine transform of blocks."""

    def __init__(self, data: Data) -> None:
        self._block, self._scale = data.codec.block, data.codec.scale or 1.0
        self._is_encoded = data.kind == "latents"

    def encode(self, images: Tensor) -> Tensor:
        """Transform, unless the data holds transformed images."""
        return self._scale * images if self._is_encoded else to_cosines(images, self._block, self._scale)

    def decode(self, latents: Tensor) -> Tensor:
        """Transform back."""
        return from_cosines(latents, self._block, self._scale)


class Autoencoder(Codec):
    """An AutoencoderKL of diffusers, or a decoder in TorchScript; networks see (z - shift) * scale."""

    def __init__(self, data: Data, device: torch.device) -> None:
        """Read the configuration; the weights are read when they are first needed."""
        self._section, self._device = data.codec, device
        self._shape = (data.image_channels, *data.resolution)
        self._decoder: Callable[[Tensor], Tensor] | None = None
        self._scale, self._shift = data.codec.scale or 1.0, 0.0
        if data.codec.kind == "diffusers":
            about = check_folder(data.codec)
            self._scale, self._shift = about.scale, about.shift

    def encode(self, images: Tensor) -> Tensor:
        """Shift and scale the data's latents, which are as the autoencoder made them: the data holds no images."""
        return (images - self._shift) * self._scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents, a few at a time.

        Raises:
            UserError: The decoder cannot be read, or makes images of another size.
        """
        if self._decoder is None:
            self._decoder = self._loaded()
        images = in_chunks(self._decoder, latents.float() / self._scale + self._shift, math.prod(self._shape[1:]))
        if images.shape[1:] != self._shape:
            problem = f"makes images of the shape {tuple(images.shape[1:])}, not {self._shape}"
            remedy = "give another, or the data.resolution and data.image_channels of its images"
            raise UserError(PATH, self._section.path, problem, remedy)
        return images

    def _loaded(self) -> Callable[[Tensor], Tensor]:
        path = Path(str(self._section.path))
        if self._section.kind == "torchscript":
            program = load_program(path, PATH, self._device)

            def decode(latents: Tensor) -> Tensor:
                remedy = "give a program that turns latents into images"
                with naming_program(path, PATH, f"latents {tuple(latents.shape)}", remedy):
                    return program(latents).float()  # type: ignore[no-any-return]

            return decode
        network = load_folder(path, PATH, self._device)
        return lambda latents: network.decode(latents).sample
