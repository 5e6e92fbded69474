"""The `bigsgan` command.

Recipes are checked before torch and deepspeed are imported: a mistake is answered at once, and with every rank doing
the same check, one speaks. The modules behind the commands are therefore imported by name, once the input is known to
be good.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Sequence

from bigsgan.bench import options as bench
from bigsgan.commands import data, evaluate, export, import_, plan, sample, train
from bigsgan.commands.parsing import Parser, add_recipe, expand_paths
from bigsgan.errors import EXIT_BAD_INPUT, UserError, speak, wait_to_be_ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 for bad input, or 141 where nobody reads what it prints."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names of files may be no UTF-8
    try:
        options = _parse(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except UserError as error:
        _speak_once(error)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would flush again at its end
        return 128 + signal.SIGPIPE


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as of ``bigsgan ... | head -1``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


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
    expand_paths(options)
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

    A rank that is still alive after that met something that rank 0 did not, such as a file missing on its host alone.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")  # srun's tasks, before they have the others'
    if rank.isdecimal() and int(rank) > 0:
        wait_to_be_ended()
    speak(error)
