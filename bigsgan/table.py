"""Results as text: columns of equal width for a terminal, and values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], num_texts: int = 1) -> list[str]:
    """Lines of a table.

    Args:
        rows: Of cells, as many in each.
        num_texts: Columns that hold texts, to the left; those behind them hold numbers, to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < num_texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity and no nan, as of a loss that diverged: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value
