"""Where bigsgan's Triton kernels are used; and two of them, StyleGAN2's filter and rectifier.

The filter and the rectifier, which adds the bias, can be differentiated any number of times.

Callers of any kernel ask ``used_for`` first. They use torch's own operations for tensors on a CPU, if Triton or its C
compiler is missing, and if BIGSGAN_FUSED is 0. The choice is logged once.

Shapes: N samples, C channels, H x W pixels, K x K a filter.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.models import meta_gpu

SWITCH = "BIGSGAN_FUSED"

MAPS, DRAWS, NORMS = "filters and rectifiers of feature maps", "random numbers of samples", "spectral norms of weights"
SIZES, GAINS = "pooling and upsampling of feature maps", "gains of normalized feature maps"

_log = logging.getLogger(__name__)


def used_for(x: Tensor, subject: str = MAPS) -> bool:
    """Whether a subject's kernels work for tensors like ``x``; the first call on a GPU compiles them.

    On the meta device, kernels of feature maps do where it stands for a GPU (meta_gpu.py).
    """
    if x.is_meta:
        return meta_gpu.is_gpu(x.device) and subject in (MAPS, SIZES, GAINS)
    return obstacle(x.device, x.dtype, subject) is None


def _of_maps(x: Tensor) -> Any:
    return meta_gpu.Maps if x.is_meta else kernels("fused")


def obstacle(device: torch.device, dtype: torch.dtype, subject: str = MAPS) -> str | None:
    """Return why torch's own operations must be used, or None if the kernels work; the choice is logged."""
    return _decide(device, dtype, subject)


# torch.compile takes the answer for a constant, in the place of compiling the search for it. This is all that
# torch.compiler.assume_constant_result does (torch 2.8 to 2.15), but for importing the compiler, which takes seconds.
obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _decide(device: torch.device, dtype: torch.dtype, subject: str) -> str | None:
    reason = None
    if device.type != "cuda":
        reason = "tensors are not on a GPU"
    elif os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH} is 0"
    else:
        try:
            {MAPS: _try_maps, DRAWS: _try_draws, NORMS: _try_norms, SIZES: _try_sizes, GAINS: _try_gains}[subject](
                device, dtype
            )
        except Exception as error:  # errors of Triton and of the C compiler have no type in common
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            reason = f"the kernels do not work here for {dtype} ({cause})"
    _log_once(subject, "Triton kernels" if reason is None else f"torch's own operations, as {reason}")
    return reason


class Geometry(NamedTuple):
    """How a filter reads its input, in both directions.

    Output o is y[o] = gain * sum over k of taps[k] * u[o * down + k - before], where u is the input with ``up - 1``
    zeros after each pixel, and 0 outside of it.
    """

    up: int  # places in u for each pixel; divides K
    down: int  # distance in u of the places that are kept
    before: int  # zeros in front of u
    height: int  # of the output
    width: int  # of the output
    gain: float = 1.0  # factor on the output
    flipped: bool = True  # whether taps are taken in reverse order, which makes it a convolution

    def transposed(self, size: int, height: int, width: int) -> Geometry:
        """Return the geometry that maps gradients by outputs to those by inputs (height, width); K is ``size``."""
        before = size - 1 - self.before
        return Geometry(self.down, self.up, before, height, width, self.gain, not self.flipped)


def resample(x: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
    """Filter: (N, C, H, W), (K, K) -> (N, C, height, width), in x's type; the filter itself is a constant."""
    return _Resample.apply(x, taps, geometry)


def rectify(x: Tensor, bias: Tensor, slope: float, limit: float | None) -> Tensor:
    """Rectify x + bias leakily, within plus or minus ``limit``: (N, C, H, W), (C,) -> (N, C, H, W), in x's type.

    It only keeps its output for the backward pass. Where the output is the limit the slope is 0, even if the value was
    only rounded to the limit.
    """
    if limit is not None:
        limit = _rounded(limit, x.dtype)
    return _Rectify.apply(x, bias.view(-1, 1, 1).expand_as(x), slope, limit)


class _Resample(torch.autograd.Function):
    """A linear map, whose transpose is a map of the same kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(taps)
        ctx.save_for_forward(taps)
        ctx.geometry, ctx.shape = geometry, x.shape[2:]
        return _of_maps(x).resample(_dense(x), taps.contiguous(), geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (taps,) = ctx.saved_tensors
        return _Resample.apply(grad, taps, ctx.geometry.transposed(len(taps), *ctx.shape)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (taps,) = ctx.saved_for_forward
        return _Resample.apply(tangent, taps, ctx.geometry)


class _Rectify(torch.autograd.Function):
    """Rectifier of x and a bias expanded to x's shape, so that torch sums the bias's gradient, and only if needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, slope: float, limit: float | None) -> Tensor:
        y = _of_maps(x).rectify(_dense(x), bias[0, :, 0, 0].contiguous(), slope, limit)
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        ctx.slope, ctx.limit = slope, limit
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (y,) = ctx.saved_tensors
        grad = _Slopes.apply(grad, y, ctx.slope, ctx.limit)
        return grad, grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (y,) = ctx.saved_for_forward  # the bias, a parameter, has no tangent
        return _Slopes.apply(tangent, y, ctx.slope, ctx.limit)


class _Slopes(torch.autograd.Function):
    """Gradient times the rectifier's slope: linear in the gradient, its own transpose, and constant around each y."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, y: Tensor, slope: float, limit: float | None) -> Tensor:
        ctx.save_for_backward(y)
        ctx.slope, ctx.limit = slope, limit
        layout = torch.contiguous_format if y.is_contiguous() else torch.channels_last
        return _of_maps(y).slopes(grad.contiguous(memory_format=layout), y, slope, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        return _Slopes.apply(grad, y, ctx.slope, ctx.limit), None, None, None


def _dense(x: Tensor) -> Tensor:
    """Return ``x``, copied if it is neither contiguous nor channels_last."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


@cache
def kernels(name: str) -> Any:
    """Import the kernels of ``fused``, ``modulation``, ``noise``, ``resizing`` or ``spectral``, which need Triton."""
    return importlib.import_module(f"bigsgan.models.{name}_kernels")


def _try_maps(device: torch.device, dtype: torch.dtype) -> None:
    ours = kernels("fused")
    x, taps = torch.zeros(1, 1, 4, 4, device=device, dtype=dtype), torch.zeros(4, 4, device=device)
    y = ours.resample(x, taps, Geometry(2, 1, 2, 8, 8))
    ours.rectify(y, torch.zeros(1, device=device, dtype=dtype), 0.2, 1.0)
    ours.slopes(y, y, 0.2, 1.0)


def _try_draws(device: torch.device, dtype: torch.dtype) -> None:
    for kind in ("uniform", "normal"):
        kernels("noise").draw(torch.zeros(1, device=device, dtype=dtype), range(1), 2, kind)


def _try_norms(device: torch.device, dtype: torch.dtype) -> None:
    ours, total = kernels("spectral"), torch.promote_types(dtype, torch.float32)
    u, v = torch.ones(2, device=device, dtype=total), torch.ones(12, device=device, dtype=total)
    for shape in ((2, 3, 2, 2), (2, 12)):
        weight = torch.ones(shape, device=device, dtype=dtype)
        ours.iterate(weight, u, v, 1e-12)
        sigma = ours.norm(weight, u, v)
        ours.differentiate(ours.divide(weight, sigma), weight, u, v, sigma)


def _try_sizes(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 16, 2, 2, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    kernels("resizing").pool(x, x[:, :, :1, :1].contiguous(), 0.25)
    kernels("resizing").spread(x[:, :, :1, :1].contiguous(), x, 0.25)


def _try_gains(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 16, 2, 2, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    kernels("modulation").modulate(x, x[:, :, 0, 0].contiguous(), x[:, :, 0, 0].contiguous(), x)


@cache
def _log_once(subject: str, choice: str) -> None:
    _log.info("%s: %s", subject, choice)
