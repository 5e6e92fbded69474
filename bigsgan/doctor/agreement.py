"""Whether an engine's updates are the reference's, each of them begun where the engine began it.

So rounding cannot add up, and every update has to agree. What could still differ is a matter of kinks: where an
activation lies within rounding of one, it falls on the other side in another order of summation, and one sample's
gradient jumps. The networks here have none (``smooth.py``) but for distances from images and features. Where an
update differs, the reference makes it again from states that differ by rounding. Only if it jumps to the engine's
result then is that a kink, and counted; whatever the reference does not reach by itself is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from math import hypot
from typing import Any

import torch

from bigsgan.config import Recipe
from bigsgan.doctor.reference import Reference, distance, worst
from bigsgan.doctor.runs import DifferError

SAME = 1e-5
"""Largest distance of a buffer that an update leaves, as ``reference.distance`` measures it."""

SAME_MOVE = 1e-4
"""Largest error of what an update adds to a parameter, as a share of it."""

FAINT = 0.3
"""Of the root mean square move of a network's elements: a tensor that moves less is measured as if it moved so far.

Some have a gradient that is nothing but rounding, such as a bias before a batch norm.
"""

STORED = 1.2e-7
"""Of a parameter: what two roundings to float32 may differ by."""

ROUNDING = [1e-7] * 8 + [3e-7] * 8 + [1e-6] * 16
"""Shares by which the state is changed, one for each time that an update is made again."""


def differences(
    states: Sequence[Any], recipe: Recipe, device: torch.device | None = None, changes: Sequence[float] = ROUNDING
) -> Iterator[list[tuple[float, str]]]:
    """For each update ``difference``, and again from changed states until it is no more than allowed.

    Args:
        states: Whole, before the first and after each update.
        recipe: Of the run.
        device: Of the reference.
        changes: Of the state, by which an update is made again that differs.

    Raises:
        DifferError: The run and the reference begin with different states.
    """
    plain = Reference(recipe, device)
    generator = torch.Generator().manual_seed(0)
    with closing(plain.reals):
        far, where = worst(states[0], on_cpu(plain.result()))
        if far > SAME:
            raise DifferError(f"begins {far:.1e} away in {where}")
        for update, (before, after) in enumerate(pairwise(states)):
            memory, shares = plain.memory(), []
            for change in (0, *changes):
                start = _changed(before, change, generator)
                plain.go_back(start, memory)
                shares.append(difference(plain.update(update), start, before, after))
                if shares[-1][0] <= 1:
                    break
            yield shares


def on_cpu(state: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The same on the CPU."""
    return {entry: {name: value.cpu() for name, value in tensors.items()} for entry, tensors in state.items()}


def _changed(state: Any, change: float, generator: torch.Generator) -> Any:
    """A state whose numbers are changed by about this share of each; itself for 0."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + change * torch.randn(value.shape, generator=generator))

    if not change:
        return state
    return {entry: {name: changed(value) for name, value in tensors.items()} for entry, tensors in state.items()}


def difference(plain: Reference, start: Any, before: Any, after: Any) -> tuple[float, str]:
    """Largest share of what is allowed, over 1 if the engine's update differs from the reference's; and where.

    Args:
        plain: The reference after its update.
        start: State from which the reference made it.
        before: State from which the engine made it.
        after: State to which that led.
    """
    result = on_cpu(plain.result())
    assert after.keys() == result.keys()
    shares = []
    for entry, tensors in result.items():
        assert after[entry].keys() == tensors.keys(), entry
        names = dict((plain.d if entry == "discriminator" else plain.g).named_parameters())
        moves = {name: (tensors[name].flatten() - start[entry][name].flatten()).double() for name in names}
        lengths = {name: float(move.norm()) for name, move in moves.items()}
        faint = FAINT * hypot(*lengths.values()) / sum(move.numel() for move in moves.values()) ** 0.5 + 1e-30
        for name, tensor in tensors.items():
            found = after[entry][name].double().flatten()
            if name in moves:
                expected = before[entry][name].double().flatten() + moves[name]
                error = float((found - expected).norm()) - STORED * float(expected.norm())
                allowed = SAME_MOVE * max(lengths[name], faint * tensor.numel() ** 0.5)
                shares.append((error / allowed, f"{entry}.{name}"))
            else:
                shares.append((distance(found, tensor) / SAME, f"{entry}.{name}"))
    return max(shares)
