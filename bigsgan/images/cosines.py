"""The discrete cosine transform of blocks of pixels (Ahmed, Natarajan and Rao 1974), type II and orthonormal.

Shapes: N images, C channels, H x W pixels, B pixels a side of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def to_cosines(images: Tensor, block: int, scale: float = 1.0) -> Tensor:
    """(N, C, H, W) -> (N, C * B^2, H / B, W / B), multiplied by ``scale``, float32.

    Channel (c * B + u) * B + v holds channel c's frequency u down the rows and v along the columns.
    """
    n, _, height, width = images.shape
    basis = _basis(block, images.device)
    blocks = images.float().unflatten(3, (-1, block)).unflatten(2, (-1, block))  # (N, C, H / B, B, W / B, B)
    found = torch.einsum("ncaybx,uy,vx->ncuvab", blocks, basis, basis)
    return scale * found.reshape(n, -1, height // block, width // block)


def from_cosines(latents: Tensor, block: int, scale: float = 1.0) -> Tensor:
    """Invert ``to_cosines``: (N, C * B^2, H / B, W / B) -> (N, C, H, W) float32."""
    n, channels, height, width = latents.shape
    basis = _basis(block, latents.device)
    parts = latents.float().reshape(n, channels // block**2, block, block, height, width)
    found = torch.einsum("ncuvab,uy,vx->ncaybx", parts, basis, basis)
    return found.reshape(n, -1, height * block, width * block) / scale


def _basis(block: int, device: torch.device) -> Tensor:
    """Return the orthonormal basis: float32 (B frequencies, B places)."""
    places = torch.arange(block, dtype=torch.float64, device=device)
    basis = torch.cos(math.pi / block * torch.outer(places, places + 0.5)) * math.sqrt(2 / block)
    first = torch.where(places == 0, math.sqrt(0.5), 1.0)
    return (basis * first[:, None]).float()
