"""The recipe that a run has saved: its file, or without it the newest manifest that can be read."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigsgan.config.sections import NETWORKS
from bigsgan.config.yaml_file import parse_override
from bigsgan.errors import UserError
from bigsgan.runtime.paths import parse_json, read_text

RECIPE_FILE = "config.yaml"
"""The recipe in a run directory."""

_MANIFESTS = "checkpoints/[0-9]*/manifest.json"
_MOST_MANIFEST_BYTES = 1 << 26


def is_lost(path: Path) -> bool:
    """Return whether a path is that of a run directory's recipe, and leads nowhere."""
    return path.name == RECIPE_FILE and not os.path.lexists(path)


def recipe_of_checkpoints(run: Path) -> dict[str, Any] | None:
    """Return the recipe in the newest manifest of a run directory that can be read; None if there is none.

    It names the copies of its DeepSpeed files that are there, as ``config.yaml`` does.
    """
    for path in sorted(run.glob(_MANIFESTS), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = parse_json(read_text(path, _MOST_MANIFEST_BYTES))["recipe"]
            copies = [network for network in NETWORKS if os.path.isfile(run / copy_name(network))]
            engines = {network: {**found["engines"][network], "ds_config": copy_name(network)} for network in copies}
            return {**found, "engines": {**found["engines"], **engines}}
    return None


def copy_name(network: str) -> str:
    """Return the name of the copy of a network's DeepSpeed file in a run directory."""
    return f"ds_{network}.json"


def refuse_moved(config: Path, out: str, overrides: Collection[str]) -> None:
    """Refuse the recipe of a run directory that names another one, unless an override does.

    Raises:
        UserError: The directory was moved or copied, so that the recipe would begin another run at the old place.
    """
    here = config.parent
    if config.name != RECIPE_FILE or not any(here.glob(_MANIFESTS)):
        return
    is_given = any(parse_override(text)[0] == ["out"] for text in overrides)
    if not is_given and os.path.realpath(here) != os.path.realpath(out):
        problem = f"is not the directory of {config}, which holds a run"
        raise UserError("out", out, problem, f"give out={here} to resume it, or another `out` to start a new run")
