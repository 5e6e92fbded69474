"""Ends a run on all ranks: with one that fails or is gone, and where it hangs, which it names."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from torch.distributed import Store

from bigsgan.errors import EXIT_BAD_INPUT, EXIT_FAILED, FORWARDING_SECONDS, UserError
from bigsgan.monitor import RankLog
from bigsgan.runtime import ending, launched, limits, roster
from bigsgan.runtime.board import OVER as _OVER
from bigsgan.runtime.board import last_word
from bigsgan.runtime.neighbour import Door, Line
from bigsgan.runtime.roster import named
from bigsgan.training.heartbeats import Beat, describe, innermost, waiting

MOVING = frozenset({"checkpoint", "EMA snapshot", "rollback"})
"""Phases that move large files. They count as progress as long as any rank's files move."""

FIRST, FIRST_SECONDS = 4, 300
"""Before its first update a process may stand still for this many timeouts, but no longer than so many seconds.

Kernels are loaded, measured (cuDNN) and compiled (Triton, torch.compile) then; torch reports only torch.compile's.
"""

_LONGEST_COMPILATION_SECONDS = 3600.0
"""Limit for one piece of code: the other ranks wait no longer than this for torch.compile."""

_POLLS = 8
"""Checks per timeout."""

_LONGEST_POLL_SECONDS = 10.0
_SECOND_LOOK_SECONDS = 3.0
"""What seems lost is looked at again after so long, and a rank that has not come yet."""

_SILENT_SECONDS = 30.0
"""A board that has answered and does not for so long is lost, with the host that keeps it; and so is the next rank, if
no connection to it was ever made and it does not beat."""

_LEFT, _LEAVING_SECONDS = "left", 0.2
"""Key of the number of ranks that have read a last word or left one, and how often the board's host looks at it."""

_SILENT_RANKS_WAIT_SECONDS = 3.0
_LONGEST_WRITE_SECONDS = 20.0
_BOARD_PATIENCE_SECONDS = 5.0
_BEATS = 2
"""Polls after which every live process has beaten again; others wait twice as long for the reader's word."""

_BEATING, _TIMES_NAMED = "beating", 3
"""Key of a list of the ranks that beat, and how often a rank appends itself, as a board may not answer once."""


_log = logging.getLogger(__name__)


class Watchdog:
    """A thread that reports to the other ranks, and checks whether they are still there and make progress.

    Whatever ends a rank ends all: it leaves its last word on the board, and the others, which may wait for it on their
    devices, follow. The rank before it in the ring of ranks leaves it for one that is killed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        rank_log: RankLog,
        open_board: Callable[[], Store],
        seconds_compiling: Callable[[], float] = lambda: 0.0,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """Prepare a watch.

        Args:
            timeout: A run hangs if for so many seconds no rank begins a phase or a task of an update, or moves a byte
                of a checkpoint. Until the first update is complete, the limit may be longer, see ``FIRST``. Infinite
                while a run is built, which may take as long as it needs; see ``judging``.
            rank_log: Knows the phase and the bytes moved, and receives the stacks of a rank that hangs. May be
                replaced by assignment.
            open_board: Opens the shared store, as soon as it is there. Called in the thread.
            seconds_compiling: How long this rank has been compiling; 0 if it is not. While a rank compiles, the
                others wait for it.
            end: Ends the process with a status.
        """
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self.rank_log, self._open_board, self._end = rank_log, open_board, end
        self._seconds_compiling = seconds_compiling
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self._count = 0
        # Of bytes moved, phases, and checks that found a rank compiling: this rank's as the others know them, and all.
        self._told, self._totals = Counter[str](), Counter[str]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            with self.telling():
                yield
        finally:
            self._stopped.set()
            # Python (3.11) ends such threads at its exit, and one that is inside of torch's store aborts the process.
            thread.join(2 * _BOARD_PATIENCE_SECONDS)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """End the other ranks too if the block fails; the watch ends then."""
        try:
            yield
        except Exception as error:
            self._stopped.set()
            found = error if isinstance(error, UserError) else limits.reached(error)
            status, said = EXIT_BAD_INPUT if found else EXIT_FAILED, f"{type(error).__name__}: {error}"
            board = _BoundedWaitStore(self._open_board)
            _leave_word(board, status, f"{named([self._rank])}: {found or said}")
            self._leave(board)
            raise

    @contextmanager
    def judging(self, timeout: float) -> Iterator[None]:
        """Inside the block, a run without progress for ``timeout`` seconds hangs."""
        self._timeout = timeout
        try:
            yield
        finally:
            self._timeout = math.inf

    def _leave(self, board: _BoundedWaitStore) -> None:
        """Leave the board; its host goes last, as the others read its word there."""
        left, latest = board.ask("add", _LEFT, 1), time.monotonic() + _LONGEST_POLL_SECONDS + _SECOND_LOOK_SECONDS
        if launched.world_size() == self._world_size and launched.keeps_store(self._rank):
            while left is not None and left < self._world_size and time.monotonic() < latest:
                time.sleep(_LEAVING_SECONDS)
                left = board.ask("add", _LEFT, 0)

    def _watch(self) -> None:
        board = _BoundedWaitStore(self._open_board)
        others, lost, pause = _Others(board, self._rank, self._world_size), "", 0.0
        seen, since = (self._timeout, self._progress(board)), time.monotonic()
        self._beat(board)
        while not self._stopped.wait(pause := self._pause(bool(lost) or others.is_strange)):
            self._beat(board)
            if word := _word(board):
                board.ask("add", _LEFT, 1)
                self._follow(*word)
                return
            before_last, lost = lost, others.lost(pause)
            if lost and lost == before_last:
                self._end_run(board, f"{lost}{waiting(self._beats(board), others.gone)}")
                return
            if (now := (self._timeout, self._progress(board))) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit() and (text := self._diagnosis(board, seen)):
                self._end_run(board, text)
                return

    def _diagnosis(self, board: _BoundedWaitStore, seen: tuple[float, tuple[int, int, int]]) -> str:
        """Return who hangs where, as all ranks find that nothing happens; an empty text if something does, or the end.

        One rank reads the beats of all, and its word ends the others; where it leaves none, the next one reads.
        """
        for turn in count():
            reads = board.ask("add", f"reader/{seen[1][0]}/{turn}", 1) in (1, None)
            before = self._beats(board) if reads else {}
            for _ in range(_BEATS if reads else 2 * _BEATS):
                if self._stopped.wait(self._pause()) or (not reads and _word(board)):
                    return ""
                self._beat(board)
            if (self._timeout, self._progress(board)) != seen:
                return ""
            if reads:
                return describe(before, self._beats(board), self._limit(), self._world_size)
        raise AssertionError("turns do not end")

    def _pause(self, soon: bool = False) -> float:
        return min(_SECOND_LOOK_SECONDS if soon else _LONGEST_POLL_SECONDS, self._timeout / _POLLS)

    def _limit(self) -> float:
        if self.rank_log.has_updated:
            return self._timeout
        return max(self._timeout, min(FIRST * self._timeout, FIRST_SECONDS))

    def _progress(self, board: _BoundedWaitStore) -> tuple[int, int, int]:
        """Return numbers that change as long as the run makes progress."""
        log, totals = self.rank_log, self._totals
        phase, num_phases, moved = log.phase, log.num_phases + log.num_tasks(), log.num_moved
        compiles = 0 < self._seconds_compiling() < _LONGEST_COMPILATION_SECONDS
        # Phases of all ranks: D's ranks wait for images while G's ranks sample or measure, phase by phase.
        own = {"moved": moved, "compiled": self._told["compiled"] + compiles, "phases": num_phases}
        for name, number in own.items():
            grown = number - self._told[name]
            total = board.ask("add", name, grown)
            # One sum over all ranks, as no rank can ask all others. Without an answer it grows by this rank's only.
            totals[name] = totals[name] + grown if total is None else total
            self._told[name] = number
        return totals["phases"], totals["moved"] if phase in MOVING else 0, totals["compiled"]

    def _beat(self, board: _BoundedWaitStore) -> None:
        self._count += 1
        place, waits = innermost(self._main)
        log = self.rank_log
        beat = Beat(self._count, log.num_phases, log.phase, place, waits, socket.gethostname(), log.awaited())
        board.ask("set", f"beat/{self._rank}", json.dumps(beat))
        if self._count <= _TIMES_NAMED:
            board.ask("append", _BEATING, f"{self._rank} ")

    def _follow(self, status: int, reason: str) -> None:
        """End after another rank has reported the end of the run, unless this rank's main thread ends by itself.

        A checkpoint that is being written is waited for, as it is by the rank that ends the run.
        """
        _log.info("another rank has ended the run, with status %d: %s", status, reason)
        if status == EXIT_FAILED:
            self._log_stacks_soon(reason)
        moved, latest = self.rank_log.num_moved, time.monotonic() + _LONGEST_WRITE_SECONDS
        while not self._stopped.wait(_SILENT_RANKS_WAIT_SECONDS):
            if self.rank_log.num_moved == moved or time.monotonic() > latest:
                self._end(status)
                return
            moved = self.rank_log.num_moved

    def _end_run(self, board: _BoundedWaitStore, text: str) -> None:
        speaks = board.ask("add", "speaker", 1) in (1, None)  # the first rank, or any if the store does not answer
        _leave_word(board, EXIT_FAILED, text)
        if speaks:
            with suppress(OSError):  # standard error may be on a full disk: the run has to end all the same
                print(f"bigsgan: {text}", file=sys.stderr, flush=True)
        self._log_stacks_soon(text)
        # Launchers terminate all ranks as soon as one exits, and srun drops late output.
        time.sleep(FORWARDING_SECONDS if speaks else _SILENT_RANKS_WAIT_SECONDS)
        self._end(EXIT_FAILED)

    def _log_stacks_soon(self, text: str) -> None:
        """Log the stacks in a thread, because the file system may be what hangs."""
        logging_ = threading.Thread(target=self._log_stacks, args=(text,), daemon=True)
        logging_.start()
        logging_.join(_SILENT_RANKS_WAIT_SECONDS)

    def _log_stacks(self, text: str) -> None:
        with suppress(OSError), open(self.rank_log.path, "a") as file:
            file.write(f"ending this rank: {text}\n")
            faulthandler.dump_traceback(file)

    def _beats(self, board: _BoundedWaitStore) -> dict[int, Beat]:
        """Return the last beat of each rank that has beaten, in three requests: for a missing key the store waits."""
        if not board.ask("check", [_BEATING]) or not (beating := board.ask("get", _BEATING)):
            return {}
        ranks = sorted({int(rank) for rank in beating.split()})
        beats = board.ask("multi_get", [f"beat/{rank}" for rank in ranks]) or []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, beats, strict=False)}


class _Others:
    """Looks whether ranks are gone: those of this host, the next one in the ring, and the host of the board.

    Attributes:
        gone: The ranks that are.
        is_strange: Whether the next one is not connected yet.
    """

    def __init__(self, board: _BoundedWaitStore, rank: int, world_size: int) -> None:
        self.gone: list[int] = []
        self._board, self._next = board, (rank + 1) % world_size
        self._is_connected, self._silent = False, dict[str, float]()
        self._beat: bytes | None = None
        self._address = ""  # of the next rank, once it has come
        self._line, self._door = Line(), Door() if launched.world_size() == world_size > 1 else None
        if self._door:
            self._board.ask("set", f"door/{rank}", self._door.address)
        self.is_strange = self._door is not None

    def lost(self, pause: float) -> str:
        """Return a text about ranks that are gone, or an empty one. Asked every ``pause`` seconds."""
        if found := roster.gone():
            self.gone = found
            return ending.ended(found)
        came = self._board.ask("check", [f"door/{self._next}"])
        self._is_connected |= came is not None
        if self._is_silent("board", pause, self._is_connected and came is None):
            self.gone = [0]
            return f"{named([0])} does not answer, nor does the store that it or its launcher hosts"
        if self._door and came and not self._address:
            self._address = (self._board.ask("get", f"door/{self._next}") or b"").decode()
        if self._address:
            holds = self._line.holds(self._address)
            self.is_strange = holds is None
            if holds is False or (holds is None and self._is_still(pause)):
                self.gone = [self._next]
                return ending.ended(self.gone)
        return ""

    def _is_still(self, pause: float) -> bool:
        """Whether the next rank has not beaten for long."""
        beat, before = f"beat/{self._next}", self._beat
        self._beat = self._board.ask("get", beat) if self._board.ask("check", [beat]) else None
        return self._is_silent("beat", pause, self._beat == before)

    def _is_silent(self, what: str, pause: float, now: bool) -> bool:
        """Count the seconds of silence, in looks: a process that stands still itself does not hear the others."""
        self._silent[what] = self._silent.get(what, 0.0) + pause if now else 0.0
        return self._silent[what] > _SILENT_SECONDS


def _word(board: _BoundedWaitStore) -> tuple[int, str] | None:
    """Return the status with which a rank has ended the run, and why; None if none has."""
    if board.ask("check", [_OVER]) and (word := board.ask("get", _OVER)):
        status, _, reason = word.decode().partition(" ")
        return int(status), reason
    return None


def _leave_word(board: _BoundedWaitStore, status: int, reason: str) -> None:
    """Leave a last word, unless another rank has."""
    board.ask("compare_set", _OVER, "", last_word(status, reason))


class _BoundedWaitStore:
    """Calls the methods of a store, the board, with a limit on the wait: its host may be what hangs."""

    def __init__(self, open_board: Callable[[], Store]) -> None:
        self._open_board = open_board
        self._board: Store | None = None
        self._busy: threading.Thread | None = None

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the board's answer, or None if it does not answer in time."""
        if self._busy is not None and self._busy.is_alive():
            return None
        answers: list[Any] = []
        self._busy = threading.Thread(target=self._ask, args=(answers, method, arguments), daemon=True)
        self._busy.start()
        self._busy.join(_BOARD_PATIENCE_SECONDS)
        return answers[0] if answers else None

    def _ask(self, answers: list[Any], method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._board = self._board or self._open_board()
            answers.append(getattr(self._board, method)(*arguments))
        except (RuntimeError, OSError) as error:
            _log.info("the shared store does not answer: %s", error)
