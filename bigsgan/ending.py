"""How a command that runs on many ranks ends where something is wrong: one rank speaks, all exit alike."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bigsgan import comm
from bigsgan.errors import EXIT_BAD_INPUT, UserError, speak, wait_to_be_ended

_log = logging.getLogger(__name__)


def exit_status(work: Callable[[], int]) -> int:
    """Do the work on every rank, and return its result, or 2 after the message of a UserError.

    One rank prints; the others wait to be ended by the launcher, which ends all ranks as soon as one exits.
    """
    try:
        return work()
    except UserError as error:
        # INFO, for the log file alone: as an error it would be printed twice.
        _log.info("stopped: %s", error, exc_info=error)
        if comm.claim_speech():
            speak(error)
        else:
            wait_to_be_ended()
        return EXIT_BAD_INPUT
    except RuntimeError as error:
        if not comm.another_rank_spoke():
            raise
        _log.info("stopped after another rank", exc_info=error)  # its connection broke
        wait_to_be_ended()
        return EXIT_BAD_INPUT
