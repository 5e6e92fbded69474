"""Images of earlier updates, some of which D sees in place of new ones (Shrivastava et al. 2017, arXiv 1612.07828).

As in CycleGAN (Zhu et al. 2017, arXiv 1703.10593, section 4), but each sample of a batch has a pool of its own, so that
no layout changes what D sees.

Shapes: n samples of one micro-batch on one replica of D, C channels, H x W pixels.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.checkpoint import SavedValues, StateShard
from bigsgan.config import RunPlan
from bigsgan.data import Slice
from bigsgan.monitor import NOTICE

_KIND = "images"

_log = logging.getLogger(__name__)


def build_image_pool(
    plan: RunPlan, rank: int, part: Slice, draws: SampleDraws, device: torch.device
) -> ImagePool | None:
    """Build the pool of a rank that computes ``part``; None if the recipe has none."""
    recipe = plan.recipe
    if not recipe.objective.pool:
        return None
    reads = plan.placement("discriminator").stage(rank) == 0
    shape = (recipe.judged_channels, *recipe.data.network_size)
    return ImagePool(recipe.objective.pool, part, shape, draws, device if reads else None)


class ImagePool:
    """For each sample of a batch, the images of some of D's earlier steps. A named entry of a run's state.

    A pool takes the images of the first steps. After that, D sees the new image half the time, and otherwise one of the
    pool, whose place the new one takes. Images are saved by the sample's index in the batch, so that a run in any
    layout can load its part.
    """

    def __init__(
        self, size: int, part: Slice, shape: tuple[int, int, int], draws: SampleDraws, device: torch.device | None
    ) -> None:
        """Begin with empty pools.

        Args:
            size: Number of images in each pool.
            part: The samples that D computes on this rank where it trains.
            shape: (C, H, W), the shape of a sample.
            draws: Draws which image is shown.
            device: Device of the images; None on ranks that do not read D's inputs.
        """
        self._size, self._part, self._shape, self._draws = size, part, shape, draws
        self._num_filled = 0  # images in each pool at the beginning of an update
        self._shown: dict[tuple[int, int], Tensor] = {}  # in this update, by D's step and micro-batch
        pool_shape = (size, part.num_samples, *shape)
        num = 0 if device is None else part.accumulation
        self._pools = [torch.zeros(pool_shape, device=device) for _ in range(num)]

    def shown(self, counters: tuple[int, int], micro_batch: int, images: Tensor) -> Tensor:
        """Return what D sees in place of new images (n, C, H, W); all phases of one of its steps get the same.

        ``counters`` are the number of the update, and that of D's step in it.
        """
        _, d_step = counters
        if (d_step, micro_batch) not in self._shown:
            pool, slot, shown = self._pools[micro_batch], self._num_filled + d_step, images
            if slot < self._size:
                pool[slot] = images.nan_to_num(0, 0, 0)  # fp16 may skip the update, but keeps the pool
            else:
                shown = self._exchanged(counters, pool, images, self._part.positions(micro_batch))
            self._shown[d_step, micro_batch] = shown
        return self._shown[d_step, micro_batch]

    def finish_update(self, d_steps: int) -> None:
        """End an update with so many steps of D, applied or skipped. All ranks call this."""
        self._num_filled, self._shown = min(self._num_filled + d_steps, self._size), {}

    def _exchanged(self, counters: tuple[int, int], pool: Tensor, images: Tensor, samples: range) -> Tensor:
        drawn = self._draws.uniform("pool", counters, samples, (2,))  # in (0, 1]
        takes = ((drawn[:, 0] > 0.5) & images.isfinite().flatten(1).all(dim=1)).view(-1, 1, 1, 1)
        slots = (drawn[:, 1] * self._size).ceil().long().clamp(1, self._size) - 1
        rows = torch.arange(len(images), device=images.device)
        old = pool[slots, rows]
        pool[slots, rows] = torch.where(takes, images, old)
        return torch.where(takes, old, images)

    def parts(self) -> list[StateShard]:
        """Return this rank's images."""
        return [
            StateShard(_KIND, str(slot), self._offset(micro_batch), pool[slot].view(-1))
            for micro_batch, pool in enumerate(self._pools)
            for slot in range(self._num_filled)
        ]

    def numbers(self) -> dict[str, float]:
        """Return how many images each pool has, and the batch."""
        return {"filled": self._num_filled, "batch": self._part.batch}

    def load(self, saved: SavedValues) -> None:
        """Restore this rank's images; begin with empty pools if the batch has changed, or there were none."""
        self._num_filled, self._shown = 0, {}
        if "filled" not in saved.numbers:
            return
        if saved.numbers["batch"] != self._part.batch:
            _log.log(NOTICE, "The pools of images for D are of another batch: they begin empty")
            return
        self._num_filled = min(int(saved.numbers["filled"]), self._size)
        for micro_batch, pool in enumerate(self._pools):
            for slot in range(self._num_filled):
                saved.read(_KIND, str(slot), self._offset(micro_batch), pool[slot].view(-1))

    def _offset(self, micro_batch: int) -> int:
        channels, height, width = self._shape
        return self._part.positions(micro_batch).start * channels * height * width
