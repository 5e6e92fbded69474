"""Finds the recipes, DeepSpeed files and Slurm scripts that come with bigsgan, in a clone and installed.

Their directories here are links to launch/recipes, ds_configs and launch/slurm; a wheel has the files themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent
SLURM = (ROOT / "slurm").resolve()
DEFAULT_RECIPE = "digits"


def recipe(name: str) -> Path:
    """Path of the recipe of that name, which may not exist."""
    return (ROOT / "recipes").resolve() / f"{name}.yaml"


def found_recipe(word: str) -> Path:
    """Path of a recipe, given that path or the name of a built-in recipe."""
    name = word.removesuffix(".yaml")
    return recipe(name) if name in recipe_names() and not os.path.isfile(word) else Path(word)


def recipe_names() -> list[str]:
    """All recipes."""
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def train_command() -> str:
    """How to start training, from where this process was started."""
    return "deepspeed launch/train.py" if os.path.exists("launch/train.py") else "bigsgan train"
