"""Plans a recipe on the ranks of a command, also if the recipe leaves the numbers of ranks to us."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bigsgan.commands.parsing import import_quietly
from bigsgan.config import Recipe, RunPlan, plan_run
from bigsgan.config.run_plan import chooses_ranks
from bigsgan.config.unused import unused_keys
from bigsgan.runtime import launched
from bigsgan.runtime.gpus import own_device


def with_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe with what its data has in place of ``auto``, and that as overrides; tell it on standard error.

    Each rank finds it by itself. Only this loads torch.

    Raises:
        UserError: The data cannot be read, or does not fit the recipe.
    """
    if not recipe.data.left_to_data:
        return recipe, []
    found, keys, text = import_quietly("bigsgan.data.found").with_found(recipe)
    if text and launched.rank() == 0:
        print(text, file=sys.stderr)
    return found, keys


def plan_on_ranks(recipe: Recipe, world_size: int, path: Path) -> RunPlan:
    """Plan a recipe of a file; print on standard error what was found for it: numbers that it leaves to its data, those
    of ranks that it leaves to us, what its DeepSpeed files leave to it, and keys without effect.

    Each rank finds them by counting, so that all find the same numbers. Only this loads torch. Ranks are taken for
    GPUs; a run that is built learns what they are.

    Raises:
        UserError: The recipe cannot run on these ranks.
    """
    directory, recipe = path.resolve().parent, with_data(recipe)[0]
    if not chooses_ranks(recipe) or world_size == 1:
        return _told(plan_run(recipe, world_size, directory, on_gpus=True))
    if os.environ.get("RANK"):
        launched.check_rank()
    if recipe.compiles:
        os.environ.update(own_device(os.environ))  # before torch looks for devices
    module = import_quietly("bigsgan.planner.balance")
    plan, text = module.plan_balanced(recipe, world_size, directory)
    return _told(plan, text)


def _told(plan: RunPlan, *texts: str) -> RunPlan:
    """Print texts, and what has no effect in the recipe and its files, on rank 0's standard error; return the plan."""
    notes = dict.fromkeys(engine.file.note for engine in plan.engines.values())  # both networks may have one file
    if launched.rank() == 0:
        for text in filter(None, (*texts, *notes, unused_keys(plan))):
            print(text, file=sys.stderr)
    return plan
