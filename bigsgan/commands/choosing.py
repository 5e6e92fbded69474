"""The command line: selects the command and parses its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from bigsgan.commands import bench, data, doctor, evaluate, export, import_, plan, plugins, sample, submit, train
from bigsgan.commands.parsing import Parser, given_overrides
from bigsgan.errors import UserError
from bigsgan.preflight import versions

_COMMANDS = {
    "train": train, "submit": submit, "plan": plan, "sample": sample, "evaluate": evaluate, "export": export,
    "import": import_, "bench": bench, "doctor": doctor, "data": data, "plugins": plugins,
}  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; overrides may be before, between and after a command's options.

    Without a command, or with a group of commands alone, it shows the help.

    Raises:
        UserError: The command line is invalid.
    """
    if list(arguments) in ([], ["bench"], ["data"]):
        arguments = [*arguments, "--help"]
    options, rest = _parser(arguments[0]).parse_known_args(arguments)
    remedy = f"see `{options.command} --help`"
    for word in rest:
        if word.startswith("-"):
            raise UserError(word.partition("=")[0], None, f"unknown option of `{options.command}`", remedy)
        if "overrides" not in options:
            raise UserError("argument", word, f"is not an argument of `{options.command}`", remedy)
    if "overrides" in options:
        options.overrides = given_overrides(options) + rest
    return options


def _parser(asked: str = "") -> Parser:
    """Make the parser of the command that is asked for, or of all where that is none of them."""
    parser = Parser(prog="bigsgan", description="The `bigsgan` command.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    if asked in _COMMANDS:
        _COMMANDS[asked].add(commands)
        return parser
    text = "print a shell's completions, such as for `source <(bigsgan --print-completion bash)`"
    shtab.add_argument_to(parser, "--print-completion", help=text)
    parser.add_argument("--version", action="version", version=f"bigsgan {versions().get('bigsgan', 'not installed')}")
    for command in _COMMANDS.values():
        command.add(commands)
    return parser
