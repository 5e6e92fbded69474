"""Parts of vision transformers: norms, attention with rotary positions, gated perceptrons, patches.

Products are computed in the weights' type, or with ``bf16`` in that on float32 weights. What is added up over blocks,
and what norms and softmax divide by, is at least float32 with ``bf16``, and else of the weights' type and float32.

Shapes: N samples, T tokens, W features, A heads of E = W / A features, C channels, H x W pixels of an image.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.images.size import Size
from bigsgan.models import attention, dual, meta_gpu
from bigsgan.models.dual import has_tangent, multiply, softmax
from bigsgan.models.initial import Generators
from bigsgan.models.layers import TwiceDifferentiable
from bigsgan.models.precision import full
from bigsgan.models.recomputing import last_sum

_EPSILON = 1e-6
_BASE = 10_000
"""Of the wavelengths of positions, in patches."""


class Linear(nn.Module):
    """Linear map (..., F_in) -> (..., F_out), whose weight begins uniform (Glorot and Bengio 2010, equation 16).

    ``multiplier`` is that of the learning rate: the weight is as much larger, and scaled back where it is used (Karras
    et al. 2019, arXiv 1812.04948, section C).
    """

    def __init__(
        self, in_features: int, out_features: int, bf16: bool, gain: float = 1.0, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.gain, self.multiplier, self.bf16 = gain, multiplier, bf16
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the weight, in float32 whatever its type, and clear the bias."""
        bound = self.gain / self.multiplier * math.sqrt(6 / sum(self.weight.shape))
        drawn = torch.empty(self.weight.shape, dtype=torch.float32)
        self.weight.copy_(drawn.uniform_(-bound, bound, generator=generators("weight")))
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map; with ``bf16`` the result is bf16."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if self.multiplier != 1:
            weight, bias = weight * self.multiplier, bias * self.multiplier
        if self.bf16 and weight.dtype == torch.float32:
            weight, bias = weight.to(torch.bfloat16), bias.to(torch.bfloat16)
        return multiply(F.linear, x.to(weight.dtype), weight, bias)


class Modulation(nn.Module):
    """What a condition c, such as w, says of features: (N, W) -> ``num`` times (N, 1, W)."""

    def __init__(self, width: int, num: int, bf16: bool, gain: float) -> None:
        super().__init__()
        self.num = num
        self.linear = Linear(width, num * width, bf16, gain=gain)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        """Of a SiLU of c."""
        return self.linear(F.silu(c))[:, None].chunk(self.num, dim=-1)


class Constant(nn.Module):
    """A parameter that begins at one value."""

    def __init__(self, features: int, value: float) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(features))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Fill it."""
        self.weight.fill_(self.value)


class LayerScale(Constant):
    """What a branch's features are scaled by where they are added (Touvron et al. 2021, arXiv 2103.17239).

    Attributes:
        is_last: Whether the sum is the output of the network's layer.
    """

    def __init__(self, features: int, value: float, is_last: bool) -> None:
        super().__init__(features, value)
        self.is_last = is_last

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """(..., F) twice -> (..., F)."""
        return last_sum(x, self.weight, branch) if self.is_last else x + self.weight * branch


class RMSNorm(Constant):
    """Root mean square norm with a scale (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, features: int, epsilon: float | None = _EPSILON) -> None:
        super().__init__(features, 1.0)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., F) -> (..., F)."""
        return normalized(x, self.epsilon, self.weight)


def normalized(x: Tensor, epsilon: float | None = _EPSILON, weight: Tensor | None = None) -> Tensor:
    """Divide by the root mean square of the features, and scale by a weight (F,): (..., F) -> (..., F).

    It is computed in float32 at least; the result has the type of both, or that to which torch promotes them. None for
    epsilon is float32's distance from 1 to the next number.
    """
    added = torch.finfo(torch.float32).eps if epsilon is None else epsilon
    if weight is not None and weight.dtype != x.dtype:
        common = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(common), weight.to(common)
    return (dual.rms_norm if has_tangent(x) else meta_gpu.rms_norm)(x, weight, added)


class Block(nn.Module):
    """A layer of attention and a perceptron. Its linear maps are those whose weights Muon updates."""


class SelfAttention(TwiceDifferentiable):
    """Self-attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2).

    Attributes:
        exact: Write the weights out, as torch's attention kernels have no second derivatives.
    """

    def __init__(self, width: int, heads: int, bf16: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bf16)
        self.out = Linear(width, width, bf16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, W) -> (N, T, W)."""
        n, num, width = x.shape
        query, key, value = self.placed(*self.qkv(x).view(n, num, 3, self.heads, -1).unbind(2))  # (N, T, A, E) each
        mixed = self.attended(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).reshape(n, num, width))

    def placed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries and keys depend on their tokens' places, (N, T, A, E) each; here they do not."""
        return query, key, value

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to all tokens, (N, A, T, E) each -> (N, A, T, E); a subclass may attend to some."""
        return self.mixed(query, key, value)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Values by the weights of queries and keys, (N, A, T, E) each."""
        if self.exact or has_tangent(query):
            return torch.matmul(softmax(torch.matmul(query, key.mT) * query.shape[-1] ** -0.5), value)
        return attention.attend(query, key, value)


class Attention(SelfAttention):
    """Self-attention with normalized queries and keys (Henry et al. 2020, arXiv 2010.04245) and rotary positions.

    Tokens are squares of patches row by row, whose queries and keys are rotated by their rows and columns (Su et al.
    2021, arXiv 2104.09864; in two dimensions as EVA-02 has it, arXiv 2303.11331). With ``class_tokens`` each square is
    behind one more token, which is not rotated.

    Attributes:
        rotation: Buffer (T, E / 2, 2) float32: a cosine and a sine for each pair of features. It is computed and not
            saved.
    """

    rotation: Tensor

    def __init__(self, width: int, heads: int, sizes: Sequence[Size], bf16: bool, class_tokens: bool = False) -> None:
        super().__init__(width, heads, bf16)
        self.sizes, self.class_tokens = list(sizes), class_tokens
        self.query_norm, self.key_norm = (RMSNorm(width // heads, epsilon=None) for _ in range(2))
        table = rotations(tuple(sizes), width // heads, class_tokens)
        self.register_buffer("rotation", on_default_device(table), persistent=False)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Compute the rotations again, whose memory may be new."""
        features = 2 * self.rotation.shape[1]
        self.rotation.copy_(rotations(tuple(self.sizes), features, self.class_tokens))

    def placed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate queries and keys."""
        query, key, rotation = self.query_norm(query), self.key_norm(key), self.rotation[:, None]
        return rotated(query, rotation).to(value.dtype), rotated(key, rotation).to(value.dtype), value


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of neighbouring features, which must lie side by side in memory, in float32.

    (..., E) and cosines and sines that expand to (..., E / 2, 2) -> (..., E).
    """
    pairs = full(x).unflatten(-1, (-1, 2))
    rotation = rotation.to(pairs.dtype)
    if not torch.compiler.is_compiling():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
        return turned.flatten(-2).to(x.dtype)
    (even, odd), (cosines, sines) = pairs.unbind(-1), rotation.unbind(-1)  # compilers have no complex numbers
    turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated perceptron (Shazeer 2020, arXiv 2002.05202) with 8/3 as many features inside, rounded down."""

    def __init__(self, width: int, bf16: bool) -> None:
        super().__init__()
        inside = int(2 / 3 * 4 * width)
        self.expand = Linear(width, 2 * inside, bf16)
        self.contract = Linear(inside, width, bf16)

    def forward(self, x: Tensor) -> Tensor:
        """(..., W) -> (..., W)."""
        gate, value = self.expand(x).chunk(2, dim=-1)
        return self.contract(F.silu(gate) * value)


class Positions(nn.Module):
    """Fixed sines and cosines of the patches' columns, then of their rows (Vaswani et al. 2017, section 3.5).

    Attributes:
        table: Buffer (P, W) float32. It is computed and not saved.
    """

    table: Tensor

    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", on_default_device(sines_of_positions(size, width)), persistent=False)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Compute them again, whose memory may be new."""
        self.table.copy_(sines_of_positions(self.size, self.table.shape[1]))


def on_default_device(table: Tensor) -> Tensor:
    """Return a copy where new modules have their parameters."""
    return table.to(torch.get_default_device(), copy=True)


@functools.lru_cache(maxsize=8)  # every block of a network has the same
def rotations(sizes: tuple[Size, ...], features: int, class_tokens: bool) -> Tensor:
    """Cosines and sines of the angles by which pairs of a token's features turn: (T, E / 2, 2), float32, on the CPU."""
    parts = []
    for height, width in sizes:  # as many pairs of features rotate with rows as with columns
        rows = _angles(height, features // 4)[:, None].expand(-1, width, -1)
        columns = _angles(width, features // 4)[None].expand(height, -1, -1)
        patches = torch.cat([rows, columns], dim=-1).flatten(0, 1)
        parts += [torch.zeros_like(patches[:1]), patches] if class_tokens else [patches]
    both = torch.cat(parts)
    return torch.stack([both.cos(), both.sin()], dim=-1).float()


@functools.lru_cache(maxsize=8)
def sines_of_positions(size: Size, features: int) -> Tensor:
    """Sines and cosines of each patch's column, then of its row: (P, W), float32, on the CPU."""
    of_sides = []
    for side in size:
        angles = _angles(side, features // 4)
        of_sides.append(torch.cat([angles.sin(), angles.cos()], dim=1))  # (side, W / 2)
    rows, columns = of_sides[0][:, None].expand(-1, size.width, -1), of_sides[1][None].expand(size.height, -1, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()


def _angles(side: int, num: int) -> Tensor:
    """Places along a side times frequencies: (side, num), float64, on the CPU.

    Under deepspeed.zero.Init torch.arange gives numbers of the engine's type, whatever it is asked for (0.19.8).
    """
    places, numbers = (torch.from_numpy(np.arange(length, dtype=np.float64)) for length in (side, num))
    return torch.outer(places, _BASE ** (-numbers / num))


def patches_of(images: Tensor, patch: int) -> Tensor:
    """Cut images into squares: (N, C, H, W) -> (N, P, C * patch^2), row by row, channel by channel."""
    return F.unfold(images, patch, stride=patch).mT if patch > 1 else images.flatten(2).mT


def images_of(tokens: Tensor, patch: int, size: Size) -> Tensor:
    """Put squares together, h x w: (N, h * w, patch^2 * C), pixel by pixel -> (N, C, h * patch, w * patch)."""
    height, width = size.height, size.width  # torch 2.11 cannot compile the iteration over a size
    squares = tokens.unflatten(1, (height, width)).unflatten(3, (patch, patch, -1))  # (N, h, w, patch, patch, C)
    return squares.permute(0, 5, 1, 3, 2, 4).reshape(tokens.shape[0], -1, height * patch, width * patch)
