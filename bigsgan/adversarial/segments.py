"""The segments of D's micro-batch, and the part of it that penalties use.

Shapes: n real and n fake images, and n / k in each segment that penalties add, N in all, with k the ``batch_shrink`` of
the penalties. They use the images at positions 0, k, 2 k, ... of a segment of n, which begins at a multiple of k in the
batch, and so those at multiples of k of the whole batch, however ranks and micro-batches divide it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.config.objective import num_images


class Division(NamedTuple):
    """How D's micro-batch is divided."""

    num: int  # segments: real, fake and those that penalties add
    num_differentiated: int  # of these, the first, in which penalties need the gradient at images
    shrink: int  # k

    def segments(self, whole: Tensor) -> list[Tensor]:
        """(N, ...) -> the segments, (n, ...) or (n / k, ...)."""
        num = len(whole) * self.shrink // num_images(self.num, self.shrink, self.shrink)
        return [*whole.split([num] * 2 + [num // self.shrink] * (self.num - 2))]

    def split(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """(N, ...) -> what belongs to the images that penalties differentiate at, and the others."""
        first, rest = list[Tensor](), list[Tensor]()
        for number, segment in enumerate(self.segments(whole)):
            if number >= self.num_differentiated:
                rest.append(segment)
            elif self._is_used_whole(number):
                first.append(segment)
            else:
                grid = segment.unflatten(0, (-1, self.shrink))
                first.append(grid[:, 0])
                rest.append(grid[:, 1:].flatten(0, 1))
        return torch.cat(first), torch.cat(rest)

    def join(self, first: Tensor, rest: Tensor | None = None) -> Tensor:
        """Invert ``split``; without ``rest``, with zeros in its place."""
        size = len(first) // self.num_differentiated  # n / k
        if rest is None:
            num = num_images(self.num, size * self.shrink, self.shrink) - len(first)
            rest = first.new_zeros(num, *first.shape[1:])
        found, start, num = list[Tensor](), 0, size * self.shrink
        for number in range(self.num):
            own = first[number * size : (number + 1) * size]
            beside = (num if number < 2 else size) - len(own)
            others = rest[start : start + beside]
            start += beside
            if len(own) and beside:
                own = torch.cat([own[:, None], others.unflatten(0, (-1, self.shrink - 1))], dim=1).flatten(0, 1)
            found.append(own if len(own) else others)
        return torch.cat(found)

    def _is_used_whole(self, number: int) -> bool:
        return self.shrink == 1 or number >= 2
