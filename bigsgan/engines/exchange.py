"""Redistributes images between the ranks where G's outputs arise and those that read D's inputs, and gradients back.

Shapes: N samples of a micro-batch over all replicas, of which replica r of R holds the r-th N / R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigsgan.config import RunPlan
from bigsgan.config.placement import Placement
from bigsgan.runtime import comm


def build_exchange(plan: RunPlan) -> Exchange | None:
    """The exchange of a run; None where images arise on the very ranks that read them."""
    if not plan.images_travel:
        return None
    side = plan.recipe.data.side
    shape = (plan.recipe.judged_channels, side, side)
    return Exchange(plan.placement("generator"), plan.placement("discriminator"), plan.recipe.batch, shape)


class Exchange:
    """Images travel from rank to rank, each sample once for each rank that reads it. Every rank calls the methods."""

    def __init__(self, generator: Placement, discriminator: Placement, batch: int, shape: tuple[int, ...]) -> None:
        """Know who sends and who receives.

        Args:
            generator: Of G's stages and replicas.
            discriminator: Of D's.
            batch: Images in all micro-batches of all replicas.
            shape: Of all images of a sample.
        """
        self._makers, self._judges = generator.output_ranks(), discriminator.input_ranks()
        self._batch, self._shape = batch, shape

    def to_discriminator(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Redistribute images of all micro-batches of a phase: from G's slices of them to D's."""
        return [self._redistribute(item, self._makers, self._judges, self._batch // len(images)) for item in images]

    def to_generator(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Redistribute gradients at those images: from D's slices to G's.

        The loss is a mean over the samples of a replica, of which G's has another number than D's.
        """
        scale, num = len(self._makers) / len(self._judges), self._batch // len(grads)
        return [scale * self._redistribute(item, self._judges, self._makers, num) for item in grads]

    def _redistribute(self, held: Tensor, sources: list[int], targets: list[int], num_samples: int) -> Tensor:
        """Return what this rank, if it is one of ``targets``, needs of what ``sources`` hold by replica."""
        me = comm.rank()
        give, take = num_samples // len(sources), num_samples // len(targets)
        result = torch.empty(take if me in targets else 0, *self._shape, device=comm.device())
        sends, receives = [], []
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                first, last = max(i * give, j * take), min((i + 1) * give, (j + 1) * take)
                if first >= last:
                    continue
                if me == source:
                    part = held[first - i * give : last - i * give]
                    if me == target:
                        result[first - j * take : last - j * take] = part
                    else:
                        sends.append((part.contiguous(), target))
                elif me == target:
                    receives.append((result[first - j * take : last - j * take], source))
        comm.exchange(sends, receives)
        return result
