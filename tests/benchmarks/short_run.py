"""The recipe of a few updates, for comparisons with the steps of public trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def short_run(directory: Path, batch: int, num_updates: int, num_classes: int, **sections: Any) -> Path:
    """Write a recipe of so many updates on small synthetic images, with a report for each, and return its file."""
    total_nimg = num_updates * batch
    tree = {
        "out": str(directory / "run"),
        "batch": batch,
        "total_nimg": total_nimg,
        "report_nimg": batch,
        "sample_nimg": total_nimg,
        "checkpoint_nimg": total_nimg,
        "ema": {"half_life_nimg": 100},
        "data": {
            "kind": "synthetic",
            "resolution": 32,
            "image_channels": 3,
            "num_classes": num_classes,
            "num_images": 64,
        },
        **sections,
    }
    (directory / "recipe.yaml").write_text(json.dumps(tree))
    return directory / "recipe.yaml"
