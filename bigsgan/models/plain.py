"""Convolutions and linear maps without state, initialized from their own random generators.

Shapes: N samples, C channels, H x W pixels, F features, K a kernel's side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.images.size import Size
from bigsgan.models.convolutions import convolve, convolve_transposed, laid_out
from bigsgan.models.dual import multiply
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.precision import full


class Weighted(nn.Module):
    """Layer with a weight, drawn from a normal distribution, and a bias (features,), initially 0, or no bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, ...], std: float, features: int | None) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(features)) if features else None

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the weight and clear the bias."""
        draw_normal(self.weight, generators("weight"), self.std)
        if self.bias is not None:
            self.bias.zero_()


class Conv2d(Weighted):
    """Convolution: (N, C_in, H, W) -> (N, C_out, ...)."""

    is_transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Size,
        std: float,
        stride: int,
        padding: int,
        bias: bool = True,
        groups: int = 1,
    ) -> None:
        rows, columns = (in_channels, out_channels) if self.is_transposed else (out_channels, in_channels)
        super().__init__((rows, columns // groups, *Size.of(kernel)), std, out_channels if bias else None)
        self.stride, self.padding, self.groups = stride, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, in the weight's type."""
        x = laid_out(x, self.weight.dtype)
        return convolve(x, self.weight, self.bias, self.stride, self.padding, self.groups)


class ConvTranspose2d(Conv2d):
    """Transposed: (N, C_in, H, W) -> (N, C_out, (H - 1) * stride - 2 * padding + K + output_padding, ...)."""

    is_transposed = True
    output_padding = 0

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, in the weight's type."""
        x = laid_out(x, self.weight.dtype)
        return convolve_transposed(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups
        )


class Linear(Weighted):
    """Linear map: (N, F_in) -> (N, F_out)."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = True) -> None:
        super().__init__((out_features, in_features), std, out_features if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map, in the weight's type."""
        return multiply(F.linear, x.to(self.weight.dtype), self.weight, self.bias)


def embed(labels: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table (K, F) for labels (N,) int64, or their sums weighted by vectors (N, K): (N, F)."""
    return F.embedding(labels, table) if labels.dim() == 1 else F.linear(labels.to(table.dtype), table.t())


class Embedding(Weighted):
    """Embedding table: labels (N,) int64, or vectors of K numbers -> (N, F); see ``embed``."""

    def __init__(self, num_classes: int, features: int, std: float = 1.0) -> None:
        super().__init__((num_classes, features), std, None)

    def forward(self, labels: Tensor) -> Tensor:
        """Look the labels up."""
        return embed(labels, self.weight)


class LatentWithClass(nn.Module):
    """Joins a latent (N, Z) and, if there are conditions, the label's embedding (N, E): (N, Z + E)."""

    def __init__(self, latent_size: int, num_classes: int, embedding_size: int) -> None:
        super().__init__()
        self.embedding = Embedding(num_classes, embedding_size) if num_classes else None
        self.features = latent_size + (embedding_size if num_classes else 0)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(N, Z), (N,) or (N, K) -> (N, features)."""
        return latents if self.embedding is None else torch.cat([latents, full(self.embedding(labels))], dim=1)
