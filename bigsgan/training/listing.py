"""The checkpoints of a run as a table."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

from bigsgan.checkpoint import returns
from bigsgan.checkpoint.tags import MANIFEST, Checkpoint, best, complete
from bigsgan.config import NETWORKS, Recipe
from bigsgan.errors import UserError, counted
from bigsgan.runtime.memory import size
from bigsgan.table import aligned

_TITLES = ("images", "saved", "size", "ranks", *NETWORKS, "")


def table(recipe: Recipe) -> str:
    """Return the lines of all complete checkpoints of a recipe's run, oldest first.

    Raises:
        UserError: There is none.
    """
    directory = Path(recipe.out) / "checkpoints"
    found = list(complete(directory))
    if not found:
        problem, remedy = "has no complete checkpoint", "give the `out` directory of a run that has saved one"
        raise UserError("out", recipe.out, problem, remedy)
    mark = returns.read(directory)
    left = returns.left(directory, mark) if mark else []
    notes = defaultdict[Path, list[str]](list, {each.path: ["until the next save"] for each in left})
    stay, kept = [each for each in found if each.path not in notes], recipe.checkpoints.keep_best
    if stay:
        notes[stay[0].path].append("newest")
    if kept and (top := best(stay, kept.metric, kept.goal == "max")):
        notes[top.path].append("best")
    rows = [_row(each, ", ".join(notes.get(each.path, []))) for each in reversed(found)]
    return "\n".join(aligned([_TITLES, *rows], len(_TITLES)))


def _row(found: Checkpoint, note: str) -> list[str]:
    saved = datetime.fromtimestamp((found.path / MANIFEST).stat().st_mtime)
    num_bytes = sum(file["bytes"] for file in found.manifest["files"].values())
    ranks = "imported" if found.is_imported else str(found.manifest["world_size"])
    networks = [_network(found.layout, network) for network in NETWORKS]
    return [str(found.nimg), f"{saved:%Y-%m-%d %H:%M}", size(num_bytes), ranks, *networks, note]


def _network(layout: dict[str, Any], network: str) -> str:
    """Say how the ranks shared a network; nothing where the weights were imported."""
    stage, stages, ranks = (layout.get(f"{network}.{key}") for key in ("stage", "pipeline_stages", "ranks"))
    parts = [f"ZeRO {stage}"] if stage is not None else []
    parts += [f"{stages} stages"] if stages and stages > 1 else []
    parts += [counted(ranks, "rank")] if ranks else []
    return ", ".join(parts)
