"""Snapshots of the power-function EMAs, which `--ema-width` needs in addition to the checkpoints.

    ema_snapshots/000000016384/          a checkpoint with only the averages and the EMA's buffers

Old checkpoints are removed; snapshots stay. A snapshot takes 4 or 2 bytes for each parameter and width.
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
    """Saves snapshots. Every rank has one of these, and calls the same methods."""

    def __init__(
        self, out: Path, recipe: Recipe, state: EMAState, layout: dict[str, Any], moved: Callable[[int], None]
    ) -> None:
        """Begin without a snapshot. ``out`` is the run directory; ``moved`` is called with the bytes written."""
        self._recipe, self._state, self._layout, self._directory = recipe, state, layout, out / SNAPSHOTS
        section = Checkpoints(keep=LARGEST_INT, background=recipe.checkpoints.background)
        self._saver = checkpoint.Saver(self._directory, comm, section, moved, "EMA snapshot")
        self._saved = True

    def is_due(self, nimg: int) -> bool:
        """Return whether to save after the update that ended at ``nimg`` images."""
        power = self._recipe.ema.power
        return power is not None and is_due(power.snapshot_nimg, nimg, self._recipe.batch)

    def save(self, nimg: int) -> None:
        """Start to save a snapshot. A failure is logged as a warning. A collective."""
        assert self._recipe.ema.power is not None
        entry = _Values(self._state, _DTYPES[self._recipe.ema.power.snapshot_precision])
        description = checkpoint.Description(self._recipe.model_dump(), self._layout, {})
        self._saver.lost = ""
        self._saved = self._saver.save(nimg, {AVERAGE: entry}, description)

    def finish(self) -> bool:
        """Wait until the snapshot under way, if any, is complete. A collective.

        Returns:
            Whether the last one is complete; also True if its averages are not finite, as a checkpoint fails then too.
        """
        self._saved = self._saver.finish() and self._saved
        return self._saved or bool(self._saver.lost)

    def rewind(self, nimg: int) -> None:
        """Remove the snapshots after ``nimg`` images, to which the run has rolled back. A collective."""
        self.finish()
        remove_abandoned(self._directory.parent, nimg)

    def close(self) -> None:
        """Wait for a snapshot in progress after an error: for a limited time, and without the other ranks."""
        self._saver.close()


def remove_abandoned(out: Path, nimg: int) -> None:
    """Remove a run's snapshots after ``nimg`` images, on rank 0: the run has left the trajectory of their weights."""
    if comm.rank() == 0:
        try:
            remove_newer(out / SNAPSHOTS, nimg)
        except OSError as error:
            _log.warning("snapshots after %d images, which the run left, were not removed: %s", nimg, error)


class _Values:
    """The contents of a snapshot. Implements the protocol ``SavedEntry``."""

    def __init__(self, state: EMAState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype

    def parts(self) -> list[checkpoint.StateShard]:
        """Return the averages by parameter, and the buffers."""
        return self._state.snapshot(self._dtype)

    def numbers(self) -> dict[str, float]:
        """Return when the averages began."""
        return self._state.numbers()
