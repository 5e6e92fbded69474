"""Opens the store that the ranks of a job meet at once more, for what they tell each other beside their work."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch.distributed as dist

from bigsgan.runtime import launched

OVER = "over"
"""Key of the last word on a job's board: the exit status, and why, of the first rank that ends the job by a failure."""

PATIENCE = timedelta(seconds=10)
JOINING = timedelta(minutes=30)
"""How long ranks wait for the store before they have met: imports may take minutes on a slow file system."""

_GRACE_SECONDS = 1.0  # in which torch's own message comes first

_number = 0
"""Jobs that have ended in this process, which are as many on all ranks."""


def connect(name: str, patience: timedelta = PATIENCE) -> dist.Store:
    """Connect to the meeting place's store, for the keys of one board, whose name is the same on all ranks.

    Raises:
        RuntimeError: Its host does not answer, or another program that listens at its port.
    """
    host, port = launched.meeting_place()
    answers: SimpleQueue[dist.Store | RuntimeError] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))
        except RuntimeError as error:
            answers.put(error)
        except TypeError as error:  # of a port that is too large
            answers.put(RuntimeError(f"nobody can answer at {host}:{port}: {error}"))

    # torch's timeout (2.14) does not hold where a program accepts the connection and then says nothing.
    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=patience.total_seconds() + _GRACE_SECONDS)
    except Empty:
        raise dist.DistNetworkError(f"nobody answers at {host}:{port}") from None
    if isinstance(found, RuntimeError):
        raise found
    return dist.PrefixStore(f"bigsgan/{name}", found)


def of_job(patience: timedelta = JOINING) -> dist.Store:
    """Connect to the board of this start of the job: a launcher may keep its store for the next one, as a script does.

    Raises:
        RuntimeError: Its host does not answer.
    """
    return connect(f"job/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_number}", patience)


def begin_anew() -> None:
    """Let the next job of this process have a board of its own. All ranks call this."""
    global _number
    _number += 1


def last_word(status: int, reason: str) -> str:
    """Return the word that ``OVER`` holds: what a rank ends with."""
    return f"{status} {reason}"


def tell_ranks(status: int, reason: str) -> None:
    """Leave the last word of this rank, which ends before it has met the others; without effect if none is there."""
    with suppress(RuntimeError):
        of_job(PATIENCE).compare_set(OVER, "", last_word(status, reason))
