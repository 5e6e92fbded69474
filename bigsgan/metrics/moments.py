"""Sums of features in float64, which ranks add up, and the Frechet distance between two such sums.

Shapes: N features (N, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.runtime import comm


class Gaussian(NamedTuple):
    """Mean (D,) and covariance (D, D) of features, float64."""

    mean: Tensor
    covariance: Tensor


class Moments:
    """Number, sum and sum of outer products of features, float64 on the host.

    Attributes:
        num: Number of features, N.
        total: Sum of the features, (D,).
        products: Sum of their outer products, (D, D).
    """

    def __init__(self, width: int) -> None:
        self.num = 0
        self.total = torch.zeros(width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Count features (n, D) of any device and float type."""
        values = features.double()
        self.num += len(values)
        self.total += values.sum(0).cpu()
        self.products += (values.T @ values).cpu()

    def over_ranks(self) -> Moments:
        """Moments of all ranks' features. A collective."""
        width = len(self.total)
        packed = torch.cat([torch.tensor([float(self.num)], dtype=torch.float64), self.total, self.products.flatten()])
        num, total, products = comm.sum_over_ranks(packed.to(comm.device())).cpu().split([1, width, width**2])
        merged = Moments(width)
        merged.num, merged.total, merged.products = round(float(num)), total, products.view(width, width)
        return merged

    @property
    def mean(self) -> Tensor:
        """Mean of the features, (D,)."""
        return self.total / self.num

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance, (D, D)."""
        return (self.products - self.num * torch.outer(self.mean, self.mean)) / (self.num - 1)


def frechet_distance(a: Moments | Gaussian, b: Moments | Gaussian) -> float:
    """|mean difference|^2 + tr(A + B - 2 (A B)^(1/2)) of covariances A and B (Heusel et al. 2017, arXiv 1706.08500).

    It needs only symmetric decompositions: tr (A B)^(1/2) is the sum of the roots of the eigenvalues of
    A^(1/2) B A^(1/2). Both have at least two features, of the same width.
    """
    root = _square_root(a.covariance)
    inner = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    traces = a.covariance.trace() + b.covariance.trace()
    return float((a.mean - b.mean).square().sum() + traces - 2 * inner)


def _square_root(matrix: Tensor) -> Tensor:
    """Square root of a symmetric matrix without negative eigenvalues, except by rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
