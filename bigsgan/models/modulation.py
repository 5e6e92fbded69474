"""Gain, bias and ReLU of normalized feature maps, and upsampling behind them.

On a GPU, maps with a pixel's channels side by side take a Triton kernel for each direction, which keeps the normalized
map alone for the backward pass. Other maps, tangents and compiled code take torch's operations. Where the gradient is
differentiated again, it is made of torch's operations.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import fused
from bigsgan.models.dual import has_tangent
from bigsgan.models.resizing import is_last, upsample_nearest


def modulate_and_rectify(x: Tensor, gain: Tensor, bias: Tensor, upsamples: bool = False) -> Tensor:
    """Compute the ReLU of x * gain + bias: (N, C, H, W), (N or 1, C), (N or 1, C) -> (N, C, H or 2H, W or 2W)."""
    if _suits(x, gain, bias):
        return _Modulated.apply(x, gain, bias, upsamples)
    y = F.relu(_modulated(x, gain, bias))
    return upsample_nearest(y) if upsamples else y


def _modulated(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias[:, :, None, None], x, gain[:, :, None, None])


def _suits(x: Tensor, gain: Tensor, bias: Tensor) -> bool:
    if torch.compiler.is_compiling() or not is_last(x) or not x.dtype == gain.dtype == bias.dtype:
        return False
    if has_tangent(x) or has_tangent(gain) or x.numel() == 0:
        return False
    return gain.shape == bias.shape and gain.stride(1) == bias.stride(1) == 1 and fused.used_for(x, fused.GAINS)


class _Modulated(torch.autograd.Function):
    """ReLU of x * gain + bias, upsampled or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, upsamples: bool) -> Tensor:
        ctx.save_for_backward(x, gain, bias)
        n, c, height, width = x.shape
        shape = (n, c, 2 * height, 2 * width) if upsamples else x.shape
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if not x.is_meta:
            fused.kernels("modulation").modulate(x, gain, bias, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, bias = ctx.saved_tensors
        if not torch.is_grad_enabled():
            out = torch.empty_like(x)
            if x.is_meta:
                return out, torch.empty_like(gain), torch.empty_like(bias), None
            grad = grad.contiguous(memory_format=torch.channels_last)
            return out, *fused.kernels("modulation").differentiate(grad, x, gain, bias, out), None
        if grad.shape != x.shape:
            grad = 4 * F.avg_pool2d(grad, 2)
        grad = torch.where(_modulated(x, gain, bias) <= 0, 0.0, grad)
        sums = [each.sum(dim=(2, 3)).sum_to_size(gain.shape) for each in (grad * x, grad)]
        return grad * gain[:, :, None, None], *sums, None
