"""Ends a command on many ranks after an error: one rank prints the message, all have the same exit status."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable

from bigsgan.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    UserError,
    end_process,
    print_error,
    wait_for_termination,
)
from bigsgan.monitor.logs import current_phase
from bigsgan.runtime import comm

_UNKNOWN_SECONDS = 5.0
"""How long a rank waits to be ended where rank 0 may have spoken, whose launcher then ends its host's ranks."""

_log = logging.getLogger(__name__)


def exit_status(work: Callable[[], int]) -> int:
    """Do the work on every rank; return its result, 2 after a UserError, or 1 after a lost connection.

    One rank prints the message of a UserError; the others wait until the launcher terminates them, which it does as
    soon as one rank exits. A rank that loses its connection and is not terminated in time prints its host and phase.
    One of several ranks ends here after an error: others may be inside a collective with it, and where Python takes
    torch down meanwhile, torch's threads may abort the process (status 250 instead of 2; seen once, of two CPU ranks).
    """
    try:
        return work()
    except UserError as error:
        # INFO, for the log file only: as an error it would be printed twice.
        _log.info("stopped: %s", error, exc_info=error)
        if comm.claim_speech():
            print_error(error)
        else:
            wait_for_termination()
        return _end(EXIT_BAD_INPUT)
    except RuntimeError as error:
        spoke = comm.another_rank_spoke()
        if not (spoke or comm.is_lost_connection(error)):
            raise
        _log.info("stopped after another rank", exc_info=error)
        if spoke:
            wait_for_termination()
            return _end(EXIT_BAD_INPUT)
        if spoke is None:
            time.sleep(_UNKNOWN_SECONDS)
        reason = str(error).splitlines()[0]
        where = f"rank {comm.rank()} on {socket.gethostname()} lost its connection in phase '{current_phase()}'"
        print(f"bigsgan: {where}: {reason}; another rank or its host failed first", file=sys.stderr, flush=True)
        return _end(EXIT_FAILED)


def _end(status: int) -> int:
    """End one of several ranks; return the status of one alone."""
    if comm.world_size() > 1:
        end_process(status)
    return status
