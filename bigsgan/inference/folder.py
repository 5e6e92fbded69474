"""A generator as a folder in the form of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from bigsgan.checkpoint.exported import CONFIG_FILE, WEIGHTS_FILE
from bigsgan.config.run_directory import refuse_directory
from bigsgan.errors import UserError
from bigsgan.images.grids import save_png
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.paths import writing

CARD_FILE, GRID_FILE = "README.md", "samples.png"
FILES = (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, GRID_FILE)

_NUMBERS = ("nimg", "ema_width", "truncation", "guidance", "recipe")
"""Keys of a header whose texts are JSON."""


def refuse_folder(out: Path, field: str = "--out") -> None:
    """Refuse a folder that cannot be made, or whose files an export would replace: a model card is edited by hand.

    Raises:
        UserError: It is so.
    """
    refuse_directory(out, field)
    if held := [name for name in FILES if os.path.lexists(out / name)]:
        problem, detail = "must be a new directory, or one without these files", f"it holds {', '.join(held)}"
        raise UserError(field, str(out), problem, "give another directory, or remove them", detail)


def write_weights(state: Mapping[str, Tensor], header: Mapping[str, str], folder: Path) -> None:
    """Write weights with their header into a folder, whole or not at all."""
    with replacing(folder / WEIGHTS_FILE) as unfinished:
        save_file(dict(state), unfinished, metadata={"format": "pt", **header})


def write_folder(
    state: Mapping[str, Tensor], header: Mapping[str, str], card: str, grid: Tensor | None, out: Path
) -> None:
    """Write weights, configuration, model card and, if there is one, a grid of samples uint8 (C, H, W).

    Raises:
        UserError: They cannot be written.
    """
    config = {"library_name": "bigsgan", **{k: json.loads(v) if k in _NUMBERS else v for k, v in header.items()}}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_weights(state, header, out)
        if grid is not None:
            save_png(grid, out / GRID_FILE)
        write_text(out / CARD_FILE, card)
        write_text(out / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
