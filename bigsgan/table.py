"""Results as text: columns of equal width for a terminal, spans of time, and values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], num_texts: int = 1) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: Rows of cells, equally many in each row.
        num_texts: Number of first columns, which hold texts, aligned to the left; the others hold numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < num_texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def span(seconds: float, form: str = ".0f") -> str:
    """Return a time in the largest unit of which there are two, its number in a form."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:{form}} {unit}"
    return f"{seconds:{form}} s"


def finite(value: Any) -> Any:
    """Return a value for JSON, with None for infinity and nan, which JSON lacks and a diverged loss may have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value
