"""Which layers make a stage, and what travels between stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.engines.base import MicroBatch
from bigsgan.models.network import LayerStack


def divide(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut a list of layers into stages whose costliest is as cheap as it can be, none of them empty.

    Args:
        costs: Of each layer, not negative.
        num_stages: At most as many as there are layers.

    Returns:
        ``num_stages + 1`` bounds: stage s has the layers ``bounds[s]`` up to ``bounds[s + 1]``.
    """
    num = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # worst[s][n]: the least possible cost of the costliest of s + 1 stages that hold the first n layers
    worst = [[float("inf")] + [sums[n] for n in range(1, num + 1)]]
    cut = [[0] * (num + 1)]
    for _ in range(1, num_stages):
        previous, row, cuts = worst[-1], [float("inf")] * (num + 1), [0] * (num + 1)
        for n in range(1, num + 1):
            for m in range(1, n):
                found = max(previous[m], sums[n] - sums[m])
                if found < row[n]:
                    row[n], cuts[n] = found, m
        worst.append(row)
        cut.append(cuts)
    bounds = [num]
    for stage in range(num_stages - 1, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return [0, *reversed(bounds)]


class TensorSpec(NamedTuple):
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Make such a tensor, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Size of such a tensor."""
        return self.shape.numel() * self.dtype.itemsize


class Boundaries:
    """What the carry is where one stage ends and the next begins, found by a pass without data over all layers."""

    def __init__(self, network: LayerStack, bounds: Sequence[int], inputs: Callable[[int], MicroBatch]) -> None:
        """Keep a network on the meta device.

        Args:
            network: All layers, on the meta device, in the types that the engine gives them.
            bounds: Of the stages; see ``divide``.
            inputs: Makes the inputs of a number of samples, on the meta device.
        """
        self._parts = [network.part(start, stop) for start, stop in itertools.pairwise(bounds)]
        self._inputs = inputs
        self._found = lru_cache(maxsize=32)(self._find)

    def at(self, stage: int, num_samples: int) -> list[TensorSpec]:
        """The carry that enters ``stage``; the outputs, where that is the number of stages."""
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
