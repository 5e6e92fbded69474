"""The way of images from the ranks where G's outputs arise to those that read D's inputs, and of gradients back.

Shapes: N samples of a micro-batch over all replicas, of which replica r of R holds the r-th N / R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigsgan import comm
from bigsgan.config import RunPlan
from bigsgan.placement import Placement


def build_hand_over(plan: RunPlan, shape: tuple[int, ...]) -> SameRanks | Exchange:
    """Choose a way: none where images arise on the very ranks that read them.

    Args:
        plan: The run's.
        shape: Of an image.
    """
    if not plan.images_travel:
        return SameRanks()
    return Exchange(plan.placement("generator"), plan.placement("discriminator"), shape)


class SameRanks:
    """Images are where they are read."""

    def to_discriminator(self, images: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Return the images as they are, without looking at them."""
        return images

    def to_generator(self, grads: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Return the gradients as they are, without looking at them."""
        return grads


class Exchange:
    """Images travel from rank to rank, each sample once for each rank that reads it."""

    def __init__(self, generator: Placement, discriminator: Placement, shape: tuple[int, ...]) -> None:
        self._images, self._judges, self._shape = generator.output_ranks(), discriminator.input_ranks(), shape

    def to_discriminator(self, images: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Redistribute all micro-batches, now. Every rank calls this."""
        return [self._redistribute(item, self._images, self._judges, num_samples) for item in images]

    def to_generator(self, grads: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Redistribute all micro-batches, now. Every rank calls this.

        The loss is a mean over the samples of a replica, of which G's has another number than D's.
        """
        scale = len(self._images) / len(self._judges)
        return [scale * self._redistribute(item, self._judges, self._images, num_samples) for item in grads]

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
