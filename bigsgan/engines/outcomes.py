"""Outcomes of an engine's updates: applied, or skipped because of non-finite gradients.

The host knows of it where it decides. Where the device does (engines/deepspeed/device_skip.py), the
host learns of it when it asks.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Outcome: TypeAlias = "bool | Tensor"
"""Whether an update was applied: known to the host, or a bool tensor () that the device knows."""


class Outcomes:
    """The updates of one engine.

    Attributes:
        last: Whether the last one was applied.
        num_skipped_so_far: Of all, how many were not: known to the host, or a tensor () that the device knows.
    """

    def __init__(self) -> None:
        self.last: Outcome = False
        self.num_skipped_so_far: int | Tensor = 0
        self._num_updates = 0

    @property
    def applied(self) -> bool:
        """Whether the last update changed the parameters; waits for the device where that decided."""
        return bool(self.last)

    @property
    def num_applied(self) -> int:
        """Updates that did; may wait."""
        return self._num_updates - self.num_skipped

    @property
    def num_skipped(self) -> int:
        """Updates that did not; may wait."""
        return int(self.num_skipped_so_far)

    def add(self, applied: Outcome) -> None:
        """Take note of an update."""
        self.last = applied
        self._num_updates += 1
        self.num_skipped_so_far = self.num_skipped_so_far + (~applied if isinstance(applied, Tensor) else not applied)

    def follow(self, num_updates: int, num_skipped: float | Tensor, last: Outcome) -> None:
        """Take note of updates of other ranks: how many, how many of all were skipped, and how the last one ended."""
        self._num_updates += num_updates
        self.num_skipped_so_far = num_skipped if isinstance(num_skipped, Tensor) else int(num_skipped)
        self.last = last

    def restore(self, num_applied: int, num_skipped: int) -> None:
        """Go on after so many updates."""
        self._num_updates, self.num_skipped_so_far = num_applied + num_skipped, num_skipped


def chosen(outcome: Outcome, new: Tensor, old: Tensor) -> Tensor:
    """``new`` if the update was applied, and else ``old``, whose values may be anything then; waits for nothing."""
    if isinstance(outcome, Tensor):
        return torch.where(outcome, new, old)
    return new if outcome else old
