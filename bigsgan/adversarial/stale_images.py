"""G's images on which D trains one update later, where updates overlap.

Shapes: n samples of one micro-batch on one replica of D, C channels, H x W pixels.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from bigsgan.checkpoint import SavedValues, StateShard
from bigsgan.config import RunPlan
from bigsgan.data import Slice
from bigsgan.monitor import NOTICE

_KIND = "images"

_log = logging.getLogger(__name__)


def build_stale_images(plan: RunPlan, rank: int, part: Slice, device: torch.device) -> StaleImages | None:
    """Build the buffer of G's images for D's next update, for a rank that computes ``part``; None without overlap."""
    recipe = plan.recipe
    if recipe.objective.schedule != "overlapped":
        return None
    reads = plan.placement("discriminator").stage(rank) == 0
    shape = (recipe.judged_channels, *recipe.data.network_size)
    return StaleImages(part, recipe.objective.d_steps, shape, device if reads else None)


class StaleImages:
    """G's images for D's steps of one update, on the ranks that read D's inputs. A named entry of a run's state.

    They are saved by D's step and the sample's index in the batch, so that a run in any layout can load its part.

    Attributes:
        update: Number of the update whose D trains on the images; None if there are none.
    """

    def __init__(self, part: Slice, d_steps: int, shape: tuple[int, int, int], device: torch.device | None) -> None:
        """Begin without images.

        Args:
            part: The samples that D computes on this rank where it trains.
            d_steps: Number of D's steps in an update.
            shape: (C, H, W), the shape of a sample.
            device: Device of the images; None on ranks that do not read D's inputs.
        """
        self._part, self._d_steps, self._shape, self._device = part, d_steps, shape, device
        self.update: int | None = None
        self._now: dict[tuple[int, int], Tensor] = {}
        self._next: dict[tuple[int, int], Tensor] = {}

    def keep(self, d_step: int, micro_batch: int, images: Tensor) -> None:
        """Keep a copy of images (n, C, H, W) for a step of the next update; a pass's outputs may not last as long."""
        self._next[d_step, micro_batch] = images.detach().clone(memory_format=torch.contiguous_format)

    def get(self, d_step: int, micro_batch: int) -> Tensor:
        """Return the images that were kept for a step of this update."""
        return self._now[d_step, micro_batch]

    def finish_update(self, update: int) -> None:
        """End update number ``update``, applied or skipped. All ranks call this."""
        self._now, self._next, self.update = self._next, {}, update + 1

    def parts(self) -> list[StateShard]:
        """Return this rank's images."""
        found = []
        for (d_step, micro_batch), images in self._now.items():
            found.append(StateShard(_KIND, str(d_step), self._offset(micro_batch), images.view(-1)))
        return found

    def numbers(self) -> dict[str, float]:
        """Return the number of their update, the batch and D's steps; empty if there are no images."""
        return {} if self.update is None else {"update": self.update, **self._counts()}

    def load(self, saved: SavedValues) -> None:
        """Restore this rank's images; begin without images if the batch or the number of D's steps has changed."""
        self._now, self._next, self.update = {}, {}, None
        if "update" not in saved.numbers:
            return
        if any(saved.numbers.get(name) != num for name, num in self._counts().items()):
            _log.log(NOTICE, "The images kept for D are of another batch or another number of its steps: made anew")
            return
        self.update = int(saved.numbers["update"])
        if self._device is None:
            return
        for d_step in range(self._d_steps):
            for micro_batch in range(self._part.accumulation):
                images = torch.empty(self._part.num_samples, *self._shape, device=self._device)
                saved.read(_KIND, str(d_step), self._offset(micro_batch), images.view(-1))
                self._now[d_step, micro_batch] = images

    def _counts(self) -> dict[str, float]:
        return {"batch": self._part.batch, "d_steps": self._d_steps}

    def _offset(self, micro_batch: int) -> int:
        channels, height, width = self._shape
        return self._part.positions(micro_batch).start * channels * height * width
