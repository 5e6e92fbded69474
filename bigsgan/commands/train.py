"""`bigsgan train`: checks a recipe, then trains it or prints it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

from bigsgan import shipped
from bigsgan.commands.parsing import (
    Commands,
    add_number,
    add_recipe,
    import_late,
    import_quietly,
    path_type,
    refuse_beside,
)
from bigsgan.commands.planning import plan_on_ranks
from bigsgan.config import Recipe, RunPlan, load_recipe
from bigsgan.config.run_directory import (
    check_hosts,
    flat,
    refuse_among_images,
    refuse_directory,
    refuse_foreign_metrics,
    refuse_unknown,
)
from bigsgan.config.saved_recipe import refuse_moved
from bigsgan.config.sweep import Task, own_overrides
from bigsgan.config.yaml_file import apply_overrides
from bigsgan.errors import UserError
from bigsgan.runtime import launched
from bigsgan.runtime.gpus import launch_order, own_device


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("train", help="train a recipe, or resume a run")
    add_recipe(command)
    text = "resume a run although this key or section of its recipe has changed; may be given several times"
    command.add_argument("--allow-change", dest="allowed", metavar="KEY", action="append", default=[], help=text)
    text = "go back to the checkpoint at so many images; repeated after the next save, this resumes"
    add_number(command, "--nimg", int, None, text)
    command.add_argument("--list", action="store_true", help="print the checkpoints of the run and stop")
    text = "exit status if a signal stops the run before its end (default 0)"
    add_number(command, "--stopped-status", int, 0, text)
    command.add_argument("--dry-run", action="store_true", help="check a start, print the resolved recipe and stop")
    command.add_argument("--print", dest="key", metavar="KEY", help="print this key of the resolved recipe and stop")
    text = "file with a line of overrides for each task of a Slurm job array"
    command.add_argument("--sweep", metavar="FILE", type=path_type("--sweep", str), help=text)
    text = "copy of data.root to read instead, for example on this node's own disk"
    command.add_argument("--data-root", metavar="DIR", type=path_type("--data-root", str), help=text)
    command.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the recipe, then train (or print it)."""
    launched.take_from_slurm()
    if not 0 <= options.stopped_status < 256:
        raise UserError("--stopped-status", options.stopped_status, "must be 0 to 255", "give an exit status")
    if not (options.list or options.dry_run or options.key is not None):
        launched.check_launcher()  # first: a rank whose numbers are wrong waits for nobody
    elif os.environ.get("RANK"):  # WORLD_SIZE alone asks for the plan of so many ranks
        launched.check_rank()
    swept = Task() if options.sweep is None else own_overrides(Path(options.sweep), os.environ)
    with swept.naming_line():
        recipe = load_recipe(options.config, swept + options.overrides, options.data_root)
    _tell_root(swept + options.overrides, options.data_root)
    refuse_moved(options.config, recipe.out, swept + options.overrides)
    out = Path(recipe.out)
    if not os.path.isdir(out / "checkpoints"):  # or it may be a key of the run that is resumed
        refuse_unknown(options.allowed, recipe)
    refuse_directory(out, "out")
    if options.list:
        others = {"--dry-run": options.dry_run, "--print": options.key, "--nimg": options.nimg}
        refuse_beside("--list", {**others, "--allow-change": options.allowed})
        if launched.rank() == 0:
            print(import_quietly("bigsgan.training.listing").table(recipe))
        return 0
    refuse_foreign_metrics(out, recipe.monitor)
    refuse_among_images(out, recipe.data)
    with swept.naming_line():
        planned = plan_on_ranks(recipe, launched.world_size(), options.config)
    if options.dry_run or options.key is not None:
        if launched.rank() == 0:
            if options.dry_run:
                _check(planned, options)
            key = options.key
            print(planned.recipe.to_yaml().rstrip("\n") if key is None else _value(planned.recipe, key))
        return 0
    os.environ.update(launch_order(planned.has_messages, os.environ))
    if planned.recipe.compiles:
        os.environ.update(own_device(os.environ))
    options.requests.end_at_once(options.stopped_status)
    module = import_late("bigsgan.trainer")
    return int(module.main(planned, options.requests, options.allowed, options.stopped_status, options.nimg))


def _tell_root(overrides: list[str], copy: str | None) -> None:
    """Say on rank 0's standard error that a ``data.root`` among the overrides is not read, as ``copy`` is."""
    tree: dict[str, Any] = {}
    apply_overrides(tree, overrides)
    root = (tree.get("data") or {}).get("root")
    if copy is not None and root not in (None, copy) and launched.rank() == 0:
        print(f"no effect with --data-root {copy}: data.root={root}", file=sys.stderr)


def _check(planned: RunPlan, options: argparse.Namespace) -> None:
    """Check what a start would check. The data that a recipe of bigsgan's own names is an example."""
    check_hosts(planned)
    data = planned.recipe.data
    is_example = options.config.resolve().parent == shipped.recipe("").parent
    if is_example and data.root and not os.path.exists(data.root) and data == load_recipe(options.config, []).data:
        print(f"data.root: {data.root!r} does not exist; data and checkpoints are not checked", file=sys.stderr)
        return
    with contextlib.redirect_stderr(io.StringIO()):  # what libraries say of this machine
        module = import_quietly("bigsgan.trainer")
    module.check(planned, options.allowed, options.nimg)


def _value(recipe: Recipe, key: str) -> str:
    """One value of a recipe as text for a script; empty for null."""
    values = flat(recipe.model_dump())
    if key not in values:
        raise UserError("--print", key, "must be a key of the recipe with a value", "write a dotted key such as out")
    return "" if values[key] is None else str(values[key])
