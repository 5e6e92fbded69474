"""The `bigsgan` command.

``__main__`` takes note of signals before this is imported, because imports take time. Input is checked before torch and
deepspeed are imported, so that errors appear at once; all ranks make the same checks, and one of them prints the
message. Slow modules are imported by name: the parser here, the modules behind the commands after the checks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import select
import signal
import sys
from collections.abc import Sequence

from bigsgan.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    UserError,
    number_from_environment,
    print_error,
    rank_from_environment,
    wait_for_termination,
)
from bigsgan.runtime import first_word, launched, limits
from bigsgan.runtime.gpus import nvidia_gpus
from bigsgan.runtime.signals import STOPPING, Noted, is_training
from bigsgan.training.stopping import StopRequests


def main(arguments: Sequence[str] | None = None, noted: Noted | None = None) -> int:
    """Run one command and return the exit status.

    It is the command's own, 2 for bad input, 130 after Ctrl-C, or 141 if nobody reads the output any more. Signals may
    have been ``noted``.
    """
    _open_closed_streams()
    if not nvidia_gpus():
        logging.getLogger("DeepSpeed").addFilter(_is_news)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on standard error: file names may be invalid UTF-8
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0].startswith("--local_rank="):  # `deepspeed --no_python bigsgan train` puts it there
        words = words[1:]
    launched.forget_empty()
    is_launched = bool(os.environ.get("RANK") or os.environ.get("SLURM_STEP_NUM_TASKS"))
    requests = StopRequests(is_launched, STOPPING if is_training(words) else (), noted)
    try:
        with requests.listening():
            options = importlib.import_module("bigsgan.commands.choosing").parse(words)
            options.requests = requests
            _check_working_directory()
            status = _run(options)
        if unwritten := _unwritten():
            raise unwritten
        return status
    except UserError as error:
        if _print_once(error, already_ended=requests.signal is not None) and is_training(words):
            _tell_ranks(EXIT_BAD_INPUT, error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:  # training saves instead
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would flush again at its end
        return 128 + signal.SIGPIPE
    except Exception as error:
        if is_training(words):
            _tell_ranks(EXIT_FAILED, error)
        raise


def _is_news(record: logging.LogRecord) -> bool:
    """Whether DeepSpeed tells more than that it takes the CPU."""
    return "accelerator to CPU" not in record.getMessage()


def _run(options: argparse.Namespace) -> int:
    """Run the command; turn what a full disk or a limit of this process causes into an error for the user."""
    try:
        return int(options.run(options))
    except (MemoryError, OSError, RuntimeError) as error:
        # The failed text is dropped, so another one is tried.
        found = limits.reached(error) or (_unwritten("\n") if isinstance(error, OSError) else None)
        raise found or error from None


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        remedy = "change to another directory"
        raise UserError("working directory", None, f"cannot be found: {error.strerror}", remedy) from None


def _open_closed_streams() -> None:
    """Let standard streams that are closed lead to nowhere: another file would get their numbers, and their texts."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the file gets the smallest number that is free
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _unwritten(more: str = "") -> UserError | None:
    """Flush standard output, after writing ``more``; return an error for the user if that fails, as on a full disk."""
    try:
        if more:  # even nothing cannot be written to a terminal that has hung up
            sys.stdout.write(more)
        sys.stdout.flush()
        return None
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would flush again at its end
        return UserError("standard output", None, f"cannot be written: {error.strerror}", "free some space there")


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in ``bigsgan ... | head -1``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_once(error: UserError, already_ended: bool) -> bool:
    """Print on rank 0, and return whether this rank did, while the other ranks wait to be terminated.

    Launchers terminate the ranks on rank 0's host as soon as it exits, and those on other hosts later; these ask rank 0
    whether it has printed. A rank that is still alive after that has an error of its own, such as a file that is
    missing only on its host. A rank whose own environment is wrong prints at once, and so does one without a launcher,
    which may be alone. ``already_ended``: a signal to end came while this rank checked its input.
    """
    rank = rank_from_environment()
    is_own = launched.is_own_mistake(error.field)
    if rank > 0 and not is_own:
        if already_ended:
            return False
        if not launched.has_launcher():
            print_error(error)
            return not first_word.rank_zero_spoke(first_word.ALONE_SECONDS)
        if not first_word.is_on_another_host():
            wait_for_termination()
        elif first_word.rank_zero_spoke():
            return False
    print_error(error)
    if rank == 0 and not is_own:
        first_word.tell_other_hosts()
    return True


def _tell_ranks(status: int, error: Exception) -> None:
    """End ranks too that have found no mistake and wait for this one; rank 0 keeps their store, if not torchrun."""
    is_single = number_from_environment("WORLD_SIZE", 1) == 1
    if is_single or launched.keeps_store(rank_from_environment()) or not first_word.meets_store():
        return
    with contextlib.suppress(Exception):  # it may be torch that cannot be imported
        board = importlib.import_module("bigsgan.runtime.board")
        board.tell_ranks(status, f"rank {rank_from_environment()}: {error}")
