"""Divides layers into stages, and describes the tensors that travel between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.engines.base import MicroBatch
from bigsgan.models.network import LayerStack


def divide(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut a list of layers into stages, none empty, so that the costliest stage is as cheap as possible.

    Args:
        costs: Cost of each layer, not negative.
        num_stages: Number of stages, at most the number of layers.

    Returns:
        ``num_stages + 1`` bounds: stage s has the layers ``bounds[s]`` up to ``bounds[s + 1]``.
    """
    sums = list(itertools.accumulate(costs, initial=0.0))

    @cache
    def best(stages: int, num: int) -> tuple[float, list[int]]:
        """Divide the first ``num`` layers into ``stages``; return the cost of the costliest stage, and the bounds."""
        if stages == 1:
            return sums[num], [0, num]
        cost, cut = min((max(best(stages - 1, m)[0], sums[num] - sums[m]), m) for m in range(stages - 1, num))
        return cost, [*best(stages - 1, cut)[1], num]

    return best(num_stages, len(costs))[1]


class TensorSpec(NamedTuple):
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Make such a tensor, uninitialized."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Size of such a tensor."""
        return self.shape.numel() * self.dtype.itemsize


class Boundaries:
    """Shapes and types of the carry between stages, found by a pass without data over all layers."""

    def __init__(self, network: LayerStack, bounds: Sequence[int], inputs: Callable[[int], MicroBatch]) -> None:
        """Keep all layers, on the meta device in the types that the engine gives them, and ``bounds`` from ``divide``.

        ``inputs`` makes inputs for a number of samples, on the meta device too.
        """
        self._parts = [network.part(start, stop) for start, stop in itertools.pairwise(bounds)]
        self._inputs = inputs
        self._found = lru_cache(maxsize=32)(self._find)

    def at(self, stage: int, num_samples: int) -> list[TensorSpec]:
        """Return the carry that enters ``stage``, or the outputs if ``stage`` is the number of stages."""
        return self._found(num_samples)[stage]

    @torch.no_grad()
    def _find(self, num_samples: int) -> list[list[TensorSpec]]:
        carry = self._inputs(num_samples)
        found = [_specs(carry)]
        for part in self._parts:
            carry = part.fold(*carry)
            found.append(_specs(carry))
        return found


def _specs(carry: Sequence[Tensor]) -> list[TensorSpec]:
    return [TensorSpec(tensor.shape, tensor.dtype) for tensor in carry]
