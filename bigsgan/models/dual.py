"""Passes that carry the derivative of each number along a direction of the network's input: its tangent.

So a penalty on the gradient g of a network's outputs D at its input x is differentiated once, not twice:

    P = E[phi(|g|)],  g = d sum(D(x)) / dx,   dP/dtheta = d/dtheta E[<g, v>],   v = phi'(|g|) g / |g| held fixed,

and <g, v> is the tangent of D's outputs if that of x is v. An ordinary backward pass through both the values and the
tangents gives the gradient (reverse over forward; Pearlmutter 1994, "Fast exact multiplication by the Hessian").

Only layers with operations that torch cannot differentiate forward know of tangents: they ask ``has_tangent``.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn

from bigsgan.models.precision import full

Carry = tuple[Tensor, ...]


class Dual(NamedTuple):
    """A carry with its tangents."""

    carry: Carry  # as without tangents
    tangents: Carry  # of each floating-point entry of the carry, in its shape, times 2^exponent
    exponent: Tensor  # int64 (1,). Scales tangents so that half types can hold them.


EXPONENT = torch.int64
"""The type of the exponent."""


def load_rules() -> None:
    """Import torch's rules for some tangents now, so that a warning about torch's own code is not printed later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit.script is deprecated
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def begin(inputs: Carry, tangent: Tensor, over_replicas: Callable[[Tensor], Any] | None = None) -> Dual:
    """Make the inputs of a network with a tangent.

    Args:
        inputs: The network's inputs; the tangent belongs to the first.
        tangent: The tangent, of the first input's shape, float32 or float64.
        over_replicas: Replaces a tensor (), in place, by its largest value over all replicas: layers take means of
            tangents over replicas, so these need the same exponent.
    """
    largest = tangent.abs().amax()
    if over_replicas is not None:
        over_replicas(largest)
    largest = largest.nan_to_num(nan=1.0).clamp(2.0**-100, 2.0**100)
    exponent = -torch.frexp(largest).exponent.to(EXPONENT).view(1)
    others = [torch.zeros_like(entry) for entry in inputs[1:] if entry.is_floating_point()]
    return Dual(inputs, (torch.ldexp(tangent, exponent), *others), exponent)


def end(dual: Dual) -> tuple[Tensor, Tensor]:
    """Return the last layer's output, and its tangent, at least in float32."""
    (output,), (tangent,), exponent = dual
    exact = full(tangent)
    # As a factor, because in torch 2.11 the derivative of ldexp is 0 for a negative exponent.
    return output, exact * torch.ldexp(torch.ones_like(exponent, dtype=exact.dtype), -exponent)


def flat(dual: Dual) -> list[Tensor]:
    """Return carry, tangents and exponent as one list, in which they travel between stages."""
    return [*dual.carry, *dual.tangents, dual.exponent]


def from_flat(entries: Sequence[Tensor]) -> Dual:
    """Invert ``flat``."""
    *others, exponent = entries
    num = len(others)
    while num + sum(entry.is_floating_point() for entry in others[:num]) > len(others):
        num -= 1
    return Dual(tuple(others[:num]), tuple(others[num:]), exponent)


def differentiate(layer: Callable[..., Carry], *entries: Tensor) -> Dual:
    """Apply a layer to the entries of ``flat``."""
    dual = from_flat(entries)
    tangents = iter(dual.tangents)
    with forward_mode.dual_level():
        outputs = layer(
            *(
                forward_mode.make_dual(entry, next(tangents)) if entry.is_floating_point() else entry
                for entry in dual.carry
            )
        )
        values = [forward_mode.unpack_dual(output) for output in outputs]
        return Dual(
            tuple(value.primal for value in values),
            tuple(
                torch.zeros_like(value.primal) if value.tangent is None else value.tangent
                for value in values
                if value.primal.is_floating_point()
            ),
            dual.exponent,
        )


class DualLayer(nn.Module):
    """A layer that takes and returns the entries of ``flat``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *entries: Tensor) -> Carry:
        """Apply the layer."""
        return tuple(flat(differentiate(self.layer, *entries)))


def linearly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear function, to the tangent too if there is one.

    For functions that torch cannot differentiate forward, or only with more work; see ``multiply``. A ``jvp`` method
    instead would keep torch.compile from compiling even passes without tangents.
    """
    value, tangent = forward_mode.unpack_dual(x)
    return function(x) if tangent is None else forward_mode.make_dual(function(value), function(tangent))


def multiply(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Apply ``product``, linear in x and in a weight without tangent, with a bias; to x's tangent without the bias.

    torch's own rules for convolutions and matrix products also multiply x by the weight's tangent, though it is 0
    (2.14), and go backward through that: it costs ten passes of a network without tangents instead of eight.
    """
    value, tangent = forward_mode.unpack_dual(x)
    if tangent is None:
        return product(x, weight, bias)
    return forward_mode.make_dual(product(value, weight, bias), product(tangent, weight, None))


def has_tangent(x: Tensor) -> bool:
    """Whether a layer's input has a tangent."""
    return forward_mode.unpack_dual(x).tangent is not None


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Root mean square norm of an x with a tangent, (..., F), times a weight (F,) without one if there is any.

    torch's own rule (2.14) also multiplies by the weight's tangent, though it is 0, and goes backward through it: 132
    kernels on a GPU, forward and backward, in the place of 43.
    """
    value, tangent = forward_mode.unpack_dual(x)
    exact, change = full(value), full(tangent)
    inverse = (exact.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    normalized = exact * inverse
    turned = inverse * (change - normalized * (normalized * change).mean(dim=-1, keepdim=True))
    if weight is not None:
        normalized, turned = normalized * full(weight), turned * full(weight)
    return forward_mode.make_dual(normalized.to(x.dtype), turned.to(x.dtype))


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension.

    With a tangent it is written out: torch's (2.14) overwrites inputs of its tangent's backward pass.
    """
    if not has_tangent(x):
        return torch.softmax(x, dim=-1)
    exact = full(x)
    exp = (exact - exact.detach().amax(dim=-1, keepdim=True)).exp()
    return (exp / exp.sum(dim=-1, keepdim=True)).to(x.dtype)
