"""Convolutions in the form in which a GPU's tensor cores take them; elsewhere, and in float32, as torch has them.

Shapes: N samples, C channels, H x W pixels, K a kernel's side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import dual, fused

MULTIPLE = 8
"""Of channels, in the half types, which kernels for tensor cores read at once: 16 bytes."""


def suits_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels want a pixel's channels side by side, and multiples of 8 of them: a GPU's for half types."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def laid_out(x: Tensor, dtype: torch.dtype, everywhere: bool = False) -> Tensor:
    """Return an input (N, C, H, W) of a convolution in its type, and in the order in which its kernels want it.

    That is a pixel's channels side by side, on tensor cores or ``everywhere``.
    """
    if everywhere or suits_tensor_cores(x.device, dtype):
        return x.to(dtype, memory_format=torch.channels_last)
    if suits_tensor_cores(x.device, x.dtype):  # copied anyway
        return x.to(dtype, memory_format=torch.contiguous_format)
    return x.to(dtype)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, groups: int = 1
) -> Tensor:
    """Compute torch's conv2d: (N, C_in, H, W), (C_out, C_in / groups, K, K), (C_out,) -> (N, C_out, H', W').

    On tensor cores channels of 0 fill up those that are no multiple of 8. A bias, which torch adds in a pass of its own
    behind cuDNN's kernel, is part of the product where one can be had: as the weight of a channel of ones among those
    that fill up, or as that of a matrix product.
    """
    return dual.multiply(lambda x, w, b: _convolved(x, w, b, stride, padding, groups), x, weight, bias)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int) -> Tensor:
    if groups > 1 or not suits_tensor_cores(x.device, x.dtype):
        return F.conv2d(x, weight, bias, stride, padding, groups=groups)
    num, kernel = len(weight), weight.shape[2]
    spare, missing = -x.shape[1] % MULTIPLE, -num % MULTIPLE
    if spare:
        rides = bias is not None and kernel > 2 * padding  # one tap never meets the padding
        # As the last dimension, so that channels stay side by side also where there was but one.
        x = F.pad(x.permute(0, 2, 3, 1), (0, spare), value=float(rides)).permute(0, 3, 1, 2)
        more = weight.new_zeros(num, spare, kernel, kernel)
        if bias is not None and rides:
            more, bias = _tap(bias, weight, padding, spare), None
        weight = torch.cat([weight, more], dim=1)
    if missing:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
    if bias is not None and (kernel, stride, padding) == (1, 1, 0):
        pixels = x.permute(0, 2, 3, 1)  # a matrix as it lies, with its channels side by side
        bias = F.pad(bias, (0, missing)) if missing else bias
        y = F.linear(pixels.flatten(0, 2), weight.flatten(1), bias).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
        return _first(y, num)
    if not missing:
        return F.conv2d(x, weight, bias, stride, padding)
    y = _first(F.conv2d(x, weight, None, stride, padding), num)
    return y if bias is None else y + bias.view(-1, 1, 1)


def _tap(bias: Tensor, weight: Tensor, padding: int, num: int) -> Tensor:
    """Weights (C_out, num, K, K) of channels of ones that add the bias (C_out,): by one tap of the first of them.

    The tap of place ``padding`` meets pixel o * stride for output o, inside the image where K > 2 * padding.
    """
    behind = weight.shape[2] - 1 - padding
    return F.pad(bias.view(-1, 1, 1, 1), (padding, behind, padding, behind, 0, num - 1))


def _first(x: Tensor, num: int) -> Tensor:
    """The first channels of (N, C, H, W); seen as the last dimension, so that their gradient is filled up in order."""
    return x.permute(0, 2, 3, 1)[..., :num].permute(0, 3, 1, 2)


def convolve_transposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, output_padding: int = 0, groups: int = 1
) -> Tensor:
    """Compute torch's conv_transpose2d: (N, C_in, H, W), (C_in, C_out / groups, K, K), (C_out,) -> (N, C_out, H', W').

    On tensor cores with output channels filled up as ``convolve`` does.
    """

    def transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups)

    num = weight.shape[1]
    missing = -num % MULTIPLE
    if groups > 1 or not missing or not suits_tensor_cores(x.device, x.dtype):
        return dual.multiply(transposed, x, weight, bias)
    weight = F.pad(weight, (0, 0, 0, 0, 0, missing))
    y = _first(dual.multiply(transposed, x, weight), num)
    return y if bias is None else y + bias.view(-1, 1, 1)


def rectify_biased(x: Tensor, bias: Tensor, slope: float = 0.0) -> Tensor:
    """Leaky ReLU of x + bias: (N, C, H, W), (C,) -> (N, C, H, W), in one pass where a GPU's kernels work."""
    if not torch.compiler.is_compiling() and fused.used_for(x):
        return fused.rectify(x, bias, slope, None)
    x = x + bias.view(-1, 1, 1)
    return F.leaky_relu(x, slope) if slope else F.relu(x)
