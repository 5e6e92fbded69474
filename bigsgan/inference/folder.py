"""A generator as a folder in the form of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from bigsgan.config.run_directory import refuse_directory
from bigsgan.errors import UserError
from bigsgan.images.grids import save_png
from bigsgan.inference.loading import CONFIG_FILE, WEIGHTS_FILE
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.paths import writing

CARD_FILE, GRID_FILE = "README.md", "samples.png"
FILES = (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, GRID_FILE)


def refuse_folder(out: Path, field: str = "--out") -> None:
    """Refuse a folder that cannot be made, or whose files an export would replace: a model card is edited by hand.

    Raises:
        UserError: It is so.
    """
    refuse_directory(out, field)
    if held := [name for name in FILES if os.path.lexists(out / name)]:
        problem, detail = "must be a new directory, or one without these files", f"it holds {', '.join(held)}"
        raise UserError(field, str(out), problem, "give another directory, or remove them", detail)


def write_folder(
    state: Mapping[str, Tensor], header: Mapping[str, str], card: str, grid: Tensor | None, out: Path
) -> None:
    """Write weights, configuration, model card and, if there is one, a grid of samples uint8 (C, H, W).

    Raises:
        UserError: They cannot be written.
    """
    texts = {"library_name": "bigsgan", **header}
    numbers = {
        name: json.loads(header[name])
        for name in ("nimg", "ema_width", "truncation", "guidance", "recipe")
        if name in header
    }
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / WEIGHTS_FILE) as unfinished:
            save_file(dict(state), unfinished, metadata={"format": "pt", **header})
        if grid is not None:
            save_png(grid, out / GRID_FILE)
        write_text(out / CARD_FILE, card)
        write_text(out / CONFIG_FILE, json.dumps({**texts, **numbers}, indent=2) + "\n")
