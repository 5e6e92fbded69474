"""The `bigsgan` command.

Recipes are checked before torch and deepspeed are imported: a mistake is answered at once, and with every rank doing
the same check, one speaks. The modules behind the commands are therefore imported by name, once the input is known to
be good.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from bigsgan import launched
from bigsgan.bench import options as bench
from bigsgan.config import NETWORKS, load_recipe, plan_run
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.config.metrics import KINDS as METRIC_KINDS
from bigsgan.config.metrics import FeatureNetwork, parse_metric
from bigsgan.errors import EXIT_BAD_INPUT, UserError, speak, wait_to_be_ended
from bigsgan.slurm import launcher_variables

_MOST_GIB = 2**40
DEFAULT_RECIPE = REPOSITORY / "launch" / "recipes" / "digits.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 for bad input."""
    try:
        options = _parse(arguments)
        return int(options.run(options))
    except UserError as error:
        _speak_once(error)
        return EXIT_BAD_INPUT


def train(options: argparse.Namespace) -> int:
    """Check the recipe, then train (or print it)."""
    os.environ.update(launcher_variables(os.environ))
    path = Path(options.config)
    recipe = load_recipe(path, options.overrides)
    planned = plan_run(recipe, launched.world_size(), path.resolve().parent)
    if options.dry_run:
        if launched.rank() == 0:
            print(recipe.to_yaml(), end="")
        return 0
    launched.check_launcher()
    return int(importlib.import_module("bigsgan.train").main(planned, options.allowed, options.stopped_status))


def plan(options: argparse.Namespace) -> int:
    """Print what a recipe's networks cost, how they would be divided, or which layouts fit into memory."""
    path = Path(options.config)
    recipe = load_recipe(path, options.overrides)
    least = math.lcm(*(recipe.engine(network).pipeline_stages for network in NETWORKS))
    gpus = least if options.gpus is None else options.gpus
    if gpus < 1:
        raise UserError("--gpus", gpus, "is no number of ranks", "give 1 or more")
    if options.gpu_memory is not None:
        memory = _check_memory(options, gpus)
        _import_plan().survey(path, options.overrides, gpus, options.nodes or 1, *memory, options.json)
        return 0
    for flag, value in (("--nodes", options.nodes), ("--host-memory", options.host_memory)):
        if value is not None:
            raise UserError(
                flag, value, "is for --gpu-memory, which is not given", "give --gpu-memory 80, or leave it out"
            )
    planned = plan_run(recipe, gpus, path.resolve().parent)
    _import_plan().main(planned, options.pipeline, options.json)
    return 0


def _import_plan() -> ModuleType:
    """Import it with DeepSpeed, which prints when it is imported: the results alone go to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        return importlib.import_module("bigsgan.plan")


def _check_memory(options: argparse.Namespace, gpus: int) -> tuple[int, int | None]:
    """Bytes of a GPU, and of a node's host memory if that is given.

    Raises:
        UserError: An option makes no sense.
    """
    nodes = 1 if options.nodes is None else options.nodes
    if nodes < 1 or gpus % nodes:
        raise UserError(
            "--nodes", nodes, f"does not divide the number of GPUs ({gpus})", f"give a number that divides {gpus}"
        )
    if options.pipeline:
        raise UserError("--pipeline", None, "does not go with --gpu-memory", "ask for one of them")
    for flag, gib in (("--gpu-memory", options.gpu_memory), ("--host-memory", options.host_memory)):
        if gib is not None and not 0 < gib < _MOST_GIB:
            raise UserError(flag, gib, "is no size of a memory", "give GiB, such as 80")
    host = options.host_memory
    return math.ceil(options.gpu_memory * 2**30), None if host is None else math.ceil(host * 2**30)


def sample(options: argparse.Namespace) -> int:
    """Write a grid of samples."""
    launched.number("LOCAL_RANK", default=0, least=0)
    launched.check_rank()
    module = importlib.import_module("bigsgan.sample")
    asked = module.Options(
        num=options.num,
        truncations=options.truncations,
        seed=options.seed,
        classes=options.classes,
        batch=options.batch,
        interpolate=options.interpolate,
        morph=options.morph,
        mix=options.mix,
        files=options.files,
    )
    run, out = Path(options.run_directory), Path(options.out)
    module.main(run, out, options.nimg, options.live, asked, launched.rank(), launched.world_size())
    return 0


def export(options: argparse.Namespace) -> int:
    """Write one network's weights as safetensors."""
    importlib.import_module("bigsgan.export").main(
        run=Path(options.run_directory),
        network=options.network,
        live=options.live,
        out=Path(options.out),
        nimg=options.nimg,
        standing=options.standing,
        truncation=options.truncation,
        batch=options.batch,
    )
    return 0


def import_(options: argparse.Namespace) -> int:
    """Make a run directory from published weights."""
    importlib.import_module("bigsgan.importing").main(
        source=options.source,
        weights=Path(options.weights),
        discriminator=None if options.discriminator is None else Path(options.discriminator),
        out=Path(options.out),
    )
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Measure the quality of a run's samples."""
    os.environ.update(launcher_variables(os.environ))
    launched.check_launcher()
    features = {"network": options.features, "weights": options.weights, "resizer": options.resizer}
    metrics = [parse_metric(name, "--metrics") for name in options.metrics.split(",")]
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed then logs to: results alone go to standard output
        module = importlib.import_module("bigsgan.evaluate")
    asked = module.Options(
        run=Path(options.run_directory),
        nimg=options.nimg,
        live=options.live,
        metrics=metrics,
        features=FeatureNetwork(**features),
        batch=options.batch,
        seed=options.seed,
        truncation=options.truncation,
        overrides=options.overrides,
        json=options.json,
    )
    return int(module.main(asked))


def data_prepare(options: argparse.Namespace) -> int:
    """Convert a directory of images once, for training to read."""
    importlib.import_module("bigsgan.data.prepare").main(
        source=Path(options.source),
        destination=Path(options.destination),
        resolution=options.resolution,
        format=options.format,
        workers=options.workers,
    )
    return 0


class _Parser(argparse.ArgumentParser):
    """Raises UserError where argparse prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's text into field, value, problem and remedy."""
        remedy = f"see `{self.prog} --help`"
        if message.startswith("the following arguments are required: "):
            raise UserError(message.partition(": ")[2], None, "is missing", remedy)
        choice = re.fullmatch(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if choice:
            raise UserError(choice[1], choice[2], "is none of the choices", f"choose from {choice[3]}")
        named = re.fullmatch(r"argument (\S+): (.*)", message)
        raise UserError(named[1] if named else self.prog, None, named[2] if named else message, remedy)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may stand before, between and behind a command's options."""
    options, rest = _parser().parse_known_args(arguments)
    command = f"bigsgan {options.run.__name__.replace('_', ' ').rstrip()}"
    for word in rest:
        if word.startswith("-"):
            raise UserError(word.partition("=")[0], None, f"is no option of `{command}`", f"see `{command} --help`")
        if "overrides" not in options:
            raise UserError("argument", word, f"is not expected by `{command}`", f"see `{command} --help`")
    if "overrides" in options:
        options.overrides += rest
    return options


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _parser() -> _Parser:
    parser = _Parser(prog="bigsgan", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_train, _add_plan, _add_sample, _add_evaluate, _add_export, _add_import):
        add(commands)
    text = "measure what a recipe costs, and where the time and the messages of an update go"
    bench.add_commands(commands.add_parser("bench", help=text), _add_recipe)
    _add_data(commands.add_parser("data", help="make data sets for training to read"))
    return parser


def _add_train(commands: _Commands) -> None:
    command = commands.add_parser("train", help="train a recipe, or go on with a run")
    _add_recipe(command)
    text = "go on with a run though this key of its recipe changes its meaning; may be given again"
    command.add_argument("--allow-change", dest="allowed", metavar="KEY", action="append", default=[], help=text)
    text = "exit status where a signal stopped the run before its end (default 0)"
    _add_number(command, "--stopped-status", int, 0, text)
    command.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    command.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    command.set_defaults(run=train)


def _add_plan(commands: _Commands) -> None:
    command = commands.add_parser(
        "plan", help="show what a recipe costs: operations, stages, or the memory of its layouts, without training"
    )
    _add_recipe(command)
    command.add_argument("--pipeline", action="store_true", help="the division into pipeline stages, and the bubble")
    _add_number(command, "--gpus", int, None, "number of ranks (default: the least that the stages need)")
    _add_number(
        command, "--gpu-memory", float, None, "GiB of each GPU: show the memory of all layouts, and which to take"
    )
    _add_number(command, "--nodes", int, None, "number of hosts that the GPUs are on (default 1)")
    _add_number(command, "--host-memory", float, None, "GiB of each host, for layouts that offload to it")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=plan)


def _add_sample(commands: _Commands) -> None:
    command = commands.add_parser("sample", help="write samples from a run: a sheet, an animation or single files")
    _add_run(command)
    _add_number(command, "--num", int, 100, "number of images (default 100)")
    command.add_argument("--out", required=True, help="PNG file; GIF of an interpolation; directory of --files")
    _add_number(command, "--seed", int, 0, "of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="the live generator instead of its average")
    text = "class of each column, such as 3,17,200-209 (default: the first that fit)"
    command.add_argument("--classes", type=_class_ranges, help=text)
    text = "resample latents beyond this magnitude, or draw styles to their mean; several, as 0.3,0.7,1, make a sweep"
    command.add_argument("--truncation", dest="truncations", type=_numbers, default=[], help=text)
    _add_batch(command)
    _add_number(command, "--interpolate", int, 0, "rows of so many images, each from one sample to the next")
    command.add_argument("--morph", action="store_true", help="interpolate from class to class too")
    _add_number(command, "--mix", int, 0, "so many coarse styles by row, the fine ones by column (StyleGAN2)")
    command.add_argument("--files", action="store_true", help="single PNG files; with torchrun, shared among the ranks")
    command.set_defaults(run=sample)


def _add_evaluate(commands: _Commands) -> None:
    command = commands.add_parser("evaluate", help="measure the quality of a run's samples: FID and the like")
    _add_run(command)
    text = f"names and numbers of images, such as fid50k,kid50k,is50k,pr50k; of {', '.join(METRIC_KINDS)}"
    command.add_argument("--metrics", default="fid10k", help=f"{text} (default fid10k)")
    text = "inception, digits, torchvision:NAME or a TorchScript file (default: digits for the digits, else inception)"
    command.add_argument("--features", default="auto", help=text)
    command.add_argument("--weights", help="file of the weights of inception or torchvision:NAME")
    text = "how images get to inception's size (default tensorflow)"
    command.add_argument("--resizer", choices=["tensorflow", "antialiased"], default="tensorflow", help=text)
    _add_number(command, "--seed", int, 0, "of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="the live generator instead of its average")
    _add_sampling(command)
    command.add_argument("--json", action="store_true", help="print the records as JSON")
    command.add_argument("overrides", nargs="*", metavar="data.key=value", help="where the real images are now")
    command.set_defaults(run=evaluate)


def _add_export(commands: _Commands) -> None:
    command = commands.add_parser("export", help="write a network's float32 weights as safetensors")
    _add_run(command)
    command.add_argument("--out", required=True, help="safetensors file")
    command.add_argument("--network", choices=["generator", "discriminator"], default="generator")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ema", dest="live", action="store_false", help="the generator's average (default)")
    which.add_argument("--live", action="store_true", help="the live weights")
    text = "the generator with the statistics that `bigsgan sample` uses (default), or as training left it"
    command.add_argument("--standing", action=argparse.BooleanOptionalAction, help=text)
    _add_sampling(command)
    command.set_defaults(run=export, live=None)


def _add_import(commands: _Commands) -> None:
    command = commands.add_parser("import", help="make a run directory from published weights")
    sources = ["biggan-pytorch", "stylegan2-ada", "stylegan3-style2", "r3gan", "pix2pix"]
    command.add_argument("--from", dest="source", required=True, choices=sources, help="where the weights were trained")
    command.add_argument("--weights", required=True, help="pickle, or state dict of the generator")
    command.add_argument("--discriminator", help="state dict of the discriminator, if it has a file of its own")
    command.add_argument("--out", required=True, help="run directory to make")
    command.set_defaults(run=import_)


def _add_data(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "convert images once, into a zip file, tar shards or a folder; run again, it goes on where it ended"
    command = commands.add_parser("prepare", help=text)
    command.add_argument("source", metavar="SRC", help="directory of images, with a sub-folder for each class if any")
    command.add_argument("destination", metavar="DST", help="zip file, or directory of the shards or folders, to make")
    _add_number(command, "--resolution", int, None, "pixels a side", required=True)
    text = "of DST, which is the data.kind of a recipe that reads it"
    command.add_argument("--format", choices=["zip", "tar", "folder"], required=True, help=text)
    _add_number(command, "--workers", int, None, "processes that convert (default: one for each CPU core)")
    command.set_defaults(run=data_prepare)


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default=str(DEFAULT_RECIPE), help="recipe (YAML); the default trains the digits")
    command.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="changes to the recipe")


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run", dest="run_directory", required=True, help="run directory (`out` of its recipe)")
    _add_number(command, "--nimg", int, None, "checkpoint to use (default: the newest)")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    _add_number(command, "--truncation", float, None, "resample latents beyond this magnitude")
    _add_batch(command)


def _add_batch(command: argparse.ArgumentParser) -> None:
    _add_number(command, "--batch", int, 100, "images computed at a time (default 100)")


def _add_number(
    command: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], Any],
    default: float | None,
    text: str,
    required: bool = False,
) -> None:
    """Add an option that takes a number; what is none ends with a message in our own form."""

    def convert(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise UserError(flag, word, f"is not {what}", f"write {what} such as {default or 1}") from None

    command.add_argument(flag, type=convert, default=default, required=required, help=text)


def _numbers(word: str) -> list[float]:
    """Read ``0.3,0.7,1``."""
    try:
        return [float(part) for part in word.split(",")]
    except ValueError:
        raise UserError("--truncation", word, "is not a number", "write a number such as 1, or 0.3,0.7,1") from None


def _class_ranges(word: str) -> list[range]:
    """Read ``3,17,200-209``; nothing is counted out yet, as the run knows how many classes there are."""
    ranges = []
    for part in word.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UserError("--classes", word, "is no list of classes", "write numbers and ranges such as 3,17,200-209")
        ranges.append(range(int(found[1]), int(found[2] or found[1]) + 1))
    return ranges


def _speak_once(error: UserError) -> None:
    """Print on rank 0, while the others wait to be ended.

    A rank that is still alive after that met something that rank 0 did not, such as a file missing on its host alone.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")  # srun's tasks, before they have the others'
    if rank.isdecimal() and int(rank) > 0:
        wait_to_be_ended()
    speak(error)
