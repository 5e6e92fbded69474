"""Forward and backward passes over several layers, joined from the traces of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bigsgan.planner.census import Stretch, join
from bigsgan.planner.layers import LayerTape


class WholePass(NamedTuple):
    """A forward and a backward pass through a whole network."""

    forward: Stretch  # up to the loss
    kept: int  # bytes held between the two
    backward: Stretch  # from the loss


class Passes:
    """The passes of a network, or of one of its pipeline stages, on one micro-batch.

    Inputs of the first layer, and after the forward pass outputs of the last, do not count: the caller holds them.

    Attributes:
        plain: The forward pass without a graph.
        forward: The forward pass with a graph.
        kept: Bytes that the graph keeps for the backward pass.
        backward: The backward pass from the gradients of the last layer's outputs.
        returned: Bytes of the last layer's outputs.
        gradients: Bytes of their gradients.
    """

    def __init__(self, tapes: Sequence[LayerTape], checkpointing: bool, together: int = 0) -> None:
        """Join neighbouring layers.

        Args:
            tapes: The layers.
            checkpointing: Whether each is recomputed in the backward pass.
            together: Bytes of an element of a gradient, if a recomputed layer with parameters is one node, which hands
                its gradients over at the end of its backward pass; 0 if it is none.
        """
        self._tapes, self._checkpointing, self._together = tapes, checkpointing, together
        self._carries, self._sizes = _number_tensors(tapes)
        self._own = [0 if checkpointing else tape.kept for tape in tapes]
        self._ins, self._outs = self._find_kept()
        forward = [tape.plain if checkpointing else tape.forward for tape in tapes]
        self.plain = join([tape.plain.above(self._size(self._carries[i])) for i, tape in enumerate(tapes)])
        self.forward = join([step.above(self._kept_by(i, i, self._carries[i])) for i, step in enumerate(forward)])
        self.kept = self._kept_by(len(tapes), len(tapes))
        self.backward = self._join_backward()
        self.returned = sum(entry.sent for entry in tapes[-1].outs)
        self.gradients = sum(entry.gradient for entry in tapes[-1].outs)

    def _find_kept(self) -> tuple[list[set[int]], list[set[int]]]:
        """Numbers of the inputs, and of the outputs, that each layer's graph keeps."""
        ins, outs = [], []
        for i, tape in enumerate(self._tapes):
            came_in, returned = self._carries[i], self._carries[i + 1]
            ends: Sequence[int | None] = tape.keeps_in
            if self._checkpointing:  # a layer is not recomputed if its graph needs nothing
                ends = [0 if tape.saves or self._is_node(tape) else None] * len(came_in)
            ins.append({number for number, end in zip(came_in, ends, strict=True) if end is not None})
            kept_outs = {number for number, e in zip(returned, tape.outs, strict=True) if e.kept and e.alias is None}
            outs.append(set() if self._checkpointing else kept_outs)
        outs[-1] = set()  # the caller holds them
        return ins, outs

    def _kept_by(self, num_outs: int, num_ins: int, besides: Iterable[int] = ()) -> int:
        """Bytes that graphs keep: outputs of the first ``num_outs`` layers, and inputs of the first ``num_ins``."""
        numbers = set(besides).union(*self._ins[:num_ins], *self._outs[:num_outs])
        return sum(self._own[:num_outs]) + self._size(numbers)

    def _size(self, numbers: Iterable[int]) -> int:
        return sum(self._sizes[number] for number in set(numbers))

    def _join_backward(self) -> Stretch:
        steps, arrived = [], 0
        for i in reversed(range(len(self._tapes))):
            tape, held = self._tapes[i], self._kept_by(i, i + 1)
            again, backward = tape.recomputed, tape.backward
            if self._is_node(tape):
                again, backward = tape.forward, backward.of_a_node(self._together, tape.given)
            if self._checkpointing:
                gradients = sum(entry.gradient for entry in tape.outs)
                steps.append(again.above(held + gradients, arrived))
            elif i == len(self._tapes) - 1:
                held -= sum(entry.size for entry in tape.outs if entry.kept and entry.alias is None)
            steps.append(self._without_released(i, backward.above(held, arrived)))
            arrived += int(tape.backward.arrived[-1])
        return join(steps)

    def _is_node(self, tape: LayerTape) -> bool:
        return self._checkpointing and self._together > 0 and tape.has_parameters

    def _without_released(self, layer: int, backward: Stretch) -> Stretch:
        """Subtract each input from the moment on at which no graph keeps it."""
        earlier = set().union(*self._ins[:layer], *self._outs[:layer])
        for number, end in zip(self._carries[layer], self._tapes[layer].keeps_in, strict=True):
            if end is not None and number not in earlier and not self._checkpointing:
                backward.live[end:] -= self._sizes[number]
        return backward


def _number_tensors(tapes: Sequence[LayerTape]) -> tuple[list[list[int]], dict[int, int]]:
    """Number the tensors between layers, which may pass through several, and list sizes, 0 for the first inputs."""
    numbers = itertools.count()
    carries = [[next(numbers) for _ in tapes[0].keeps_in]]
    sizes = dict.fromkeys(carries[0], 0)
    for tape in tapes:
        carry = []
        for entry in tape.outs:
            number = next(numbers) if entry.alias is None else carries[-1][entry.alias]
            sizes.setdefault(number, entry.size)
            carry.append(number)
        carries.append(carry)
    return carries, sizes
