"""Ends a command on many ranks after an error: one rank prints the message, all have the same exit status."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from bigsgan.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    FORWARDING_SECONDS,
    UserError,
    end_process,
    print_error,
    wait_for_termination,
)
from bigsgan.monitor.logs import current_log
from bigsgan.runtime import comm, limits, roster

_UNKNOWN_SECONDS = 5.0
"""How long a rank waits to be ended if rank 0 may have printed a message, whose launcher then ends its host's ranks."""

_log = logging.getLogger(__name__)


def exit_status(work: Callable[[], int]) -> int:
    """Do the work on every rank; return its result, 2 after a UserError, or 1 after a lost connection.

    One rank prints the message of a UserError; the others wait until the launcher terminates them, which it does as
    soon as one rank exits. After lost connections, the first rank that lost one prints: it names the ranks of its host
    that are gone, and those that it waited for. Other errors are printed once, with rank, phase and traceback.
    With several ranks, the process ends here after an error: others may be inside a collective with it, and when Python
    shuts torch down meanwhile, its threads may abort the process (status 250 instead of 2; seen once, two CPU ranks).
    """
    try:
        return _limited(work)
    except UserError as error:
        # INFO goes to the log file only: an ERROR would be printed twice.
        _log.info("stopped: %s", error, exc_info=error)
        if comm.claim_message():
            print_error(error)
        else:
            wait_for_termination()
        return _end(EXIT_BAD_INPUT)
    except RuntimeError as error:
        spoke = comm.another_rank_spoke()
        if not (spoke or comm.is_lost_connection(error)):
            _end_failed(error)
            raise
        gone = roster.gone_soon()  # now, to find the ranks that ended first: others follow for this rank's reason
        _log.info("stopped after another rank", exc_info=error)
        if spoke:
            wait_for_termination()
            return _end(EXIT_BAD_INPUT)
        if spoke is None and not roster.any_killed(gone):
            time.sleep(_UNKNOWN_SECONDS)
        return _fail(lost_connection(gone, str(error).partition("\n")[0] or type(error).__name__))
    except Exception as error:
        _end_failed(error)
        raise


def _limited(work: Callable[[], int]) -> int:
    """Do the work; turn an error that a limit of this process has caused into a UserError."""
    try:
        return work()
    except (MemoryError, OSError, RuntimeError) as error:
        if limit := limits.reached(error):
            raise limit from error
        raise


def on_launched_ranks(work: Callable[[], object]) -> int:
    """Do a command's work on every rank of a launcher, or on this process alone; return the exit status."""

    def joined() -> int:
        if os.environ.get("RANK"):
            comm.initialize(comm.PATIENCE_HOURS * 3600)
        work()
        comm.leave()
        return 0

    return exit_status(joined)


def lost_connection(gone: Sequence[int], reason: str) -> str:
    """Return a line that says which ranks are ``gone``, that this rank lost its connection, and what it waited for."""
    lost = f"{_self()} lost its connection in phase '{_phase()}'{_awaited()}: {reason}"
    return f"{ended(gone)}; {lost}" if gone else f"{lost}; another rank or its host failed first"


def ended(gone: Sequence[int]) -> str:
    """Return the text that says that ranks of one host are gone."""
    if not (host := roster.host(gone[0])):
        return f"{roster.named(gone)} ended without a message: killed, or crashed, or its host is gone"
    who = f"{roster.named(gone)} on {host} (process {roster.processes(gone)})"
    lost = "" if host == socket.gethostname() else ", or its host is gone"
    return f"{who} ended without a message: killed, or crashed{lost}"


def _end_failed(error: Exception) -> None:
    """Print which rank failed in which phase, and end this process; return if it is the only rank."""
    if comm.world_size() == 1:
        return
    _log.info("failed", exc_info=error)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    _fail(f"{_self()} failed in phase '{_phase()}': {reason}\n{''.join(traceback.format_exception(error)).rstrip()}")


def _fail(text: str) -> int:
    """Print on the first rank that fails; on others, wait until the launcher ends them. End like ``_end``."""
    if comm.claim_failure():
        print(f"bigsgan: {text}", file=sys.stderr, flush=True)
        if comm.world_size() > 1:
            time.sleep(FORWARDING_SECONDS)
    else:
        wait_for_termination(EXIT_FAILED)
    return _end(EXIT_FAILED)


def _self() -> str:
    return f"{roster.named([comm.rank()])} on {socket.gethostname()}"


def _phase() -> str:
    log = current_log()
    return log.phase if log else "start"


def _awaited() -> str:
    log = current_log()
    awaited = log.awaited() if log else None
    return f", waiting for {roster.named(awaited[1])} in '{awaited[0]}'" if awaited else ""


def _end(status: int) -> int:
    """End this process; return the status if it is the only rank."""
    if comm.world_size() > 1:
        end_process(status)
    return status
