"""Exchanges findings between ranks through the rendezvous store, without torch's collectives.

So rank 0 knows which ranks have answered even if a check of collectives fails, hangs or dies.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bigsgan.doctor.watch import Watch, last_words
from bigsgan.errors import EXIT_FAILED, end_process
from bigsgan.runtime import launched, roll_call

_MEETING = timedelta(minutes=5)
_POLL_SECONDS = 0.01
_SIGN_SECONDS = 1.5
"""How long ranks that a launcher ends have to report that they live; a rank that does not has died."""

_LATER_SECONDS = 10.0
"""How much longer other ranks wait, so that rank 0 speaks first if all hang."""

_LEAVING_SECONDS = 30.0
_MOST_NAMED = 8


class RankLeftError(Exception):
    """Another rank has ended a check early with an exception."""


class Job:
    """The ranks of a job. All make the same calls in the same order, unless a check raises on some."""

    def __init__(self, store: Any, watching: Any, rank: int, size: int) -> None:
        """Meet the other ranks.

        Args:
            store: torch's store of all ranks; its values may be bytes, though its annotations say strings.
            watching: The same store over a second connection, for use while the first one waits.
            rank: Rank of this process.
            size: Number of ranks.
        """
        self.rank, self.size = rank, size
        self._store, self._watching = store, watching
        self._num_checks, self._num_gathers, self._patience = 0, 0, 0.0
        self._speech = threading.Lock()
        self._watch = Watch(self._speak, (signal.SIGTERM,), self._is_over)
        self.hosts: Sequence[str] = [socket.gethostname()] * size
        with self.check("the meeting of the ranks", _MEETING.total_seconds()):
            self.hosts = self.gather(socket.gethostname())

    @contextmanager
    def check(self, name: str, patience: float) -> Iterator[None]:
        """Begin a check when all ranks have come to it. ``gather`` and ``collect`` belong to the current check."""
        self._patience, self._num_checks, self._num_gathers = patience, self._num_checks + 1, 0
        with self._watch.over(name, patience + (_LATER_SECONDS if self.rank else 0)), self._ending(name):
            self._store.add(f"{self._num_checks}/begun", 1)
            self._wait_for_count(f"{self._num_checks}/begun")
            yield

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank.

        Raises:
            RankLeftError: A rank has ended the check.
        """
        self._num_gathers += 1
        key, left = f"{self._num_checks}/gather{self._num_gathers}", f"{self._num_checks}/found/num"
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        self._store.add(f"{self._num_checks}/gathers/of{self.rank}", 1)
        self._store.add(f"{key}/num", 1)
        if self.rank == 0:
            self._wait_for_count(f"{key}/num", left)
            values = [pickle.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]
            self._store.set(f"{key}/all", pickle.dumps(values))
        else:
            self._wait_for_key(f"{key}/all", left)
        return list(pickle.loads(self._store.get(f"{key}/all")))

    def collect(self, value: Any) -> list[tuple[int, Any]] | None:
        """End a check: on rank 0, return all ranks with their values in order of arrival, elsewhere None."""
        key = f"{self._num_checks}/found"
        place = self._store.add(f"{key}/place", 1)
        self._store.set(f"{key}/{place}", pickle.dumps((self.rank, value)))
        self._store.set(f"{key}/of{self.rank}", b"1")
        self._store.add(f"{key}/num", 1)
        if self.rank:
            return None
        self._wait_for_count(f"{key}/num")
        return [pickle.loads(self._store.get(f"{key}/{place}")) for place in range(1, self.size + 1)]

    def share(self, value: Any) -> Any:
        """Return rank 0's value on all ranks, after ``collect``."""
        key = f"{self._num_checks}/said"
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value))
            return value
        self._wait_for_key(key)
        return pickle.loads(self._store.get(key))

    def is_lost(self, error: Exception) -> bool:
        """Whether an error means that the store is gone, not that a collective of torch failed."""
        if not isinstance(error, dist.DistError):
            return False
        try:
            self._store.check(["0"])
        except dist.DistError:
            return True
        return False

    def leave(self) -> None:
        """Wait until all ranks are done with the store that rank 0 may keep, but not for ever: a rank may have died."""
        self._watch.close()
        self._store.add("left", 1)
        until = time.monotonic() + _LEAVING_SECONDS
        while self.rank == 0 and self._store.add("left", 0) < self.size and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _wait_for_count(self, key: str, left: str = "") -> None:
        self._wait(lambda: bool(self._store.add(key, 0) >= self.size), left)

    def _wait_for_key(self, key: str, left: str = "") -> None:
        self._wait(lambda: bool(self._store.check([key])), left)

    def _wait(self, is_there: Callable[[], bool], left: str) -> None:
        while not is_there():
            if left and self._store.add(left, 0) and not is_there():  # that rank may have passed this call before
                first = pickle.loads(self._store.get(left.replace("num", "1")))[0]
                raise RankLeftError(f"rank {first} has ended the check")
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def _ending(self, check: str) -> Iterator[None]:
        """End the process if the store is gone."""
        try:
            yield
        except dist.DistError:
            self._end_without_store(check)
            end_process(EXIT_FAILED)

    def _end_without_store(self, check: str) -> None:
        """Report on rank 1 that rank 0, which keeps the store, is gone."""
        self._speech.acquire()  # never released: one thread speaks
        if self.rank == 1:
            _print(check, f"rank 0 on {self.hosts[0]} died")
        else:
            time.sleep(_SIGN_SECONDS)

    def _is_over(self) -> bool:
        """Whether a rank has printed the last line."""
        try:
            return bool(self._watching.check(["spoken"]))
        except dist.DistError:
            return False  # the main thread will report it, or the watch when patience ends

    def _speak(self, check: str, signal_name: str) -> None:
        """Print the last line if no other rank does: which ranks have died, or have not answered."""
        self._speech.acquire()
        try:
            if signal_name:
                self._watching.set(f"alive/{self.rank}", b"1")
            if self._watching.add("speaker", 1) == 1:
                self._speak_first(check, signal_name)
            time.sleep(2 * _SIGN_SECONDS)  # keeps the store until the others see that it is over
        except dist.DistError:
            self._speech.release()
            self._end_without_store(check)

    def _speak_first(self, check: str, signal_name: str) -> None:
        if signal_name:
            time.sleep(_SIGN_SECONDS)
        silent = self._silent()
        dead = [rank for rank in silent if signal_name and not self._watching.check([f"alive/{rank}"])]
        if dead:
            _print(check, f"{self._named(dead)} died")
        elif signal_name:
            _print(check, f"ended by {signal_name} without an answer from {self._named(silent)}")
        else:
            _print(check, f"no answer from {self._named(silent)} within {self._patience:.0f} s")
        self._watching.set("spoken", b"1")

    def _silent(self) -> list[int]:
        """Ranks that have not answered and have made the fewest gathers: the others wait for them."""
        key = f"{self._num_checks}/found/of"
        silent = [rank for rank in range(self.size) if not self._watching.check([f"{key}{rank}"])]
        come = {rank: self._watching.add(f"{self._num_checks}/gathers/of{rank}", 0) for rank in silent}
        return [rank for rank in silent if come[rank] == min(come.values())]

    def _named(self, ranks: Sequence[int]) -> str:
        shown = [f"{rank} on {self.hosts[rank]}" for rank in ranks[:_MOST_NAMED]]
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"


def meet() -> Job:
    """Meet the other ranks at the launcher's address.

    Raises:
        UserError: Rank 0 cannot listen there.
    """
    (host, port), rank = launched.meeting_place(), launched.rank()
    serves = launched.keeps_store(rank)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def connect(is_master: bool) -> dist.Store:
        store = dist.TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=_MEETING, multi_tenant=True
        )
        return dist.PrefixStore(f"bigsgan/doctor/{restart}", store)

    with roll_call.taken():
        try:
            store = connect(serves)
        except RuntimeError as error:
            if not serves:
                raise
            raise launched.unfit_meeting_place(host, port, error) from error
        return Job(store, connect(False), rank, launched.world_size())


def _print(check: str, text: str) -> None:
    sys.stderr.write(last_words(check, text))  # in one call: others write there too
    sys.stderr.flush()
