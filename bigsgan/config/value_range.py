"""The values of black and white that a recipe gives: which ones are valid."""

from __future__ import annotations

from collections.abc import Sequence

from bigsgan.errors import UserError

_LEAST_VALUES = 256
_PRECISION = 2**23  # float32 has so many numbers from a power of two to the next


def check_range(values: Sequence[float]) -> None:
    """Check the values of black and white.

    Raises:
        UserError: The second is not higher, or float32, in which images are read, has too few numbers between them.
    """
    low, high = values
    if not low < high:
        remedy = "give the values of black and of white"
        raise UserError("data.range", list(values), "must be two numbers, the lower one first", remedy)
    if (high - low) * _PRECISION < _LEAST_VALUES * max(abs(low), abs(high)):
        problem = f"must hold at least {_LEAST_VALUES} numbers of float32, in which images are read"
        raise UserError("data.range", list(values), problem, "subtract an offset from the images")
