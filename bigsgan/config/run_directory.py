"""The recipe that a run directory keeps, and what a resumed run may change about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigsgan.config.recipe import Recipe, load_recipe
from bigsgan.errors import UserError

RECIPE_FILE = "config.yaml"

# What does not change the meaning of the images already trained on.
FREE_KEYS = {
    "out", "total_nimg", "report_nimg", "sample_nimg", "checkpoint_nimg", "keep_checkpoints",
    "data.root", "data.num_workers", "data.prefetch", "data.max_corrupt",
    "engines.generator.ds_config", "engines.discriminator.ds_config",
    "engines.generator.activation_checkpointing", "engines.discriminator.activation_checkpointing",
}  # fmt: skip


def write_recipe(recipe: Recipe, out: Path) -> None:
    """Keep the resolved recipe in the run directory.

    Raises:
        UserError: The directory cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RECIPE_FILE).write_text(recipe.to_yaml())
    except OSError as error:
        raise UserError("out", str(out), f"cannot be written ({error})", "give a directory of your own") from None


def read_saved_recipe(run: Path) -> Recipe:
    """Return the recipe of a run directory.

    Raises:
        UserError: It is not a run directory.
    """
    path = run / RECIPE_FILE
    if not path.is_file():
        raise UserError("--run", str(run), f"is no run directory: it holds no {RECIPE_FILE}", "give the `out` of a run")
    return load_recipe(path, [])


def compare_recipes(saved: Recipe, given: Recipe) -> None:
    """Refuse to resume under a recipe that means something else.

    Raises:
        UserError: With the first key that differs.
    """
    before, after = _flat(saved.model_dump()), _flat(given.model_dump())
    for key in sorted(before.keys() | after.keys()):
        if key not in FREE_KEYS and before.get(key) != after.get(key):
            raise UserError(
                key, after.get(key), f"was {before.get(key)!r} in the run that {given.out} holds",
                f"set it back to go on, or give another `out` to start anew",
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
