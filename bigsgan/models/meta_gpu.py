"""The meta device in the place of a GPU: what kernels return there, and what they keep for the backward pass.

The planner traces layers on the meta device. There torch takes the paths of a CPU, which keep other tensors than a
GPU's kernels do. Inside ``stands_for_gpu`` layers take the paths of a GPU instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_stands_for_gpu = False


@contextmanager
def stands_for_gpu(stands: bool) -> Iterator[None]:
    """Let the meta device stand for a GPU in the block, or for a CPU."""
    global _stands_for_gpu
    before, _stands_for_gpu = _stands_for_gpu, stands
    try:
        yield
    finally:
        _stands_for_gpu = before


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or (device.type == "meta" and _stands_for_gpu)


def _stands_in(x: Tensor) -> bool:
    return x.is_meta and _stands_for_gpu


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """torch's attention, which keeps no weights on a GPU: (N, A, M, E), (N, A, K, E), (N, A, K, F) -> (N, A, M, F)."""
    if _stands_in(query):
        operands = query, key, value, None, True  # no mask; with what the backward pass needs
        mixed: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
        return mixed
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """torch's root mean square norm, (..., F), (F,) -> (..., F), whose kernel on a GPU (torch 2.9) keeps only x."""
    if _stands_in(x):
        return _RMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    """The kernel's, whose gradient is made of torch's operations where it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
        scaled = grad if weight is None else grad * weight
        inverse = (x.square().mean(dim=-1, keepdim=True) + ctx.epsilon).rsqrt()
        normalized = x * inverse
        along = (normalized * scaled).mean(dim=-1, keepdim=True)
        of_weight = None if weight is None else (grad * normalized).flatten(0, -2).sum(0)
        return scaled * inverse - normalized * (along * inverse), of_weight, None


class Maps:
    """What fused.py's kernels of feature maps return; its functions keep the same on every device."""

    @staticmethod
    def resample(x: Tensor, taps: Tensor, geometry: Any) -> Tensor:
        """(N, C, H, W) -> (N, C, height, width) of a ``fused.Geometry``."""
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        shape = (*x.shape[:2], geometry.height, geometry.width)
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)

    @staticmethod
    def rectify(x: Tensor, bias: Tensor, slope: float, limit: float | None) -> Tensor:
        """As large as x."""
        return torch.empty_like(x)

    @staticmethod
    def slopes(grad: Tensor, y: Tensor, slope: float, limit: float | None) -> Tensor:
        """As large as y."""
        return torch.empty_like(y)
