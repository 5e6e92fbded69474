"""Outcomes of an engine's updates: applied, or skipped because of non-finite gradients.

Where the host decides, it knows the outcome. Where the device decides (engines/deepspeed/device_skip.py), the host
learns the outcome when it asks.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Outcome: TypeAlias = "bool | Tensor"
"""Whether an update was applied: a bool if the host knows, or a bool tensor () on the device."""


class Outcomes:
    """The updates of one engine.

    Attributes:
        last: Whether the last update was applied.
        num_skipped_so_far: Number of skipped updates: an int if the host knows, or a tensor () on the device.
    """

    def __init__(self) -> None:
        self.last: Outcome = False
        self.num_skipped_so_far: int | Tensor = 0
        self._num_updates = 0

    @property
    def num_applied(self) -> int:
        """Number of applied updates; may wait for the device."""
        return self._num_updates - self.num_skipped

    @property
    def num_skipped(self) -> int:
        """Number of skipped updates; may wait for the device."""
        return int(self.num_skipped_so_far)

    def add(self, applied: Outcome) -> None:
        """Count an update."""
        self.last = applied
        self._num_updates += 1
        self.num_skipped_so_far = self.num_skipped_so_far + (~applied if isinstance(applied, Tensor) else not applied)

    def follow(self, num_updates: int, num_skipped: float | Tensor, last: Outcome) -> None:
        """Count ``num_updates`` more updates of other ranks; ``num_skipped`` counts all skipped ones so far."""
        self._num_updates += num_updates
        self.num_skipped_so_far = num_skipped if isinstance(num_skipped, Tensor) else int(num_skipped)
        self.last = last

    def restore(self, num_applied: int, num_skipped: int) -> None:
        """Continue after this many updates."""
        self._num_updates, self.num_skipped_so_far = num_applied + num_skipped, num_skipped


def chosen(outcome: Outcome, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` if the update was applied, else ``old``; ``new`` may hold any values then. Never waits."""
    if isinstance(outcome, Tensor):
        return torch.where(outcome, new, old)
    return new if outcome else old
