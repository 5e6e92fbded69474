"""Batch norm over all data-parallel ranks (Ioffe and Szegedy 2015, arXiv 1502.03167), by torch's kernels.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.models.layers import Generators, RankAverages, SpectralLinear, full

Affine: TypeAlias = "tuple[Tensor, Tensor] | None"
"""A gain to multiply by and a bias to add, (N or 1, C, 1, 1)."""

_TINY = 1e-30
"""Added to a variance of 0, whose inverse is asked for."""


class _Moments(torch.autograd.Function):
    """Mean and biased variance of each channel, (C,) float32, by torch's batch norm; its var_mean takes far longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        running = x.new_zeros(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        _, mean, inverse = torch.native_batch_norm(x, None, None, running[0], running[1], True, 0.0, _TINY)
        ctx.save_for_backward(x, mean)
        return mean, inverse.pow(-2)

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor, var_grad: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        num = x.numel() // x.shape[1]
        slope = var_grad * (2 / num)
        offset = mean_grad / num - slope * mean
        return torch.addcmul(offset.view(1, -1, 1, 1), x, slope.view(1, -1, 1, 1)).to(x.dtype)


class BatchStatistics(RankAverages):
    """Normalises each channel over the samples and pixels of the global micro-batch, without gain or bias.

    Statistics are float32 and, where ``average_over_ranks`` is given, those of all data-parallel ranks. In training
    mode the micro-batch is normalised by itself; in evaluation mode by the running statistics (Ioffe and Szegedy
    2015, arXiv 1502.03167).

    Attributes:
        running_mean: Buffer (C,), float32.
        running_var: Buffer (C,), float32, unbiased.
        momentum: Weight of a new micro-batch in the running statistics.
        segments: Equal parts of a batch, such as real and fake images, that are normalised each by itself; the first
            moves the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum, self.segments = eps, momentum, 1
        self.register_buffer("running_mean", torch.empty(channels, dtype=torch.float32))
        self.register_buffer("running_var", torch.empty(channels, dtype=torch.float32))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start the running statistics at mean 0 and variance 1."""
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def forward(self, x: Tensor, affine: Affine = None) -> Tensor:
        """Normalise (N, C, H, W) to mean 0 and variance 1 for each channel, in x's type. Differentiable twice.

        Args:
            x: (N, C, H, W).
            affine: What to apply to it afterwards.
        """
        # Sums over N * H * W values need more than 8 or 11 bits. torch's own batch norm adds bf16 up in float32, as the
        # running statistics are; for fp16 its second derivatives overflow.
        exact = x if x.dtype == torch.bfloat16 else full(x)
        if not self.training:
            normalized = F.batch_norm(exact, self.running_mean, self.running_var, eps=self.eps)
            return _applied(affine, normalized.to(x.dtype))
        if self.segments == 1:
            normalized, correction = self._normalize(exact)
            return _applied(_joined(correction, affine), normalized.to(x.dtype))
        n, c, h, w = x.shape
        # Segments become channels, which batch norm keeps apart.
        apart = exact.view(self.segments, -1, c, h, w).transpose(0, 1).reshape(-1, self.segments * c, h, w)
        normalized, correction = self._normalize(apart)
        normalized = _applied(correction, normalized.to(x.dtype))
        together = normalized.view(-1, self.segments, c, h, w).transpose(0, 1).reshape(n, c, h, w)
        return _applied(affine, together)

    def _normalize(self, x: Tensor) -> tuple[Tensor, Affine]:
        """(n, segments * C, H, W) normalised, and what is to be applied to it for its derivatives' sake alone.

        Over several ranks, m and v being mean and variance, and m' and v' their values held constant,

            (x - m) / sqrt(v) = (x - m') / sqrt(v') * gain + bias,
            gain = sqrt(v') / sqrt(v) = 1, bias = (m' - m) / sqrt(v') * gain = 0,

        of which torch's kernel computes the first factor.
        """
        channels = len(self.running_mean)
        if self.average_over_ranks is None:
            # Copies even where nothing may move: a recomputation has to save as many tensors as its forward.
            mean, var = (buffer.repeat(self.segments) for buffer in (self.running_mean, self.running_var))
            if self.segments == 1 and self.moving:
                mean, var = self.running_mean, self.running_var
            normalized = F.batch_norm(x, mean, var, training=True, momentum=self.momentum, eps=self.eps)
            if self.segments > 1 and self.moving:
                self.running_mean.copy_(mean[:channels])
                self.running_var.copy_(var[:channels])
            return normalized, None
        mean, var = self._global_statistics(x, self.average_over_ranks)
        if self.moving:
            count = x.numel() // x.shape[1] * self.num_ranks
            self._move(mean[:channels].detach(), var[:channels].detach(), count)
        normalized = F.batch_norm(x, mean.detach(), var.detach(), eps=self.eps)
        inverse = torch.rsqrt(var + self.eps)
        gain = inverse / inverse.detach()
        bias = (mean.detach() - mean) * inverse.detach() * gain
        return normalized, (gain.view(1, -1, 1, 1), bias.view(1, -1, 1, 1))

    def _global_statistics(self, x: Tensor, average: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over all ranks in one collective.

        The variance is that within the ranks plus that of their means. Means are taken from the running mean, which all
        ranks share, so that their squares do not cancel the latter away. Rounding must not make it negative; its
        gradient holds there too, which a clamp alone would drop.
        """
        mean, var = _Moments.apply(x)
        center = self.running_mean.repeat(self.segments)  # a copy: it moves in place before the backward pass
        offset = mean - center
        offset, square, var = average(torch.stack([offset, offset.square(), var])).unbind(0)
        between = square - offset.square()
        return center + offset, var + between + (between.clamp(min=0) - between).detach()

    def _move(self, mean: Tensor, var: Tensor, count: int) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * (count / max(count - 1, 1)), self.momentum)


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gain and bias are linear in a condition (Brock et al. 2019, appendix B)."""

    def __init__(self, channels: int, condition_size: int) -> None:
        super().__init__()
        self.statistics = BatchStatistics(channels)
        self.gain = SpectralLinear(condition_size, channels, bias=False)
        self.bias = SpectralLinear(condition_size, channels, bias=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(N, C, H, W), (N, condition_size) -> (N, C, H, W): normalised * (1 + gain) + bias."""
        gain = 1 + self.gain(condition)[:, :, None, None]
        return self.statistics(x, (gain, self.bias(condition)[:, :, None, None]))


class AffineBatchNorm(nn.Module):
    """Batch norm with one learned gain and bias for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.statistics = BatchStatistics(channels)
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start as the identity."""
        self.weight.fill_(1)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return self.statistics(x, (self.weight.view(1, -1, 1, 1), self.bias.view(1, -1, 1, 1)))


def _joined(first: Affine, second: Affine) -> Affine:
    """Both, one after the other, in one pass over the pixels."""
    if first is None or second is None:
        return first or second
    return first[0] * second[0], torch.addcmul(second[1], first[1], second[0])


def _applied(affine: Affine, x: Tensor) -> Tensor:
    return x if affine is None else torch.addcmul(affine[1].to(x.dtype), x, affine[0].to(x.dtype))
