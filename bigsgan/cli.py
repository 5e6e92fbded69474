"""The `bigsgan` command.

Recipes are checked before torch and deepspeed are imported: a mistake is answered at once, and with every rank doing
the same check, one speaks. The modules behind the commands are therefore imported by name, once the input is known to
be good.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from bigsgan import first_word
from bigsgan.bench import options as bench
from bigsgan.commands import data, evaluate, export, import_, plan, sample, train
from bigsgan.commands.parsing import Parser, add_recipe
from bigsgan.errors import EXIT_BAD_INPUT, UserError, speak, wait_to_be_ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 for bad input."""
    try:
        options = _parse(arguments)
        return int(options.run(options))
    except UserError as error:
        _speak_once(error)
        return EXIT_BAD_INPUT


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may stand before, between and behind a command's options."""
    options, rest = _parser().parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            raise UserError(
                word.partition("=")[0], None, f"is no option of `{options.command}`", f"see `{options.command} --help`"
            )
        if "overrides" not in options:
            raise UserError(
                "argument", word, f"is not expected by `{options.command}`", f"see `{options.command} --help`"
            )
    if "overrides" in options:
        options.overrides += rest
    return options


def _parser() -> Parser:
    parser = Parser(prog="bigsgan", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (train, plan, sample, evaluate, export, import_):
        command.add(commands)
    text = "measure what a recipe costs, and where the time and the messages of an update go"
    bench.add_commands(commands.add_parser("bench", help=text), add_recipe)
    data.add(commands)
    return parser


def _speak_once(error: UserError) -> None:
    """Print on rank 0, while the others wait to be ended.

    Launchers end the ranks of rank 0's host as soon as it ends, and those of other hosts later, so these ask it.
    A rank that is still alive after that met something that rank 0 did not, such as a file missing on its host alone.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")  # srun's tasks, before they have the others'
    if rank.isdecimal() and int(rank) > 0:
        if not first_word.is_on_another_host():
            wait_to_be_ended()
        elif first_word.rank_zero_spoke():
            return
    speak(error)
    if rank == "0":
        first_word.tell_other_hosts()
