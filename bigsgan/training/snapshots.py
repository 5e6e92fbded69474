"""Snapshots of the power-function EMAs, which `--ema-width` needs in addition to the checkpoints.

    ema_snapshots/000000016384/          as a checkpoint, with the averages and the EMA's buffers alone

Checkpoints are removed in time; snapshots stay. Their sizes are 4 bytes, or 2, a parameter and width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigsgan import checkpoint
from bigsgan.checkpoint.tags import remove_newer
from bigsgan.config import Recipe
from bigsgan.config.sections import LARGEST_INT, Checkpoints
from bigsgan.runtime import comm
from bigsgan.training.power import AVERAGE, SNAPSHOTS
from bigsgan.training.schedules import is_due
from bigsgan.training.state import EMAState

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

_log = logging.getLogger(__name__)


class Snapshots:
    """Saves one snapshot after the other. Every rank has one, and calls the same methods."""

    def __init__(
        self, out: Path, recipe: Recipe, state: EMAState, layout: dict[str, Any], moved: Callable[[int], None]
    ) -> None:
        """Begin without a snapshot; ``out`` is the run directory, and ``moved`` is told of bytes that are written."""
        self._recipe, self._state, self._layout, self._directory = recipe, state, layout, out / SNAPSHOTS
        section = Checkpoints(keep=LARGEST_INT, background=recipe.checkpoints.background)
        self._saver = checkpoint.Saver(self._directory, comm, section, moved, "EMA snapshot")
        self._saved = True

    def is_due(self, nimg: int) -> bool:
        """Whether it is time, after the update to ``nimg`` images."""
        power = self._recipe.ema.power
        return power is not None and is_due(power.snapshot_nimg, nimg, self._recipe.batch)

    def save(self, nimg: int) -> None:
        """Start to save; a warning tells where that fails. A collective."""
        assert self._recipe.ema.power is not None
        entry = _Values(self._state, _DTYPES[self._recipe.ema.power.snapshot_precision])
        description = checkpoint.Description(self._recipe.model_dump(), self._layout, {})
        self._saver.lost = ""
        self._saved = self._saver.save(nimg, {AVERAGE: entry}, description)

    def finish(self) -> bool:
        """Wait until the snapshot under way, if any, is complete. A collective.

        Returns:
            False if the last one is not. Averages that are not finite do not count: a checkpoint of them fails too.
        """
        self._saved = self._saver.finish() and self._saved
        return self._saved or bool(self._saver.lost)

    def rewind(self, nimg: int) -> None:
        """Remove the snapshots of a future that is not to be. A collective."""
        self.finish()
        remove_abandoned(self._directory.parent, nimg)

    def close(self) -> None:
        """Wait for a snapshot in progress after an error: for a limited time, and without the other ranks."""
        self._saver.close()


def remove_abandoned(out: Path, nimg: int) -> None:
    """Remove a run's snapshots after ``nimg`` images, on rank 0: weights of a trajectory that it left."""
    if comm.rank() == 0:
        try:
            remove_newer(out / SNAPSHOTS, nimg)
        except OSError as error:
            _log.warning("snapshots after %d images, which the run left, were not removed: %s", nimg, error)


class _Values:
    """What a snapshot holds: the protocol ``SavedEntry``."""

    def __init__(self, state: EMAState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype

    def parts(self) -> list[checkpoint.StateShard]:
        """Return the averages by parameter, and the buffers."""
        return self._state.snapshot(self._dtype)

    def numbers(self) -> dict[str, float]:
        """Return when the averages began."""
        return self._state.numbers()
