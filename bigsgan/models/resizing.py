"""2x2 average pooling and nearest-neighbour upsampling, alone and with what is added beside them.

On a GPU, maps with a pixel's channels side by side take Triton kernels, which read and write each number once: torch's
own (2.11) take seven times as long on an H100. Other maps, tangents and compiled code take torch's operations.
All can be differentiated any number of times.

Shapes: N samples, C channels, H x W pixels of the large map.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import fused
from bigsgan.models.dual import has_tangent


def pool_average(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, C, H/2, W/2), the means of four pixels, in the memory format of ``x``."""
    return _Resize.apply(x, 0.25, False) if _suits(x) else F.avg_pool2d(x, 2)


def pool_average_beside(x: Tensor, bias: Tensor | None, beside: Tensor) -> Tensor:
    """Add a bias and a small map to ``pool_average``: (N, C, H, W), (C,), (N, C, H/2, W/2) -> (N, C, H/2, W/2)."""
    if bias is None:
        return pool_average(x) + beside
    if _suits(x) and _fits_one_kernel(x, bias, beside):
        return _PoolBeside.apply(x, bias.view(-1, 1, 1).expand_as(beside), beside)
    return pool_average(x) + bias[:, None, None] + beside


def rectify_and_pool_average(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ReLU and ``pool_average`` of one map: (N, C, H, W) -> (N, C, H, W), (N, C, H/2, W/2)."""
    return _Split.apply(x, None) if _suits(x) else (F.relu(x), pool_average(x))


def upsample_nearest(x: Tensor) -> Tensor:
    """(N, C, H/2, W/2) -> (N, C, H, W), each pixel four times, in the memory format of ``x``.

    The compiled backward pass of torch's own function adds atomically into float32 zeros (2.15): it is slower, and on a
    GPU its order changes from run to run. The backward pass of an expanded view is a plain sum.
    """
    if not torch.compiler.is_compiling():
        return _Resize.apply(x, 1.0, True) if _suits(x, large=False) else F.interpolate(x, scale_factor=2)
    n, c, height, width = x.shape
    if is_last(x):
        pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, height, 2, width, 2, c)
        return pixels.reshape(n, 2 * height, 2 * width, c).permute(0, 3, 1, 2)
    return x[:, :, :, None, :, None].expand(n, c, height, 2, width, 2).reshape(n, c, 2 * height, 2 * width)


def upsample_nearest_onto(x: Tensor, bias: Tensor | None, small: Tensor) -> Tensor:
    """Add a bias (C,) and ``upsample_nearest`` of a small map (N, C, H/2, W/2) to a large one: -> (N, C, H, W)."""
    if bias is None:
        return x + upsample_nearest(small)
    if _suits(x) and _fits_one_kernel(x, bias, small):
        return _SpreadOnto.apply(x, bias.view(-1, 1, 1).expand_as(small), small)
    return x + upsample_nearest(small + bias[:, None, None])


def _suits(x: Tensor, large: bool = True) -> bool:
    """Whether kernels take a map, the large one of a pair or the small one."""
    if torch.compiler.is_compiling() or not is_last(x) or has_tangent(x):
        return False
    divides = not large or x.shape[2] % 2 == x.shape[3] % 2 == 0
    return divides and x.numel() > 0 and fused.used_for(x, fused.SIZES)


def is_last(x: Tensor) -> bool:
    """Whether a pixel's channels lie side by side, and pixels do not."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _fits_one_kernel(x: Tensor, bias: Tensor, small: Tensor) -> bool:
    """Whether one kernel can add a bias and a map: of x's type, in its order, without a tangent."""
    return x.dtype == bias.dtype == small.dtype and is_last(small) and not has_tangent(small)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _resized(x: Tensor, grows: bool) -> Tensor:
    """An empty map with sides twice as long, or half."""
    n, c, height, width = x.shape
    sides = (2 * height, 2 * width) if grows else (height // 2, width // 2)
    return torch.empty((n, c, *sides), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _launch(name: str, x: Tensor, *others: Any) -> None:
    """Launch a kernel, but on the meta device."""
    if not x.is_meta:
        getattr(fused.kernels("resizing"), name)(x, *others)


class _Resize(torch.autograd.Function):
    """A factor times the sum of four pixels or, if it grows, times a pixel, four times: transposes of each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, grows: bool) -> Tensor:
        ctx.factor, ctx.grows, y = factor, grows, _resized(x, grows)
        _launch("spread" if grows else "pool", _last(x), y, factor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Resize.apply(grad, ctx.factor, not ctx.grows), None, None


class _PoolBeside(torch.autograd.Function):
    """Mean of four pixels, plus a bias expanded to the result's shape, so that torch sums its gradient, and a map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, beside: Tensor) -> Tensor:
        y = _resized(x, grows=False)
        _launch("pool", x, y, 0.25, beside, bias[0, :, 0, 0].contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return _Resize.apply(grad, 0.25, True), grad, grad


class _SpreadOnto(torch.autograd.Function):
    """A large map plus pixels of a small one, each four times, with a bias expanded to the small one's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, small: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _launch("spread", small, y, 1.0, x, bias[0, :, 0, 0].contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = _Resize.apply(grad, 1.0, False)
        return grad, pooled, pooled


class _Split(torch.autograd.Function):
    """ReLU, and means of four pixels before it. For gradients of gradients another map's sign decides what is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sign: Tensor | None) -> tuple[Tensor, Tensor]:
        kept, pooled = torch.empty_like(x), _resized(x, grows=False)
        _launch("split", x, sign, kept, pooled, 0.25)
        ctx.save_for_backward(kept if sign is None else sign)
        return kept, pooled

    @staticmethod
    def backward(ctx: Any, kept: Tensor, pooled: Tensor) -> tuple[Tensor, None]:
        (sign,) = ctx.saved_tensors
        return _Join.apply(kept, pooled, sign), None


class _Join(torch.autograd.Function):
    """The transpose of ``_Split``, whose transpose it is: linear in both maps, and constant around each sign."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, pooled: Tensor, sign: Tensor) -> Tensor:
        ctx.save_for_backward(sign)
        x = torch.empty_like(sign)
        _launch("join", _last(kept), _last(pooled), sign, x, 0.25)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (sign,) = ctx.saved_tensors
        return *_Split.apply(_last(grad), sign), None
