"""Prints results as a table for a terminal, as Markdown, or as JSON. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigsgan.table import aligned, finite

NOTHING = "-"


@dataclass
class Table:
    """Rows of cells under their headings."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)  # lines below the table
    num_texts: int = 1  # number of columns with texts; the columns after them have numbers


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits; large ones are written out without an exponent. "-" for None."""
    if value is None:
        return NOTHING
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def mebibytes(num_bytes: float | None) -> str:
    """Bytes as MiB."""
    return NOTHING if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def as_json(found: Mapping[str, Any]) -> str:
    """All numbers as JSON, with null for infinity and nan, such as a loss that diverged, which JSON lacks."""
    return json.dumps(finite(found), indent=2, allow_nan=False)


def shown(table: Table, as_markdown: bool) -> str:
    """The table as Markdown, or for a terminal, in columns of equal width."""
    lines, notes = aligned([table.headings, *table.rows], table.num_texts), table.notes
    if as_markdown:
        rule = ["---"] * table.num_texts + ["---:"] * (len(table.headings) - table.num_texts)
        lines = [f"| {' | '.join(line)} |" for line in (table.headings, rule, *table.rows)]
        notes = [f"- {note}" for note in notes]
    return "\n".join([table.title, "", *lines, "", *notes]).rstrip()
