"""Convolutions in the form that a GPU's tensor cores need; on other devices, and in float32, torch's own.

Shapes: N samples, C channels, H x W pixels, K a kernel's side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import dual, fused, meta_gpu

MULTIPLE = 8
"""Number of channels, in half types, that kernels for tensor cores read at once: 16 bytes."""


def suits_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels need a pixel's channels side by side, in multiples of 8: on a GPU, for half types."""
    return meta_gpu.is_gpu(device) and dtype in (torch.bfloat16, torch.float16)


def laid_out(x: Tensor, dtype: torch.dtype, everywhere: bool = False) -> Tensor:
    """Return an input (N, C, H, W) of a convolution in the convolution's type and memory order.

    The order puts a pixel's channels side by side on tensor cores, or always if ``everywhere``.
    """
    if everywhere or suits_tensor_cores(x.device, dtype):
        return x.to(dtype, memory_format=torch.channels_last)
    if suits_tensor_cores(x.device, x.dtype):  # the new type needs a copy anyway
        return x.to(dtype, memory_format=torch.contiguous_format)
    return x.to(dtype)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, groups: int = 1
) -> Tensor:
    """Compute torch's conv2d: (N, C_in, H, W), (C_out, C_in / groups, K, K), (C_out,) -> (N, C_out, H', W').

    On tensor cores, channels of 0 pad their number to a multiple of 8. torch adds a bias in a separate pass after
    cuDNN's kernel. Where possible the bias is part of the product instead: as the weight of a padding channel that
    holds ones, or as the bias of a matrix product.
    """
    return dual.multiply(lambda x, w, b: _convolved(x, w, b, stride, padding, groups), x, weight, bias)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int) -> Tensor:
    if groups > 1 or not suits_tensor_cores(x.device, x.dtype):
        return F.conv2d(x, weight, bias, stride, padding, groups=groups)
    num, (*kernel,) = len(weight), weight.shape[2:]
    spare, missing = -x.shape[1] % MULTIPLE, -num % MULTIPLE
    if spare:
        has_ones = bias is not None and min(kernel) > 2 * padding  # one tap never meets the padding of the image
        # As the last dimension, so that channels stay side by side even if there was only one.
        x = F.pad(x.permute(0, 2, 3, 1), (0, spare), value=float(has_ones)).permute(0, 3, 1, 2)
        more = weight.new_zeros(num, spare, *kernel)
        if bias is not None and has_ones:
            more, bias = _tap(bias, weight, padding, spare), None
        weight = torch.cat([weight, more], dim=1)
    if missing:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
    if bias is not None and (kernel, stride, padding) == ([1, 1], 1, 0):
        pixels = x.permute(0, 2, 3, 1)  # a matrix without a copy, as channels are side by side
        bias = F.pad(bias, (0, missing)) if missing else bias
        y = F.linear(pixels.flatten(0, 2), weight.flatten(1), bias).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)
        return _first(y, num)
    if not missing:
        return F.conv2d(x, weight, bias, stride, padding)
    y = _first(F.conv2d(x, weight, None, stride, padding), num)
    return y if bias is None else y + bias.view(-1, 1, 1)


def _tap(bias: Tensor, weight: Tensor, padding: int, num: int) -> Tensor:
    """Return weights (C_out, num, K, K) for channels of ones that add the bias (C_out,), by one tap of the first.

    For output o, the tap at ``padding`` meets pixel o * stride, which is inside the image if K > 2 * padding.
    """
    below, right = (side - 1 - padding for side in weight.shape[2:])
    return F.pad(bias.view(-1, 1, 1, 1), (padding, right, padding, below, 0, num - 1))


def _first(x: Tensor, num: int) -> Tensor:
    """Return the first channels of (N, C, H, W), cut as the last dimension, so that gradients are padded in order."""
    return x.permute(0, 2, 3, 1)[..., :num].permute(0, 3, 1, 2)


def convolve_transposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, output_padding: int = 0, groups: int = 1
) -> Tensor:
    """Compute torch's conv_transpose2d: (N, C_in, H, W), (C_in, C_out / groups, K, K), (C_out,) -> (N, C_out, H', W').

    On tensor cores, output channels are padded as in ``convolve``.
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
    """Compute the leaky ReLU of x + bias: (N, C, H, W), (C,) -> (N, C, H, W); in one pass where our kernels work."""
    if not torch.compiler.is_compiling() and fused.used_for(x):
        return fused.rectify(x, bias, slope, None)
    x = x + bias.view(-1, 1, 1)
    return F.leaky_relu(x, slope) if slope else F.relu(x)
