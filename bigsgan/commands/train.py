"""`bigsgan train`: checks a recipe, then trains it or prints it."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from bigsgan import launched
from bigsgan.commands.parsing import Commands, add_number, add_recipe
from bigsgan.config import load_recipe, plan_run
from bigsgan.config.run_directory import refuse_directory, refuse_foreign_metrics
from bigsgan.errors import UserError
from bigsgan.slurm import launcher_variables


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("train", help="train a recipe, or go on with a run")
    add_recipe(command)
    text = "go on with a run though this key of its recipe changes its meaning; may be given again"
    command.add_argument("--allow-change", dest="allowed", metavar="KEY", action="append", default=[], help=text)
    text = "exit status where a signal stopped the run before its end (default 0)"
    add_number(command, "--stopped-status", int, 0, text)
    command.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    command.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the recipe, then train (or print it)."""
    os.environ.update(launcher_variables(os.environ))
    if not 0 <= options.stopped_status < 256:
        raise UserError("--stopped-status", options.stopped_status, "is no exit status", "give 0 to 255")
    path = Path(options.config)
    recipe = load_recipe(path, options.overrides)
    out = Path(recipe.out)
    refuse_directory(out, "out")
    refuse_foreign_metrics(out)
    planned = plan_run(recipe, launched.world_size(), path.resolve().parent)
    if options.dry_run:
        if launched.rank() == 0:
            print(recipe.to_yaml(), end="")
        return 0
    launched.check_launcher()
    return int(importlib.import_module("bigsgan.train").main(planned, options.allowed, options.stopped_status))
