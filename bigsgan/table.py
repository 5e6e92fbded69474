"""Cells in columns of equal width, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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
