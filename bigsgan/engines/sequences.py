"""Micro-batches that are made when an engine asks for them, on the ranks that need them.

An engine may compute a phase at once or later, whole or in parts; what a phase reads is therefore given as a sequence
whose items are made on demand, and what it yields is a sequence whose items are there on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from torch import Tensor

MicroBatch = tuple[Tensor, ...]
"""Inputs of one forward pass on this rank: (latents, labels) of a generator, (images, labels) of a discriminator."""

T = TypeVar("T")


class OnDemand(Sequence[T]):
    """A sequence whose items are made by a function of their index, each time that they are asked for.

    Attributes:
        source: Another sequence that the function reads, if it does: these items cannot be had before that one's.
    """

    def __init__(self, num: int, make: Callable[[int], T], source: Sequence[Any] | None = None) -> None:
        self._num, self._make, self.source = num, make, source

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Make an item, or a list of them."""
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(self._num))]
        if not -self._num <= index < self._num:
            raise IndexError(index)
        return self._item(index % self._num)

    def _item(self, index: int) -> T:
        return self._make(index)


class Kept(OnDemand[T]):
    """The same, but an item that was made is kept."""

    def __init__(self, num: int, make: Callable[[int], T], source: Sequence[Any] | None = None) -> None:
        super().__init__(num, make, source)
        self._items: dict[int, T] = {}

    def _item(self, index: int) -> T:
        if index not in self._items:
            self._items[index] = self._make(index)
        return self._items[index]


class MicroBatches(OnDemand[MicroBatch]):
    """The inputs of a phase on this rank's replica.

    Attributes:
        num_samples: In each of them.
    """

    def __init__(
        self, num: int, num_samples: int, make: Callable[[int], MicroBatch], source: Any | None = None
    ) -> None:
        super().__init__(num, make, source)
        self.num_samples = num_samples

    @classmethod
    def given(cls, items: Sequence[MicroBatch]) -> MicroBatches:
        """Wrap micro-batches that are there already, all of one size."""
        return cls(len(items), len(items[0][0]), items.__getitem__)
