"""Metrics of all pairs of features: kernel inception distance, precision and recall, density and coverage.

Each rank holds some rows. Ranks broadcast their rows in chunks, so that no rank ever holds all of them, and every rank
compares each chunk with its own rows. Shapes: a rank's rows (n, D) of N over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.runtime import comm

CHUNK = 2048
"""Rows compared at a time."""

NEIGHBOURS_PR, NEIGHBOURS_DC = 3, 5
"""A feature's radius is the distance of this neighbour, as published for each pair of metrics."""


Tell = Callable[[str], None]


class Shared(NamedTuple):
    """Features distributed over ranks."""

    rows: Tensor  # this rank's rows, (n, D), float32 on the host
    sizes: list[int]  # number of rows of each rank
    tell: Tell  # called with texts about progress

    @property
    def num(self) -> int:
        """Number of rows over all ranks, N."""
        return sum(self.sizes)

    def own_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's rows in chunks, float64 on the device, with their slices."""
        for first in range(0, len(self.rows), CHUNK):
            where = slice(first, first + CHUNK)
            yield where, self.rows[where].to(comm.device()).double()

    def going_round(self, column: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all ranks' rows in chunks, float64 on the device, the same on all ranks. A collective.

        A ``column`` (n,) float64 of numbers for this rank's rows is sent along, as (chunk,).
        """
        width = self.rows.shape[1]
        for source, size in enumerate(self.sizes):
            for first in range(0, size, CHUNK):
                chunk = torch.zeros(min(CHUNK, size - first), width + 1, dtype=torch.float64, device=comm.device())
                if source == comm.rank():
                    where = slice(first, first + CHUNK)
                    chunk[:, :width] = self.rows[where]
                    if column is not None:
                        chunk[:, width] = column[where]
                self.tell(f"pairs of images, from {first} of rank {source} on")
                comm.broadcast([chunk], source)
                yield chunk[:, :width], chunk[:, width]


def share(rows: Tensor, tell: Tell = lambda _: None) -> Shared:
    """Exchange how many rows (n, D) each rank has. A collective."""
    sizes = torch.zeros(comm.world_size(), dtype=torch.float64, device=comm.device())
    sizes[comm.rank()] = len(rows)
    return Shared(rows.float().cpu(), comm.sum_over_ranks(sizes).long().tolist(), tell)


def kernel_distance(real: Shared, fake: Shared) -> float:
    """Unbiased squared maximum mean discrepancy under the kernel (x.y / D + 1)^3, over all pairs. A collective.

    Binkowski et al. 2018, arXiv 1801.01401, section 4. Published values are means over random subsets of 1,000 images;
    this has the same expectation, less variance, and no draw. Each side has at least two features.
    """
    between = _kernel_sum(real, fake) / (real.num * fake.num)
    return _within(real) + _within(fake) - 2 * between


def _within(x: Shared) -> float:
    """Mean of the kernel over pairs of different rows."""
    width = x.rows.shape[1]
    own = sum(float((rows.square().sum(1) / width + 1).pow(3).sum()) for _, rows in x.own_chunks())
    return (_kernel_sum(x, x) - comm.total(own)) / (x.num * (x.num - 1))


def _kernel_sum(a: Shared, b: Shared) -> float:
    width, found = a.rows.shape[1], 0.0
    for others, _ in b.going_round():
        for _, rows in a.own_chunks():
            found += float((rows @ others.T / width + 1).pow(3).sum())
    return comm.total(found)


class Manifold(NamedTuple):
    """How two sets of images cover each other; density is 0 or more, the others are shares, 0 to 1."""

    precision: float
    recall: float
    density: float
    coverage: float


def manifold_metrics(real: Shared, fake: Shared) -> Manifold:
    """Precision and recall, density and coverage of nearest-neighbour manifolds. A collective.

    Kynkaanniemi et al. 2019 (arXiv 1904.06991), equations 1, 2; Naeem et al. 2020 (arXiv 2002.09797), equations 3, 4.
    Each side has more than ``NEIGHBOURS_DC`` features.
    """
    real_radii, wide_radii = _radii(real)
    fake_radii, _ = _radii(fake)
    density, coverage = _density_and_coverage(real, wide_radii, fake)
    return Manifold(_share_inside(fake, real, real_radii), _share_inside(real, fake, fake_radii), density, coverage)


def _radii(x: Shared) -> tuple[Tensor, Tensor]:
    """Squared distances of this rank's rows to their third and fifth neighbours, (n,) each, on the host."""
    nearest = torch.full((len(x.rows), NEIGHBOURS_DC + 1), torch.inf, dtype=torch.float64)  # also to itself
    for others, _ in x.going_round():
        for where, rows in x.own_chunks():
            found = _squared_distances(rows, others)
            found = found.topk(min(NEIGHBOURS_DC + 1, len(others)), largest=False).values.cpu()
            nearest[where] = torch.cat([nearest[where], found], dim=1).topk(NEIGHBOURS_DC + 1, largest=False).values
    return nearest[:, NEIGHBOURS_PR], nearest[:, NEIGHBOURS_DC]


def _share_inside(x: Shared, y: Shared, radii: Tensor) -> float:
    """Share of x that lies within the radius of some row of y."""
    inside = torch.zeros(len(x.rows), dtype=torch.bool)
    for others, reach in y.going_round(radii):
        for where, rows in x.own_chunks():
            inside[where] |= (_squared_distances(rows, others) <= reach).any(1).cpu()
    return comm.total(float(inside.sum())) / x.num


def _density_and_coverage(real: Shared, radii: Tensor, fake: Shared) -> tuple[float, float]:
    num_inside, covered = 0.0, torch.zeros(len(real.rows), dtype=torch.bool)
    for others, _ in fake.going_round():
        for where, rows in real.own_chunks():
            inside = _squared_distances(rows, others) <= radii[where, None].to(comm.device())
            num_inside += float(inside.sum())
            covered[where] |= inside.any(1).cpu()
    density = comm.total(num_inside) / (NEIGHBOURS_DC * fake.num)
    return density, comm.total(float(covered.sum())) / real.num


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances between rows: (n, D), (m, D) -> (n, m)."""
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp(min=0)
