"""Convolutions in the form in which a GPU's tensor cores take them; elsewhere, and in float32, as they stand.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLE = 8
"""Of channels, in the half types, which kernels for tensor cores read at once: 16 bytes."""


def suits_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels want a pixel's channels side by side, and multiples of 8 of them: a GPU's for half types."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an input (N, C, H, W) of a convolution in its type, and in the order in which its kernels want it."""
    if suits_tensor_cores(x.device, dtype):
        return x.to(dtype, memory_format=torch.channels_last)
    return x.to(dtype)
