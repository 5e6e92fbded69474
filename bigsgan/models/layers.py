"""Layers with state: spectrally normalized weights, and the base of layers with batch statistics.

A forward pass may move a layer's state (power-iteration vectors, running statistics) only while ``moving`` is set.
The engines set it in the first training forward with gradients of an update. Sampling, recomputation under activation
checkpointing, the seam and penalties use the state without moving it.

Shapes: N samples, C channels, H x W pixels, F features; a weight seen as a matrix is (rows, columns) = (output, rest),
and the weight of a grouped convolution, whose matrix is block diagonal, (groups, rows / groups, columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bigsgan.images.size import Size
from bigsgan.models import attention, convolutions, spectral
from bigsgan.models.dual import has_tangent, multiply, softmax
from bigsgan.models.initial import Generators, draw_orthogonal
from bigsgan.models.plain import embed
from bigsgan.models.precision import full
from bigsgan.models.resizing import pool_average, pool_average_beside, upsample_nearest_onto


class StatefulLayer(nn.Module):
    """A layer whose forward pass moves buffers, but only while ``moving`` is set."""

    moving: bool = False


@contextmanager
def moving_state(layers: list[StatefulLayer], moving: bool) -> Iterator[None]:
    """Let the forward passes inside the block move the state of ``layers``, if ``moving``."""
    for layer in layers:
        layer.moving = moving
    try:
        yield
    finally:
        for layer in layers:
            layer.moving = False


class _OrthogonalGradient(torch.autograd.Function):
    """Identity on a weight whose backward adds the gradient of the orthogonal regularization.

    R(W) = strength * |W W^T * (1 - I)|_F^2 has the gradient 4 * strength * (W W^T * (1 - I)) W. It is added where the
    weight is used, and so needs no second gather at ZeRO 3.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, layer: SpectralLayer) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        matrix = ctx.layer.as_matrix(full(weight))  # filters of different groups see different inputs
        own = 4 * ctx.layer.orthogonal * scale * _off_diagonal_product(matrix)
        return grad + own.view_as(weight).to(grad.dtype), None, None


def _off_diagonal_product(matrix: Tensor) -> Tensor:
    """Return (W W^T * (1 - I)) W of (..., rows, columns), by the smaller of W W^T and W^T W.

    G's first layer has 16 times as many rows as channels: at a billion parameters its W W^T takes 16 GB.
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        return matrix @ (matrix.mT @ matrix) - matrix.square().sum(dim=-1, keepdim=True) * matrix
    gram = matrix @ matrix.mT
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    return gram @ matrix


class SpectralLayer(StatefulLayer):
    """Layer whose weight is divided by its largest singular value (Miyato et al. 2018, arXiv 1802.05957).

    Each update makes one step of power iteration, in float32 whatever the weight's type. With groups, the norm is that
    of the whole block-diagonal matrix, the largest of the groups' norms. The norm of the weight as it is stored, one
    block under the other, would be up to sqrt(groups) times as large and silence a depthwise convolution.

    Attributes:
        weight: Parameter of shape (rows, ...).
        groups: Number of equal parts of the rows, each with inputs of its own.
        u: Left singular vector, buffer (rows,), float32.
        v: Right singular vector, buffer (groups * columns,), float32.
        orthogonal: Strength of the orthogonal regularization, 0 for none.
        gradient_scale: The engine's factor on losses before the backward pass (loss scale / accumulation); the engine's
            tensor (), as torch.compile would take a number for a constant. It does not change between a forward pass
            and its backward pass.
        sigma: The weight's largest singular value in the last forward pass, None before the first.
        is_folded: Whether the weight is already divided by sigma for good; see ``fold``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    u: Tensor
    v: Tensor
    eps = 1e-12
    initial_iterations = 10

    def __init__(self, shape: tuple[int, ...], bias: bool = False, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        columns = groups * self.weight[0].numel()
        self.register_buffer("u", torch.empty(shape[0], dtype=torch.float32))
        self.register_buffer("v", torch.empty(columns, dtype=torch.float32))
        self.orthogonal = 0.0
        self.gradient_scale: Tensor | float = 1.0
        self.sigma: Tensor | None = None
        self.is_folded = False

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Fill the weight with an orthogonal matrix, the bias with zeros, and u and v with its singular vectors."""
        generator, shape = generators("weight"), (len(self.weight) // self.groups, self.weight[0].numel())
        groups = [draw_orthogonal(shape, generator, self.weight.device) for _ in range(self.groups)]
        weight = (torch.cat(groups) if self.groups > 1 else groups.pop()).view(self.weight.shape)
        self.weight.copy_(weight)
        if self.bias is not None:
            self.bias.zero_()
        matrix = self.as_matrix(weight)
        u = F.normalize(torch.randn(len(weight), generator=generator), dim=0).to(weight.device)
        v = spectral.product(matrix.mT, u)
        # Sampling may come before the first forward that moves u and v, so they start near the truth.
        for _ in range(self.initial_iterations):
            u, v = spectral.iterated(matrix, u, self.eps)
        self.u.copy_(u)
        self.v.copy_(v)

    @torch.no_grad()
    def fold(self) -> None:
        """Divide the weight by sigma for good, in a network that is no longer trained."""
        self.weight.copy_(self.normalized_weight())
        self.is_folded = True

    def normalized_weight(self) -> Tensor:
        """Return weight / sigma, in the weight's shape and type; moves u and v by one iteration while ``moving``."""
        weight: Tensor = self.weight
        if self.is_folded:
            return weight
        if self.orthogonal:
            scale = torch.as_tensor(self.gradient_scale, dtype=torch.float32, device=weight.device)
            weight = _OrthogonalGradient.apply(weight, scale, self)
        if self.groups == 1 and spectral.used_for(weight):
            normalized, self.sigma = spectral.normalized(weight, self.u, self.v, self.moving, self.eps)
            return normalized
        exact = full(weight)  # bf16 keeps 8 bits of sigma; that would scale every layer by up to 0.4 %
        matrix = self.as_matrix(exact)
        u, v = self.u, self.v
        if self.moving:
            with torch.no_grad():
                u, v = spectral.iterated(matrix, u, self.eps)
                self.u.copy_(u)
                self.v.copy_(v)
        sigma = torch.dot(u, spectral.product(matrix, v))
        self.sigma = sigma.detach()
        return (exact / sigma).to(weight.dtype)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """(rows, ...) -> (rows, columns), or (groups, rows / groups, columns) if there are groups."""
        matrix = weight.flatten(1)
        return matrix if self.groups == 1 else matrix.view(self.groups, -1, matrix.shape[1])


class _Unfelt(torch.autograd.Function):
    """Identity on x, with a gradient of 0 for a bias that batch norm removes with the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.num = len(bias)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(ctx.num)


class SpectralConv2d(SpectralLayer):
    """Convolution, with same padding unless told otherwise: (N, C_in, H, W) -> (N, C_out, H / stride, W / stride).

    On a GPU a bias is a separate addition, so the operation after the convolution decides where it is added.

    Attributes:
        followed_by: ``pooling`` halves the resolution by average pooling, and the bias is added after it. ``relu``
            rectifies, in the same pass. Before ``batch norm`` a GPU leaves the bias out in training.
        shift: The bias (C_out,) that the last output lacks, for the running mean; None if it lacks none. A copy, which
            stays when ZeRO 3 releases the parameter.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Size,
        bias: bool = True,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
    ) -> None:
        size = Size.of(kernel)
        super().__init__((out_channels, in_channels // groups, *size), bias, groups)
        self.stride, self.padding = stride, size.height // 2 if padding is None else padding
        self.followed_by: Literal["pooling", "relu", "batch norm"] | None = None
        self.shift: Tensor | None = None

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """Convolve, in the weight's type and with the channels of a pixel side by side.

        Kernels need this order, and most later operations keep it (docs/explanation/performance.md).
        ``beside`` (N, C_out, H / 2, W / 2) is added: behind the pooling, or each pixel four times.
        """
        x = convolutions.laid_out(x, self.weight.dtype, everywhere=True)
        own, self.shift = self.bias, None
        # Compiled code joins a bias with the next operation by itself.
        lean = convolutions.suits_tensor_cores(x.device, x.dtype) and not torch.compiler.is_compiling()
        if self.followed_by == "pooling":
            x = self._convolve(x, None)
            if beside is not None:
                return pool_average_beside(x, own, beside)
            return pool_average(x) if own is None else pool_average(x) + own[:, None, None]
        if self.followed_by == "relu":
            if own is None or not lean or x.shape[1] % convolutions.MULTIPLE:
                return F.relu(self._convolve(x, own))
            return convolutions.rectify_biased(self._convolve(x, None), own)
        if self.followed_by == "batch norm" and own is not None and lean and self.training and not has_tangent(x):
            self.shift = own.detach().clone()
            return _Unfelt.apply(self._convolve(x, None), own)
        if beside is None:
            return self._convolve(x, own)
        apart, own = (own, None) if lean else (None, own)
        return upsample_nearest_onto(self._convolve(x, own), apart, beside)

    def _convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return convolutions.convolve(x, self.normalized_weight(), bias, self.stride, self.padding, self.groups)


class SpectralLinear(SpectralLayer):
    """Linear map: (N, F_in) -> (N, F_out)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__((out_features, in_features), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map, in the weight's type."""
        return multiply(F.linear, x.to(self.weight.dtype), self.normalized_weight(), self.bias)


class SpectralEmbedding(SpectralLayer):
    """Embedding table: labels (N,) int64, or vectors of K numbers -> (N, F); see ``embed``."""

    def __init__(self, num_classes: int, features: int) -> None:
        super().__init__((num_classes, features))

    def forward(self, labels: Tensor) -> Tensor:
        """Look the labels up."""
        return embed(labels, self.normalized_weight())


class Embedding(nn.Module):
    """Embedding table without normalization: labels (N,) int64, or vectors of K numbers -> (N, F); see ``embed``."""

    def __init__(self, num_classes: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, features))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Fill the table with an orthogonal matrix."""
        rows, columns = self.weight.shape
        self.weight.copy_(draw_orthogonal((rows, columns), generators("weight"), self.weight.device))

    def forward(self, labels: Tensor) -> Tensor:
        """Look the labels up."""
        return embed(labels, self.weight)


class RankAverages(StatefulLayer):
    """A layer that takes means over the global micro-batch; each data-parallel rank holds an equal part of it.

    The engine sets ``average_over_ranks``, a tensor's differentiable mean over ``num_ranks`` ranks; None on one rank.
    It takes a mean that is ``known`` as well, and then sends no message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.average_over_ranks: Callable[..., Tensor] | None = None
        self.num_ranks = 1


class Kept(AbstractContextManager["Kept"]):
    """Where a checkpointed layer keeps what its recomputation takes instead of sending messages.

    Attributes:
        open: That of the layer which is being computed, if any.
        is_full: Whether it is being recomputed.
    """

    open: ClassVar[Kept | None] = None

    def __init__(self, values: list[tuple[Tensor, ...]], is_full: bool) -> None:
        self.is_full, self._values, self._next = is_full, values, iter(values)

    @classmethod
    def contexts(cls) -> tuple[Kept, Kept]:
        """Return those of a layer's forward pass and of its recomputation, as torch's ``checkpoint`` takes them."""
        values: list[tuple[Tensor, ...]] = []
        return cls(values, is_full=False), cls(values, is_full=True)

    def __enter__(self) -> Kept:
        """Begin anew, as a layer may be recomputed several times."""
        self._before, Kept.open, self._next = Kept.open, self, iter(self._values)
        return self

    def __exit__(self, *about: object) -> None:
        """End, unless an exception has ended it before."""
        if Kept.open is self:
            Kept.open = self._before

    def keep(self, *values: Tensor) -> None:
        """Keep values for the recomputation."""
        self._values.append(tuple(each.detach().clone() for each in values))

    def take(self) -> tuple[Tensor, ...]:
        """Return what the forward pass kept at this place."""
        return next(self._next)


class TwiceDifferentiable(nn.Module):
    """A layer whose usual kernels have no second derivatives, or coarse ones.

    Attributes:
        exact: Whether to compute in a form that can be differentiated twice, as D's exact penalties need. A D with such
            penalties is built with it set; engines then choose for each phase.
    """

    exact = False


class SelfAttention(TwiceDifferentiable):
    """Self-attention over pixels (Zhang et al. 2019, arXiv 1805.08318), keys and values pooled by 2.

    If ``exact`` is set, it writes the weights out, as torch's attention kernels have no second derivatives.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow, half = (max(1, channels // divisor) for divisor in (8, 2))
        self.query = SpectralConv2d(channels, narrow, 1, bias=False)
        self.key = SpectralConv2d(channels, narrow, 1, bias=False)
        self.value = SpectralConv2d(channels, half, 1, bias=False)
        self.out = SpectralConv2d(half, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.empty(1))  # DeepSpeed cannot broadcast a tensor without dimensions

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start with the attention switched off."""
        self.gamma.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W): x + gamma * attention(x)."""
        n, _, height, width = x.shape
        query = _rows(self.query(x))  # (N, HW, C/8)
        key = _rows(F.max_pool2d(self.key(x), 2))  # (N, HW/4, C/8)
        value = _rows(F.max_pool2d(self.value(x), 2))  # (N, HW/4, C/2)
        written_out = self.exact or has_tangent(x)
        if convolutions.suits_tensor_cores(query.device, query.dtype) and not written_out:
            mixed = attention.attend(query[:, None], key[:, None], value[:, None], scale=1.0).squeeze(1)
        else:
            weights = softmax(torch.bmm(query, key.mT))  # (N, HW, HW/4)
            # In this order the gradient of the weights, the largest tensor here, does not arrive transposed.
            mixed = torch.bmm(weights, value)
        return x + self.gamma * self.out(mixed.mT.view(n, -1, height, width))


def _rows(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, HW, C)."""
    return x.flatten(2).mT
