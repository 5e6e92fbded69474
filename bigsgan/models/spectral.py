"""Spectral normalization: the power iteration, and Triton kernels that layers of all shapes share.

With torch's operations, a layer launches some twenty kernels in a pass that moves its vectors and goes backward, and
torch.compile makes other code for each shape: half of all its code for BigGAN-128. Here there are seven kernels, which
torch.compile calls and does not look into. Callers ask ``used_for`` first.

Shapes: R rows and C columns of a weight seen as a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import fused

_MOST = 2**31
"""Limit on a weight's numbers, whose places the kernels hold in 32 bits."""


def product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix (r, c) times vector (c,) -> (r,); diagonal blocks (g, r, c) times (g * c,) -> (g * r,)."""
    if matrix.dim() == 2:
        return torch.mv(matrix, vector)
    return torch.bmm(matrix, vector.view(len(matrix), -1, 1)).flatten()


def iterated(matrix: Tensor, u: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return u and v after one step of the power iteration by torch's operations, for a matrix or diagonal blocks.

    torch.compile does not look into it. It would recompute small products in the backward pass from the u that the
    forward pass has moved, one step further: the weight's gradient was up to 70 % off (torch 2.14, 2.15).
    """
    return _suited(_iterated, _iterated_op)(matrix, u, eps)


def _iterated(matrix: Tensor, u: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    v = F.normalize(product(matrix.mT, u), dim=0, eps=eps)
    return F.normalize(product(matrix, v), dim=0, eps=eps), v


def used_for(weight: Tensor) -> bool:
    """Whether the kernels work for this weight."""
    return fused.used_for(weight, fused.NORMS) and weight.numel() < _MOST and weight.is_contiguous()


def normalized(weight: Tensor, u: Tensor, v: Tensor, moving: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight / sigma, in the weight's shape (R, ...) and type, and sigma = u^T W v, detached.

    If ``moving``, u (R,) and v (C,) move in place by one step of the power iteration, which divides by lengths of at
    least ``eps``.
    """
    with torch.no_grad():
        if not moving:
            sigma = _suited(_norm, _norm_op)(weight, u, v)
        else:
            u, v, sigma = _suited(_iterate, _iterate_op)(weight, u, v, eps)
    return _Divided.apply(weight, u, v, sigma), sigma


class _Divided(torch.autograd.Function):
    """weight / sigma, where sigma = u^T W v depends on the weight too: d sigma = u^T dW v."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
        ctx.save_for_backward(weight, u, v, sigma)
        return _suited(_divide, _divide_op)(weight, sigma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, u, v, sigma = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the gradient will be differentiated
            return _differentiable(grad, weight, u, v), None, None, None
        found = _suited(_differentiate, _differentiate_op)(grad, weight, u, v, sigma)
        return found, None, None, None


def total_type(weight: Tensor) -> torch.dtype:
    """Return the type in which sums are computed."""
    return torch.promote_types(weight.dtype, torch.float32)


def is_filter(weight: Tensor) -> bool:
    """Whether a weight has filters of more than one pixel; those are returned with their channels last."""
    return weight.dim() == 4 and weight.shape[2:].numel() > 1


def _differentiable(grad: Tensor, weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    exact = weight.to(total_type(weight))
    grad = grad.to(exact.dtype)
    u, v = u.to(exact.dtype), v.to(exact.dtype)
    sigma = torch.dot(u, torch.mv(exact.flatten(1), v))
    share = (grad * exact).sum() / sigma.square()
    return (grad / sigma - share * torch.outer(u, v).view_as(grad)).to(weight.dtype)


# --- the kernels, and custom operations that wrap them while torch compiles ---


def _suited(function: Callable[..., Any], operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or, while torch compiles, the custom operation that wraps it."""
    return operation if torch.compiler.is_compiling() else function


def _norm(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return fused.kernels("spectral").norm(weight, u, v)


def _iterate(weight: Tensor, u: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    moved = fused.kernels("spectral").iterate(weight, u, v, eps)
    torch.autograd.graph.increment_version([u, v])  # a pass before this one may have kept them
    return moved


def _divide(weight: Tensor, sigma: Tensor) -> Tensor:
    return fused.kernels("spectral").divide(weight, sigma)


def _differentiate(grad: Tensor, weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    return fused.kernels("spectral").differentiate(grad, weight, u, v, sigma)


_iterated_op = torch.library.custom_op("bigsgan::power_iteration_step", _iterated, mutates_args=())
_norm_op = torch.library.custom_op("bigsgan::spectral_norm", _norm, mutates_args=())
_iterate_op = torch.library.custom_op("bigsgan::power_iteration", _iterate, mutates_args=("u", "v"))
_divide_op = torch.library.custom_op("bigsgan::divide_by_norm", _divide, mutates_args=())
# Gradients may have any memory order; without the tag torch would copy them to the order in which it traced.
_differentiate_op = torch.library.custom_op(
    "bigsgan::divide_by_norm_backward", _differentiate, mutates_args=(), tags=(torch.Tag.flexible_layout,)
)


@_iterated_op.register_fake
def _(matrix: Tensor, u: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    groups = 1 if matrix.dim() == 2 else len(matrix)
    return torch.empty_like(u), u.new_empty(groups * matrix.shape[-1])


@_norm_op.register_fake
def _(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return weight.new_empty((), dtype=total_type(weight))


@_iterate_op.register_fake
def _(weight: Tensor, u: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(u), torch.empty_like(v), weight.new_empty((), dtype=total_type(weight))


@_divide_op.register_fake
def _(weight: Tensor, sigma: Tensor) -> Tensor:
    layout = torch.channels_last if is_filter(weight) else torch.contiguous_format
    return torch.empty_like(weight, memory_format=layout)


@_differentiate_op.register_fake
def _(grad: Tensor, weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    return torch.empty_like(weight)
