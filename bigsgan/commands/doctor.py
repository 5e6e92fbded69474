"""`bigsgan doctor`: checks of this machine, of a recipe on it, or of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_recipe, import_quietly, path_type, refuse_beside
from bigsgan.commands.planning import plan_on_ranks
from bigsgan.config import load_recipe
from bigsgan.config.run_directory import check_run_directory
from bigsgan.doctor.registry import chosen
from bigsgan.doctor.report import Report, listed
from bigsgan.errors import UserError
from bigsgan.runtime import launched


def add(commands: Commands) -> None:
    """Add the command and its options."""
    text = "check a machine, a recipe on it, or a run; on all ranks of a launcher"
    command = commands.add_parser("doctor", help=text)
    add_recipe(command, default=None)
    text = "run directory, whose checkpoints and reports are checked"
    command.add_argument("--run", dest="run_directory", metavar="DIR", type=path_type("--run", str), help=text)
    text = "check to run, or the part before its point, such as environment; may be repeated (default: all)"
    command.add_argument("--only", action="append", default=[], metavar="NAME", help=text)
    command.add_argument("--list", action="store_true", help="print the checks, with what they show, need and take")
    command.add_argument("--json", action="store_true", help="print all numbers as JSON")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run checks, and print what they find."""
    launched.take_from_slurm()
    directory = None if options.run_directory is None else Path(options.run_directory)
    checks = chosen(options.only, directory is not None, options.list)
    if options.list:
        others = {"--json": options.json, "--config": options.config, "--run": directory}
        refuse_beside("--list", {**others, "overrides": options.overrides})
        print(listed(checks))
        return 0
    if options.overrides and options.config is None:
        raise UserError("argument", options.overrides[0], "needs a recipe", "add --config, or remove it")
    if directory is not None and options.config is not None:
        raise UserError("--config", None, "cannot be combined with --run, which has a recipe", "give only one of them")
    if directory is not None:
        check_run_directory(directory)
    launched.check_launcher()
    plan = None
    if options.config is not None:
        recipe = load_recipe(options.config, options.overrides)
        plan = plan_on_ranks(recipe, launched.world_size(), options.config)
    report = Report(options.json, sys.stdout, _command(options))
    module = import_quietly("bigsgan.doctor.examine")
    return int(module.main(checks, plan, directory, report))


def _command(options: argparse.Namespace) -> list[str]:
    """The command that examines the same things again, without the words of a launcher."""
    words = ["bigsgan", "doctor"]
    if options.config is not None:
        words += ["--config", str(options.config), *options.overrides]
    return words + (["--run", options.run_directory] if options.run_directory is not None else [])
