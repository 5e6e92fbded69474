"""Quantizers of latents, as layers: what comes before them gets its gradient as if they were the identity.

Shapes: N samples, Z channels, H x W pixels, P = H * W, K codes.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.models.initial import Generators, make_buffer
from bigsgan.models.precision import full

_AT_A_TIME = 2**27
"""Products of pixels and codes that are compared at a time: 512 MB."""
_TOGETHER = 9
"""Channels of signs whose combinations are counted."""
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

    Attributes:
        codebook: The codes (K, Z): a parameter, or a buffer if they follow averages, which a term moves.
        is_float32: Codes are, also where frozen parameters have another type.
    """

    codebook: Tensor
    is_float32 = True

    def __init__(self, config: AutoencoderGenerator) -> None:
        super().__init__()
        section = config.bottleneck
        self.normalized, self._temperature, self._learns = section.normalized, section.temperature, config.learns_codes
        self.codebook = nn.Parameter(torch.empty(section.num_codes, config.latent_channels))
        if section.ema is not None:
            make_buffer(self, "codebook")

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw uniform codes in [-1 / K, 1 / K], divided by their norms if they always are."""
        codes = torch.empty(self.codebook.shape).uniform_(-1, 1, generator=generators("codebook")) / len(self.codebook)
        self.codebook.copy_(F.normalize(codes, dim=1) if self.normalized else codes)

    def forward(self, h: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, Z, H, W), [(N,)] -> the same quantized, and what terms read.

        Returns:
            Quantized latents; latents and their codes (N, P, Z) float32; the codes' numbers (N, P). With a temperature,
            the mean entropy (N,) over pixels of a softmax over the codes, and its mean (N, K).
        """
        encoded, codes = full(h).flatten(2).mT, full(self.codebook)
        if self.normalized:
            encoded, codes = F.normalize(encoded, dim=2), F.normalize(codes, dim=1)
        numbers = nearest(encoded.detach().flatten(0, 1), codes.detach()).view(encoded.shape[:2])
        self.keep(numbers)
        quantized = F.embedding(numbers, codes)
        more: tuple[Tensor, ...] = ()
        passed = encoded + (quantized - encoded).detach()
        if self._temperature is not None:
            near = (2 * encoded @ codes.T - codes.square().sum(dim=1)) / self._temperature
            log_shares = near.log_softmax(dim=2)
            shares = log_shares.exp()
            more = -(shares * log_shares).sum(dim=2).mean(dim=1), shares.mean(dim=1)
        # What a carry holds needs a gradient path; codes that do not learn have none of their own.
        of_codes = quantized if self._learns else passed
        return passed.mT.reshape(h.shape).to(h.dtype), encoded, of_codes, numbers, *more


class SignQuantizer(Quantizer):
    """Replaces each channel by its sign: lookup-free quantization (Yu et al. 2023, arXiv 2310.05737, section 3)."""

    def __init__(self, temperature: float | None) -> None:
        super().__init__()
        self._temperature = temperature

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        """(N, Z, H, W) -> its signs, and what terms read, as of ``VectorQuantizer``.

        The softmax over all 2^Z codes is the product of those over two signs, so that entropies are sums over channels.
        Means over pixels are not: those of up to nine channels are taken together.
        """
        encoded = full(h).flatten(2).mT
        is_positive = encoded.detach() > 0
        numbers = (is_positive * 2 ** torch.arange(encoded.shape[2], device=h.device)).sum(dim=2)
        self.keep(numbers)
        passed = encoded + (2.0 * is_positive - 1 - encoded).detach()
        more = tuple[Tensor, ...]()
        if self._temperature is not None:
            logits = encoded * (4 / self._temperature)  # the squared distances from -1 and from 1 differ by 4 x
            positive, negative = logits.sigmoid(), (-logits).sigmoid()
            entropies = -(positive * F.logsigmoid(logits) + negative * F.logsigmoid(-logits)).sum(dim=2).mean(dim=1)
            pairs = torch.stack([negative, positive], dim=3).split(_TOGETHER, dim=2)
            more = entropies, torch.cat([_joint(part).mean(dim=1) for part in pairs], dim=1)
        return passed.mT.reshape(h.shape).to(h.dtype), encoded, passed, numbers, *more


def _joint(pairs: Tensor) -> Tensor:
    """Probabilities of all combinations of g independent signs: (N, P, g, 2) -> (N, P, 2^g)."""
    found = pairs[:, :, 0]
    for i in range(1, pairs.shape[2]):
        found = (found[..., None] * pairs[:, :, i, None]).flatten(2)
    return found


def nearest(latents: Tensor, codes: Tensor) -> Tensor:
    """Return the number of the nearest code: (M, Z), (K, Z) -> (M,) int64; of equally near ones the first."""
    if torch.compiler.is_dynamo_compiling():  # not where a network is exported
        return _compiled_nearest(latents, codes)
    lengths, num = codes.square().sum(dim=1), max(1, _AT_A_TIME // len(codes))
    is_exported = torch.compiler.is_compiling()  # its graph takes any number of images
    parts = [latents] if is_exported else latents.split(num)
    return torch.cat([(part @ codes.T).mul_(-2).add_(lengths).argmin(dim=1) for part in parts])  # one product at a time


@torch.library.custom_op("bigsgan::nearest", mutates_args=())
def _compiled_nearest(latents: Tensor, codes: Tensor) -> Tensor:
    """Return the same in compiled code, as one operation: what torch 2.11 compiles of it for a CPU is wrong."""
    return nearest(latents, codes)


@_compiled_nearest.register_fake
def _(latents: Tensor, codes: Tensor) -> Tensor:
    return latents.new_empty(len(latents), dtype=torch.int64)


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
