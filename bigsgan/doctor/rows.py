"""Reads a run's reports. No torch here."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def reports(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl; what is no row is left out."""
    rows = []
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(row := json.loads(line), dict) and isinstance(row.get("nimg"), int):
                    rows.append(row)
    return rows
