"""The command line of `bigsgan bench`, read and checked before torch is imported."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bigsgan import launched
from bigsgan.bench.variants import VARIANTS, chosen_variants, plan_variants
from bigsgan.config import load_recipe
from bigsgan.config.run_directory import refuse_output
from bigsgan.errors import UserError
from bigsgan.slurm import launcher_variables

LARGEST_COUNT = 10**6


def add_commands(parser: argparse.ArgumentParser, add_recipe: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands of ``bench``.

    Args:
        parser: Of ``bench``.
        add_recipe: Adds the options that choose a recipe.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "variants of a recipe (engines, precision, ZeRO, ...) against plain PyTorch, in one run"
    command = commands.add_parser("train", help=text)
    add_recipe(command)
    text = f"which, the one to compare with first (default: all): {', '.join(VARIANTS)}"
    command.add_argument("--variants", default=",".join(VARIANTS), help=text)
    _add_count(command, "--rounds", 3, "in each of which every variant takes its turn (default 3)")
    _add_count(command, "--warmup", 2, "updates before the clock starts (default 2)")
    _add_count(command, "--steps", 5, "updates that are timed in each round (default 5)")
    command.add_argument("--markdown", action="store_true", help="print a Markdown table")
    command.add_argument("--plot", metavar="FILE", help="PNG file for a chart of the times")
    _add_json(command)
    command.set_defaults(run=bench_train)


def bench_train(options: argparse.Namespace) -> int:
    """Compare variants of a recipe."""
    path = _begin(options)
    recipe, variants = load_recipe(path, options.overrides), chosen_variants(options.variants)
    planned = plan_variants(recipe, variants, launched.world_size(), path.resolve().parent)
    plot = None if options.plot is None else Path(options.plot)
    if plot is not None:
        refuse_output(plot, "--plot")
    launched.check_launcher()
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed then logs to: results alone go to standard output
        module = importlib.import_module("bigsgan.bench.train")
        measure = importlib.import_module("bigsgan.bench.measure")
    settings = measure.Settings(options.rounds, options.warmup, options.steps)
    return int(module.main(recipe, planned, module.Options(settings, options.json, options.markdown, plot)))


def _begin(options: argparse.Namespace) -> Path:
    """Take Slurm's ranks for what they are, and return the recipe's path."""
    os.environ.update(launcher_variables(os.environ))
    return Path(options.config)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_count(command: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    """Add an option that counts something, from 1 on."""
    command.add_argument(flag, type=lambda word: _count(flag, word), default=default, help=text)


def _count(flag: str, word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= LARGEST_COUNT:
        raise UserError(flag, word, "is no number of them", f"give 1 to {LARGEST_COUNT}")
    return int(word)
