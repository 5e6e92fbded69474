"""Parts of a state, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigsgan.engines.base import Piece


class Part:
    """A state entry that is told what it holds, and remembers what it was given."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        numbers: dict[str, float] | None = None,
        layout: dict[str, list[Piece]] | None = None,
    ) -> None:
        self._tensors, self._numbers, self._layout = tensors, numbers or {}, layout or {}
        self.loaded: tuple[dict[str, Tensor], dict[str, float]] = ({}, {})

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def numbers(self) -> dict[str, float]:
        return self._numbers

    def layout(self) -> dict[str, list[Any]]:
        return {**self._layout}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        self.loaded = dict(tensors), dict(numbers)
