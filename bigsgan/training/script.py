"""What a command does around a run, done for a Python script or a notebook: its launcher, signals, errors and ranks."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from torch.distributed import HashStore

from bigsgan.engines.deepspeed.leftovers import clearing
from bigsgan.monitor.logs import RankLog, current_log
from bigsgan.runtime import board, comm, launched, memory, roll_call, roster
from bigsgan.runtime.compile_clock import CLOCK
from bigsgan.runtime.ending import exit_status
from bigsgan.runtime.signals import STOPPING
from bigsgan.training.stopping import StopRequests
from bigsgan.training.watchdog import Watchdog

_Result = TypeVar("_Result")


class Command:
    """A command, which has all of this itself: its ranks have joined.

    Attributes:
        requests: Requests to stop.
        watchdog: Ends this rank with the others, from before they meet.
    """

    def __init__(self, requests: StopRequests) -> None:
        rank, size, here = launched.rank(), launched.world_size(), HashStore()
        unopened = RankLog(Path(os.devnull), rank, print)
        open_board = board.of_job if size > 1 else lambda: here
        self.requests = requests
        self.watchdog = Watchdog(rank, size, math.inf, unopened, open_board, CLOCK.seconds)

    def on_every_rank(self, work: Callable[[], _Result]) -> _Result:
        """Do something that every rank does."""
        return work()

    def joined(self, where: str, remedy: str) -> AbstractContextManager[None]:
        """Let the ranks meet around the block; texts are those of ``memory.naming_remedy``."""
        return nullcontext()

    @contextmanager
    def meeting(self, where: str, remedy: str) -> Iterator[None]:
        """Let the ranks meet, and part after the block; texts are those of ``memory.naming_remedy``.

        Signals have to be noted around it: until the others know which rank failed, a launcher's may not end this one.
        """
        with self.watchdog.watching(), memory.naming_remedy(where, remedy):
            with roll_call.taken():
                comm.initialize(comm.PATIENCE_HOURS * 3600)  # the watchdog is not as patient
            yield
            comm.barrier()  # none ends before the others have come so far: they would take it for killed

    def listening(self) -> AbstractContextManager[None]:
        """Take note of signals inside the block."""
        return nullcontext()


class Script(Command):
    """A script of the user's own: one process, or the ranks of a launcher."""

    def __init__(self) -> None:
        """Check the launcher's environment.

        Raises:
            UserError: A variable is missing or does not fit; on several ranks the process ends.
        """
        launched.forget_empty()
        self._is_launched = bool(os.environ.get("RANK") or os.environ.get("SLURM_STEP_NUM_TASKS"))
        is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
        self.requests = StopRequests(self._is_launched, STOPPING if is_main else ())
        _on_every_rank(_check_launcher)
        super().__init__(self.requests)

    def on_every_rank(self, work: Callable[[], _Result]) -> _Result:
        """Do something that every rank does; on several ranks, an error ends them all as a command's does."""

        def told() -> _Result:
            with self.watchdog.telling():
                return work()

        return work() if _is_single() else _on_every_rank(told)

    @contextmanager
    def joined(self, where: str, remedy: str) -> Iterator[None]:
        """Let the ranks meet around the block; without a launcher, leave no variable of one behind."""
        atexit.unregister(comm.leave)  # of a run before
        own = [] if self._is_launched else [name for name in launched.VARIABLES if name not in os.environ]
        listening = self.requests.listening() if self._is_launched else nullcontext()
        try:
            with listening, self.meeting(where, remedy):
                clear = clearing()
                yield
                comm.barrier()  # before groups end
                clear()  # not after an error: others may be inside a collective
            if self._is_launched:
                # Not now: DeepSpeed's own groups (0.19.8) outlive one that is destroyed, and a later run needs it.
                atexit.register(comm.leave)
        finally:
            board.begin_anew()
            roster.know(())
            if log := current_log():
                log.close()
            for name in own:
                os.environ.pop(name, None)

    def listening(self) -> AbstractContextManager[None]:
        """Take note of signals inside the block, and without a launcher not outside: a notebook goes on there."""
        return nullcontext() if self._is_launched else self.requests.listening()


def _is_single() -> bool:
    return (os.environ.get("WORLD_SIZE") or "1") == "1"


def _on_every_rank(work: Callable[[], _Result]) -> _Result:
    if _is_single():
        return work()
    found: list[_Result] = []

    def keep() -> int:
        found.append(work())
        return 0

    if status := exit_status(keep):
        sys.exit(status)
    return found[0]


def _check_launcher() -> None:
    launched.take_from_slurm()
    launched.check_launcher()
