"""Quantizers of latents, as layers: what comes before them gets its gradient as if they were the identity.

Shapes: N samples, Z channels, H x W pixels, P = H * W, K codes.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.models.initial import Generators
from bigsgan.models.precision import full

_AT_A_TIME = 2**27
"""Products of pixels and codes that are compared at a time: 512 MB."""
_MARGIN = 1e-3
"""Share by which a channel's range exceeds its levels, so that two levels need no infinite shift."""


class Quantizer(nn.Module):
    """A layer that quantizes latents.

    Attributes:
        watched: Whether to keep the numbers of the codes of each pass.
        numbers: Those of the last pass, (N, P) int64; None unless it was watched.
    """

    watched = False
    numbers: Tensor | None = None

    def keep(self, numbers: Tensor) -> None:
        """Keep the numbers of a pass if they are wanted."""
        if self.watched:
            self.numbers = numbers


class VectorQuantizer(Quantizer):
    """Replaces each pixel's latents by the nearest of K codes (van den Oord et al. 2017, arXiv 1711.00937).

    If ``normalized``, latents and codes are divided by their norms (Yu et al. 2021, arXiv 2110.04627, section 3.2).
    """

    def __init__(self, num_codes: int, channels: int, normalized: bool) -> None:
        super().__init__()
        self.normalized = normalized
        self.codebook = nn.Parameter(torch.empty(num_codes, channels))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw uniform codes in [-1 / K, 1 / K], divided by their norms if they always are."""
        codes = torch.empty(self.codebook.shape).uniform_(-1, 1, generator=generators("codebook")) / len(self.codebook)
        self.codebook.copy_(F.normalize(codes, dim=1) if self.normalized else codes)

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        """(N, Z, H, W) -> the same quantized; latents, their codes (N, P, Z) float32; the codes' numbers (N, P)."""
        encoded, codes = full(h).flatten(2).mT, full(self.codebook)
        if self.normalized:
            encoded, codes = F.normalize(encoded, dim=2), F.normalize(codes, dim=1)
        numbers = _nearest(encoded.detach().flatten(0, 1), codes.detach()).view(encoded.shape[:2])
        self.keep(numbers)
        quantized = F.embedding(numbers, codes)
        passed = encoded + (quantized - encoded).detach()
        return passed.mT.reshape(h.shape).to(h.dtype), encoded, quantized, numbers


def _nearest(latents: Tensor, codes: Tensor) -> Tensor:
    """Return the number of the nearest code: (M, Z), (K, Z) -> (M,) int64; of equally near ones the first."""
    lengths, num = codes.square().sum(dim=1), max(1, _AT_A_TIME // len(codes))
    parts = [latents] if torch.compiler.is_compiling() else latents.split(num)  # a graph takes any number of images
    return torch.cat([(lengths - 2 * part @ codes.T).argmin(dim=1) for part in parts])


class FiniteScalarQuantizer(Quantizer):
    """Rounds each channel to one of its levels in [-1, 1] (Mentzer et al. 2023, arXiv 2309.15505, appendix A.1)."""

    def __init__(self, levels: list[int]) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, Z, H, W) -> (N, Z, H, W)."""
        levels = torch.tensor(self.levels, dtype=torch.float32, device=h.device).view(-1, 1, 1)
        half = (levels - 1) * (1 + _MARGIN) / 2
        offset = torch.where(levels % 2 == 0, 0.5, 0.0)
        bounded = (full(h) + (offset / half).atanh()).tanh() * half - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        if self.watched:  # each channel is a digit, the first the least
            digits = (bounded.round() + levels // 2).long().flatten(2)
            places = torch.tensor([1, *accumulate(self.levels[:-1], mul)], device=h.device)
            self.keep((digits * places[:, None]).sum(dim=1))
        return ((rounded / (levels // 2)).to(h.dtype),)
