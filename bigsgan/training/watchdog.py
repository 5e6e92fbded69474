"""Ends a hanging run, and reports which rank hangs where."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

from torch.distributed import Store

from bigsgan.errors import EXIT_BAD_INPUT, EXIT_FAILED, FORWARDING_SECONDS, UserError
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm, ending, roster
from bigsgan.runtime.roster import MOST_NAMED, holds, named

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
_SILENT_RANKS_WAIT_SECONDS = 3.0
_LONGEST_WRITE_SECONDS = 20.0
_BOARD_PATIENCE_SECONDS = 5.0
_WAITING_IN = ("torch/distributed", "deepspeed/comm", "bigsgan/runtime/comm", "bigsgan/engines/pipeline/transport")
_BEATS = 2
"""Polls after which every live process has beaten again; others wait twice as long for what the reader tells."""

_BEATING, _TIMES_NAMED = "beating", 3
"""Key of a list of the ranks that beat, and how often a rank appends itself, as a board may not answer once."""

_TOLD = "told"
"""Key of the text that says who hangs where."""

_OVER = "over"
"""Key of the exit status that a rank leaves when it ends the run, for ranks that still wait for it on their devices."""

_REMEDY = "; see the stacks in the ranks' logs; if the run was only slow, raise hang_timeout_seconds"

_log = logging.getLogger(__name__)


class _Beat(NamedTuple):
    """A rank's heartbeat."""

    number: int  # grows as long as the process lives
    progress: int  # number of phases so far
    phase: str  # the current phase
    place: str  # innermost line of the main thread
    waits: bool  # whether that line waits for other ranks
    host: str  # name of the process's host
    # the phase that it waits for and the ranks that compute it; None if it waits for no particular ranks
    awaited: tuple[str, list[int]] | None = None


class Watchdog:
    """A thread that checks whether this rank's phase still changes, and reports to the other ranks."""

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
                of a checkpoint. Until the first update is complete, the limit may be longer, see ``FIRST``.
            rank_log: Knows the phase and the bytes moved, and receives the stacks of a rank that hangs.
            open_board: Opens the shared store. Called in the thread, before the watch begins.
            seconds_compiling: How long this rank has been compiling; 0 if it is not. While a rank compiles, the
                others wait for it.
            end: Ends the process with a status.
        """
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._rank_log, self._open_board, self._end = rank_log, open_board, end
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
            yield
        except Exception as error:
            self._stopped.set()
            if not (isinstance(error, RuntimeError) and comm.is_lost_connection(error)):
                status = EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED
                _BoundedWaitStore(self._open_board).ask("set", _OVER, str(status))
            raise
        finally:
            self._stopped.set()

    def _watch(self) -> None:
        board = _BoundedWaitStore(self._open_board)
        seen, since, gone = self._progress(board), time.monotonic(), list[int]()
        pause = min(_LONGEST_POLL_SECONDS, self._timeout / _POLLS)
        self._beat(board)
        while not self._stopped.wait(pause):
            self._beat(board)
            if board.ask("check", [_OVER]) and (status := board.ask("get", _OVER)):
                self._follow(int(status))
                return
            before_last, gone = gone, roster.gone()
            if (now := self._progress(board)) != seen:
                seen, since = now, time.monotonic()
            elif gone and gone == before_last:
                self._end_run(board, f"{ending.ended(gone)}{_waiting(self._beats(board), gone)}")
                return
            elif time.monotonic() - since > self._limit() and (text := self._diagnosis(board, seen, pause)):
                self._end_run(board, text)
                return

    def _diagnosis(self, board: _BoundedWaitStore, seen: tuple[int, int, int], pause: float) -> str:
        """Return who hangs where, as all ranks find that nothing happens; an empty text if something does, or the end.

        One rank reads the beats of all, and tells the others; where it does not, the next one reads.
        """
        for turn in count():
            reads = board.ask("add", f"reader/{seen[0]}/{turn}", 1) in (1, None)
            before = self._beats(board) if reads else {}
            for _ in range(_BEATS if reads else 2 * _BEATS):
                if self._stopped.wait(pause):
                    return ""
                self._beat(board)
                if not reads and board.ask("check", [_TOLD]) and (told := board.ask("get", _TOLD)):
                    return str(told, "utf-8")
            if self._progress(board) != seen:
                return ""
            if reads:
                text = describe(before, self._beats(board), self._limit(), self._world_size)
                board.ask("set", _TOLD, text)
                return text
        raise AssertionError("turns do not end")

    def _limit(self) -> float:
        if self._rank_log.has_updated:
            return self._timeout
        return max(self._timeout, min(FIRST * self._timeout, FIRST_SECONDS))

    def _progress(self, board: _BoundedWaitStore) -> tuple[int, int, int]:
        """Return numbers that change as long as the run makes progress."""
        log, totals = self._rank_log, self._totals
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
        place, waits = _innermost(self._main)
        log = self._rank_log
        beat = _Beat(self._count, log.num_phases, log.phase, place, waits, socket.gethostname(), log.awaited())
        board.ask("set", f"beat/{self._rank}", json.dumps(beat))
        if self._count <= _TIMES_NAMED:
            board.ask("append", _BEATING, f"{self._rank} ")

    def _follow(self, status: int) -> None:
        """End after another rank has reported the end of the run, unless this rank's main thread ends by itself.

        A checkpoint that is being written is waited for, as it is by the rank that ends the run.
        """
        _log.info("another rank has ended the run, with status %d", status)
        moved, latest = self._rank_log.num_moved, time.monotonic() + _LONGEST_WRITE_SECONDS
        while not self._stopped.wait(_SILENT_RANKS_WAIT_SECONDS):
            if self._rank_log.num_moved == moved or time.monotonic() > latest:
                self._end(status)
                return
            moved = self._rank_log.num_moved

    def _end_run(self, board: _BoundedWaitStore, text: str) -> None:
        speaks = board.ask("add", "speaker", 1) in (1, None)  # the first rank, or any if the store does not answer
        if speaks:
            with suppress(OSError):  # standard error may be on a full disk: the run has to end all the same
                print(f"bigsgan: {text}", file=sys.stderr, flush=True)
        # In a thread, because the file system may be what hangs.
        logging_ = threading.Thread(target=self._log_stacks, args=(text,), daemon=True)
        logging_.start()
        logging_.join(_SILENT_RANKS_WAIT_SECONDS)
        # Launchers terminate all ranks as soon as one exits, and srun drops late output.
        time.sleep(FORWARDING_SECONDS if speaks else _SILENT_RANKS_WAIT_SECONDS)
        self._end(EXIT_FAILED)

    def _log_stacks(self, text: str) -> None:
        with open(self._rank_log.path, "a") as file:
            file.write(f"ending this rank: {text}\n")
            faulthandler.dump_traceback(file)

    def _beats(self, board: _BoundedWaitStore) -> dict[int, _Beat]:
        """Return the last beat of each rank that has beaten, in three requests: for a missing key the store waits."""
        if not board.ask("check", [_BEATING]) or not (beating := board.ask("get", _BEATING)):
            return {}
        ranks = sorted({int(rank) for rank in beating.split()})
        beats = board.ask("multi_get", [f"beat/{rank}" for rank in ranks]) or []
        return {rank: _Beat(*json.loads(text)) for rank, text in zip(ranks, beats, strict=False)}


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


def describe(before: dict[int, _Beat], after: dict[int, _Beat], timeout: float, world_size: int) -> str:
    """Return one line that names the hanging ranks, and where they hang, after ``timeout`` seconds without progress.

    The line ends with the ranks that wait for these, and their phases. Beats are given by rank; every live process
    beats between ``before`` and ``after``. There are none if the board does not answer.
    """
    silent = [rank for rank in range(world_size) if rank not in after or before.get(rank) == after[rank]]
    text = f"no progress for {timeout:.0f} s: "
    if not after:  # rank 0 hosts the store, or under torchrun its launcher does
        return f"{text}{named([0])} does not answer, nor does the store that it or its launcher hosts{_REMEDY}"
    if silent:
        last = after.get(silent[0])
        where = f", last seen in phase '{last.phase}' on {last.host}" if last else ""
        does = "does" if len(silent) == 1 else "do"
        return f"{text}{named(silent)} {does} not answer{where}{_waiting(after, silent)}{_REMEDY}"
    answering = list(after)
    shown = _behind(after) or [rank for rank in answering if not after[rank].waits]
    shown = shown or [rank for rank in answering if after[rank].awaited is None] or answering
    parts = []
    for place in dict.fromkeys((after[rank].phase, after[rank].place) for rank in shown):
        there = [rank for rank in shown if (after[rank].phase, after[rank].place) == place]
        parts.append(f"{named(there)} in phase '{place[0]}' at {place[1]} on {after[there[0]].host}")
    return text + "; ".join(parts[:MOST_NAMED]) + _waiting(after, shown) + _REMEDY


def _behind(beats: dict[int, _Beat]) -> list[int]:
    """Return ranks with fewer phases than others that hold the same network; only G's ranks sample, for example."""
    found = []
    for network in dict.fromkeys(map(holds, beats)):
        progress = {rank: beat.progress for rank, beat in beats.items() if holds(rank) == network}
        least = min(progress.values())
        if least < max(progress.values()):
            found += [rank for rank, num in progress.items() if num == least]
    return sorted(found)


def _waiting(beats: dict[int, _Beat], ranks: list[int]) -> str:
    """Say which ranks wait for ``ranks``, and for which phase."""
    by_phase: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        if rank not in ranks and beat.awaited and not set(beat.awaited[1]).isdisjoint(ranks):
            by_phase.setdefault(beat.awaited[0], []).append(rank)
    them = "it" if len(ranks) == 1 else "them"
    waiting = [f"; {named(o)} wait{'s' * (len(o) == 1)} for {them} in '{phase}'" for phase, o in by_phase.items()]
    return "".join(waiting)


def _innermost(thread: int) -> tuple[str, bool]:
    """Return the current line of a thread, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "the end", False
    path, line, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    files = [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
    waits = any(part in file for file in files for part in _WAITING_IN)
    return f"{'/'.join(path.split('/')[-2:])}:{line} ({name})", waits
