"""The `bigsgan` command.

Recipes are checked before torch and deepspeed are imported: a mistake is answered at once, and with every rank doing the
same check, one speaks. The modules behind the commands are therefore imported by name, once the input is known to be good.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bigsgan.config import load_recipe, plan_run
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.errors import EXIT_BAD_INPUT, UserError

DEFAULT_RECIPE = REPOSITORY / "launch" / "recipes" / "digits.yaml"
_SILENT_RANKS_WAIT_SECONDS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        _speak_once(error)
        return EXIT_BAD_INPUT


def train(options: argparse.Namespace) -> int:
    """Check the recipe, then train (or print it)."""
    path = Path(options.config)
    recipe = load_recipe(path, options.overrides)
    plan = plan_run(recipe, int(os.environ.get("WORLD_SIZE", "1")), path.resolve().parent)
    if options.dry_run:
        if _rank() == 0:
            print(recipe.to_yaml(), end="")
        return 0
    return int(importlib.import_module("bigsgan.train").main(plan))


def sample(options: argparse.Namespace) -> int:
    """Write a grid of samples."""
    module = importlib.import_module("bigsgan.sample")
    module.main(Path(options.run_directory), options.num, options.truncation, Path(options.out), options.seed, options.nimg, options.live)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write one network's weights as safetensors."""
    module = importlib.import_module("bigsgan.export")
    module.main(Path(options.run_directory), options.network, options.live, Path(options.out), options.nimg)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bigsgan", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("train", help="train a recipe, or go on with a run")
    command.add_argument("--config", default=str(DEFAULT_RECIPE), help="recipe (YAML); the default trains the digits")
    command.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    command.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    command.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="changes to the recipe")
    command.set_defaults(run=train)

    command = commands.add_parser("sample", help="write a grid of samples from a run")
    _add_run(command)
    command.add_argument("--num", type=int, default=100, help="number of images (default 100)")
    command.add_argument("--truncation", type=float, default=None, help="resample latents beyond this magnitude")
    command.add_argument("--out", required=True, help="PNG file")
    command.add_argument("--seed", type=int, default=0, help="of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="the live generator instead of its average")
    command.set_defaults(run=sample)

    command = commands.add_parser("export", help="write a network's float32 weights as safetensors")
    _add_run(command)
    command.add_argument("--out", required=True, help="safetensors file")
    command.add_argument("--network", choices=["generator", "discriminator"], default="generator")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ema", dest="live", action="store_false", help="the generator's average (default)")
    which.add_argument("--live", action="store_true", help="the live weights")
    command.set_defaults(run=export, live=None)
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run", dest="run_directory", required=True, help="run directory (`out` of its recipe)")
    command.add_argument("--nimg", type=int, default=None, help="checkpoint to use (default: the newest)")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _speak_once(error: UserError) -> None:
    """Print on rank 0. The others wait, because launchers end every rank as soon as one has exited."""
    if _rank() == 0:
        print(f"bigsgan: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_SILENT_RANKS_WAIT_SECONDS)
