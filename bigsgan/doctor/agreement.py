"""Compares an engine's updates with the reference's. Each update of the reference begins from the engine's state.

So rounding does not accumulate, and every update has to agree. Only kinks can still make a difference: where an
activation lies within rounding of one, it falls on the other side in another order of summation, and one sample's
gradient jumps. The networks here have no kinks (``smooth_activations.py``), except in distances from images and
features. If an update differs, the reference repeats it from states that differ by rounding. If a repetition reaches
the engine's result, the difference is a kink and is counted; if none does, it is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from math import hypot
from typing import Any

import torch

from bigsgan.config import Recipe
from bigsgan.doctor.reference import Reference
from bigsgan.doctor.runs import DifferError
from bigsgan.doctor.without_discriminator import WithoutDiscriminator

SAME = 1e-5
"""Largest allowed distance of a buffer after an update, as ``distance`` measures it."""

SAME_MOVE = 1e-4
"""Largest allowed error of a parameter's change in an update, as a share of that change."""

FAINT = 0.3
"""Share of the root mean square change of a network's elements. A tensor that changes less is measured as if it
changed by this much, because some gradients are only rounding, such as that of a bias before a batch norm.
"""

STORED = 1.2e-7
"""Relative difference that two roundings of a parameter to float32 may make."""

ROUNDING = [1e-7] * 8 + [3e-7] * 8 + [1e-6] * 16
"""Relative changes of the state, one for each repetition of an update."""


def differences(
    states: Sequence[Any], recipe: Recipe, device: torch.device | None = None, changes: Sequence[float] = ROUNDING
) -> Iterator[list[tuple[float, str]]]:
    """For each update, yield ``difference``, and those of its repetitions until one is within what is allowed.

    Args:
        states: Whole states, before the first and after each update.
        recipe: Recipe of the run.
        device: Device of the reference.
        changes: Relative changes of the state, one for each repetition of an update that differs.

    Raises:
        DifferError: The run and the reference begin with different states.
    """
    plain = (Reference if recipe.has_discriminator else WithoutDiscriminator)(recipe, device)
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
    """Return a state with its tensors on the CPU."""
    return {entry: {name: value.cpu() for name, value in tensors.items()} for entry, tensors in state.items()}


def _changed(state: Any, change: float, generator: torch.Generator) -> Any:
    """Return a state with each number changed by about this share of it, or the state itself for 0."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + change * torch.randn(value.shape, generator=generator))

    if not change:
        return state
    return {entry: {name: changed(value) for name, value in tensors.items()} for entry, tensors in state.items()}


def difference(plain: Reference, start: Any, before: Any, after: Any) -> tuple[float, str]:
    """Largest difference of two updates, relative to what is allowed, so over 1 if they differ; and its place.

    Args:
        plain: The reference after its update.
        start: State from which the reference made its update.
        before: State from which the engine made its update.
        after: State after the engine's update.
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


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of two tensors of n elements: |a - b| / max(|b|, 1e-3 sqrt(n))."""
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).norm() / max(float(b.norm()), 1e-3 * b.numel() ** 0.5))


def worst(result: Any, expected: Any) -> tuple[float, str]:
    """Largest distance over all tensors, and its place; the names must be the same."""
    assert result.keys() == expected.keys()
    found = []
    for entry, tensors in expected.items():
        assert result[entry].keys() == tensors.keys(), entry
        found += [(distance(result[entry][name], value), f"{entry}.{name}") for name, value in tensors.items()]
    return max(found)
