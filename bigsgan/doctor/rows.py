"""Reads a run's reports. No torch here."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigsgan.runtime.paths import parse_json

LATEST = 20
"""Number of latest reports that describe a run's present state."""

_OF_A_RANK = re.compile(r"memory/rank\d+_gib")


def reports(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl, without lines that are not rows."""
    rows = []
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(row := parse_json(line), dict) and isinstance(row.get("nimg"), int):
                    rows.append(row)
    return rows


def num_ranks(row: dict[str, Any]) -> int:
    """Ranks of the job that made a report; 0 if it does not tell.

    Reports once had no such number, but each rank's memory where there were at most 16.
    """
    if isinstance(ranks := row.get("ranks"), int):
        return ranks
    return sum(bool(_OF_A_RANK.fullmatch(name)) for name in row)
