"""What the commands' parsers share: the form of error messages, and common options."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from bigsgan import shipped
from bigsgan.config import both_engines
from bigsgan.config.deepspeed_elsewhere import no_autotuning
from bigsgan.config.messages import choose
from bigsgan.errors import UserError, reason, shown
from bigsgan.runtime import launched, limits
from bigsgan.runtime.paths import expanded


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would exit with its usage; parsed options have the full name as ``command``.

    It parses once, and refuses an option with a value that is given twice, of which argparse takes the last.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.set_defaults(command=self.prog)
        self._given: dict[str, list[str]] = {}

    def _get_values(self, action: argparse.Action, words: list[str]) -> Any:
        """Convert the words behind an option."""
        has_value = isinstance(action, argparse._StoreAction) and action.option_strings
        if has_value and (earlier := self._given.setdefault(action.dest, words)) is not words:
            problem = f"must be given once, got {' and '.join(map(shown, (*earlier, *words)))}"
            raise UserError(action.option_strings[0], None, problem, "remove one of them")
        return super()._get_values(action, words)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's text into field, value, problem and remedy."""
        remedy = f"see `{self.prog} --help`"
        if message.startswith("the following arguments are required: "):
            raise UserError(message.partition(": ")[2], None, "must be given", remedy)
        choice = re.fullmatch(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if choice:
            raise UserError(choice[1], choice[2], f"must be one of {choice[3]}", choose(choice[2], choice[3]))
        named = re.fullmatch(r"argument (\S+): (.*)", message)
        raise UserError(named[1] if named else self.prog, None, named[2] if named else message, remedy)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def path_type(name: str, kind: Callable[[str], Any] = Path) -> Callable[[str], Any]:
    """Return the type of an option or argument that is a path: replaces ``~`` by a home directory, then calls ``kind``.

    ``name`` is the option or argument in a message that the path is empty, or that the user of the home directory does
    not exist.
    """

    def convert(word: str) -> Any:
        if not word.strip():
            raise UserError(name, word, "must be a path", "write one, or leave the option out")
        try:
            return kind(expanded(word))
        except ValueError as error:
            raise UserError(name, word, str(error), "write the whole path") from None

    return convert


def picked(record: type, options: argparse.Namespace, **others: object) -> Any:
    """Return a NamedTuple of the options that have its fields' names, but for the ``others``, which are given here."""
    own = {name: getattr(options, name) for name in record._fields if name not in others}  # type: ignore[attr-defined]
    return record(**own, **others)


def import_late(module: str) -> Any:
    """Import a command's module, and freeze all objects that then exist: garbage collections pass over them.

    torch and DeepSpeed make half a million objects that stay to the end. DeepSpeed collects several times for each
    engine, and Python once more as it ends, so that a short run takes a second less.

    Raises:
        UserError: DS_ACCELERATOR names what this machine does not have, or a limit keeps torch from being loaded.
    """
    launched.check_accelerator()
    is_new = module not in sys.modules
    try:
        imported = importlib.import_module(module)
    except (AssertionError, ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        name = os.environ.get("DS_ACCELERATOR")
        if limit := limits.reached(error):
            raise limit from error
        if name in (None, "cpu", "cuda"):
            raise
        problem = f"cannot be used on {socket.gethostname()}: {reason(error).rstrip('.')}"
        remedy = "run `unset DS_ACCELERATOR`"
        raise UserError("DS_ACCELERATOR", name, problem, remedy, "an environment variable") from error
    if is_new:
        gc.freeze()
    return imported


def import_quietly(module: str) -> Any:
    """Import late. What DeepSpeed logs meanwhile goes to standard error, as results go to the output."""
    with contextlib.redirect_stdout(sys.stderr):
        return import_late(module)


def add_recipe(command: argparse.ArgumentParser, default: str | None = shipped.DEFAULT_RECIPE) -> None:
    """Add the options that choose a recipe."""
    text = "recipe: a YAML file, or the name of a built-in one"
    text += f" (default: {default})" if default else ""
    command.add_argument("--config", default=default, type=path_type("--config", shipped.found_recipe), help=text)
    text = "DeepSpeed file of both engines: short for engines.generator.ds_config and engines.discriminator.ds_config"
    command.add_argument("--deepspeed_config", metavar="FILE", type=path_type("--deepspeed_config", str), help=text)
    command.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # scripts for DeepSpeed give it
    command.add_argument("--autotuning", nargs="?", const="", type=_refuse_autotuning, help=argparse.SUPPRESS)
    command.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="changes to the recipe")


def given_overrides(options: argparse.Namespace) -> list[str]:
    """The overrides of ``--deepspeed_config``, then the given ones."""
    file = getattr(options, "deepspeed_config", None)
    short = [] if file is None else both_engines(f"ds_config={file}")
    return short + options.overrides


def _refuse_autotuning(_: str) -> NoReturn:
    raise no_autotuning()


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint of a run, and an EMA of another width."""
    text = "run directory (`out` of its recipe)"
    command.add_argument("--run", dest="run_directory", type=path_type("--run"), required=True, help=text)
    add_number(command, "--nimg", int, None, "checkpoint to use (default: the newest)")

    text = "use the EMA of this relative width (sigma_rel), such as 0.07, made of the run's EMA snapshots"
    add_number(command, "--ema-width", float, None, text)


def add_truncation(command: argparse.ArgumentParser) -> None:
    """Add the option of a single truncation."""
    text = "resample latents beyond this magnitude, or move styles to their mean (StyleGAN2, GAT, CAT)"
    add_number(command, "--truncation", float, None, text)


def refuse_beside(flag: str, others: Mapping[str, object]) -> None:
    """Refuse options beside one that excludes them. Those that are left out are None, False or an empty list.

    Raises:
        UserError: One is given.
    """
    for other, value in others.items():
        if value is not None and value is not False and value != []:  # 0 is given
            raise UserError(flag, None, f"cannot be combined with {other}", "give only one of them")


def add_sampling(command: argparse.ArgumentParser, batch: int | None = 100) -> None:
    """Add the options of commands that compute images: a class's influence, steps, and the images at a time.

    ``batch`` is that number by default, None where the command itself takes 100.
    """
    text = "move w away from its mean over the classes (GAT, CAT), or estimates of a flow from those without a label, "
    text += "by more than 1, or towards them (default 1, or generator.guidance)"
    add_number(command, "--guidance", float, None, text)
    text = "steps from noise to an image, of a generator that learnt some (default: generator.steps)"
    add_number(command, "--steps", int, None, text)

    add_number(command, "--batch", int, batch, "images computed at a time (default 100)")


def add_form(command: argparse.ArgumentParser) -> None:
    """Add the options ``--json`` and ``--markdown``, of which one may be given."""
    form = command.add_mutually_exclusive_group()
    for name, text in (("json", "print the results as JSON"), ("markdown", "print them as Markdown")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=text)


def add_number(
    command: argparse.ArgumentParser, flag: str, kind: Callable[[str], Any], default: float | None, text: str
) -> None:
    """Add an option that takes a number; other text raises a UserError."""

    def convert(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise UserError(flag, word, f"must be {what}", f"write {what} such as {default or 1}") from None

    command.add_argument(flag, type=convert, default=default, help=text)
