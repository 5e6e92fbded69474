"""Which rank is named when nothing happens any more."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint import files
from bigsgan.config.sections import Checkpoints
from bigsgan.errors import UserError
from bigsgan.monitor import RankLog
from bigsgan.runtime import roster
from bigsgan.training import watchdog
from bigsgan.training.heartbeats import Beat, describe
from bigsgan.training.watchdog import Watchdog
from tests.single_process import entry

UPDATE = Beat(10, 7, "update 6", "gloo/ops.py:3 (all_reduce)", True, "host-a")
REMEDY = "; see the stacks in the ranks' logs; if the run was only slow, raise hang_timeout_seconds"


def later(beat: Beat, **changes: object) -> Beat:
    return beat._replace(number=beat.number + 2, **changes)


def test_a_rank_that_does_not_answer_is_named():
    before = dict.fromkeys(range(3), UPDATE)
    after = {0: later(UPDATE), 1: UPDATE, 2: later(UPDATE)}
    expected = "no progress for 60 s: rank 1 does not answer, last seen in phase 'update 6' on host-a" + REMEDY
    assert describe(before, after, 60, 3) == expected
    del after[1], after[2]  # never heard of, or their host is gone
    assert describe(before, after, 60, 3) == f"no progress for 60 s: ranks 1, 2 do not answer{REMEDY}"


def test_the_rank_that_waits_for_no_other_is_named():
    before = dict.fromkeys(range(3), UPDATE)
    after = {rank: later(UPDATE) for rank in range(3)}
    after[1] = later(UPDATE, place="data/loader.py:99 (_next_batch)", waits=False)
    assert "s: rank 1 in phase 'update 6' at data/loader.py:99 (_next_batch) on host-a;" in describe(
        before, after, 60, 3
    )
    after[1] = later(UPDATE)
    assert "s: ranks 0, 1, 2 in phase 'update 6' at gloo/ops.py:3 (all_reduce)" in describe(before, after, 60, 3)


@pytest.fixture
def two_sides():
    """Rank 0 holds G, ranks 1 and 2 hold D."""
    with subprocess.Popen(["sleep", "60"]) as other:
        own = roster.own("discriminator")
        roster.know([own._replace(holds="generator"), own._replace(process=other.pid), own])
        yield other
        roster.know(())
        other.kill()


JUDGED = ("D judges", [1, 2])
"""What G's rank waits for."""


@pytest.mark.usefixtures("two_sides")
def test_who_waits_for_the_rank_that_hangs_is_named():
    before = dict.fromkeys(range(3), UPDATE)
    after = {rank: later(UPDATE) for rank in range(3)}
    after[0] = later(UPDATE, progress=12, phase="update 6, G pulls back: backward", awaited=JUDGED)  # it sampled too
    after[1] = UPDATE
    assert describe(before, after, 60, 3) == (
        "no progress for 60 s: rank 1 (discriminator) does not answer, last seen in phase 'update 6' on host-a; "
        f"rank 0 (generator) waits for it in 'D judges'{REMEDY}"
    )
    after[1] = later(UPDATE, place="data/loader.py:99 (_next_batch)", waits=False)
    assert describe(before, after, 60, 3) == (
        "no progress for 60 s: rank 1 (discriminator) in phase 'update 6' at data/loader.py:99 (_next_batch) on "
        f"host-a; rank 0 (generator) waits for it in 'D judges'{REMEDY}"
    )
    after[1] = later(UPDATE, progress=6, phase="update 5")
    assert "s: rank 1 (discriminator) in phase 'update 5' at" in describe(before, after, 60, 3)
    after[1] = later(UPDATE)
    text = describe(before, after, 60, 3)
    assert "s: ranks 1, 2 (discriminator) in phase 'update 6' at" in text
    assert "; rank 0 (generator) waits for them in 'D judges'" in text


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_others_devices_wait_is_named(tmp_path, capfd, two_sides):
    """Long before the time of a hang, though no connection of the host breaks."""
    ended, log, board = [], rank_log(tmp_path / "rank00000.log"), Board()
    done = threading.Event()
    log.phase, log.awaited = "update 5", lambda: JUDGED

    def end(status):
        ended.append(status)
        done.set()

    with Watchdog(0, 3, 4.0, log, lambda: board, end=end).watching():
        two_sides.kill()
        assert done.wait(20)
    assert ended == [1]
    printed = capfd.readouterr().err
    assert printed.startswith(
        f"bigsgan: rank 1 (discriminator) on {socket.gethostname()} (process {two_sides.pid}) ended"
    )
    assert printed.endswith(": killed, or crashed; rank 0 (generator) waits for it in 'D judges'\n")


def test_no_thread_is_left_in_the_store(tmp_path):
    """Python would end it at the process's exit, inside of torch, and the process would abort."""

    class Slow(Board):
        def set(self, *arguments):
            time.sleep(0.5)
            super().set(*arguments)

    before, slow = threading.active_count(), Slow()
    with Watchdog(0, 2, 4.0, RankLog(tmp_path / "rank.log", 0, print), lambda: slow).watching():
        time.sleep(0.1)  # its first beat
    assert threading.active_count() == before


@pytest.mark.parametrize("error, status", [(UserError("a", 1, "is bad", "change it"), 2), (KeyError("a"), 1)])
def test_where_one_rank_ends_the_run_the_others_do_not_wait_for_it(tmp_path, monkeypatch, capfd, error, status):
    """Though their main threads may wait for a device, and notice nothing. With the status that it ends with."""
    monkeypatch.setattr(watchdog, "_SILENT_RANKS_WAIT_SECONDS", 0.2)
    board, statuses, done = Board(), [], threading.Event()
    logs = [RankLog(tmp_path / f"rank{rank}.log", rank, print) for rank in range(2)]

    def end(status):
        statuses.append(status)
        done.set()

    with Watchdog(1, 2, 4.0, logs[1], lambda: board, end=end).watching():
        with pytest.raises(type(error)), Watchdog(0, 2, 4.0, logs[0], lambda: board).watching():
            raise error
        assert done.wait(10)
    assert statuses == [status]
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_rank_that_follows_lets_its_file_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_SILENT_RANKS_WAIT_SECONDS", 0.3)
    board, log, ended = Board(), RankLog(tmp_path / "rank1.log", 1, print), threading.Event()
    board.set(watchdog._OVER, "2")
    with Watchdog(1, 2, 4.0, log, lambda: board, end=lambda status: ended.set()).watching():
        for _ in range(30):
            log.moved(1)
            assert not ended.wait(0.05)
        assert ended.wait(10)


@pytest.mark.slow
@pytest.mark.usefixtures("two_sides")
def test_ranks_of_d_may_wait_as_long_as_those_of_g_measure(tmp_path):
    """Phase by phase of the measurement, each soon enough, while D's phase stays what it is."""
    board, ended = Board(), threading.Event()
    measuring, waiting = (RankLog(tmp_path / f"rank{rank}.log", rank, print) for rank in range(2))
    for log in (measuring, waiting):
        log.phase = "update 0"
        log.phase = "update 1"
    logs = enumerate((measuring, waiting))
    dogs = [Watchdog(rank, 2, 0.5, log, lambda: board, end=lambda _: ended.set()) for rank, log in logs]
    with dogs[0].watching(), dogs[1].watching():
        for batch in range(6):
            measuring.phase = f"metrics: batch {batch}"
            assert not ended.wait(0.2)
        assert ended.wait(20)


Board = torch.distributed.HashStore


def rank_log(path: Path) -> RankLog:
    """Of a process that has made an update."""
    log = RankLog(path, 0, print)
    log.phase = "update 0"
    log.phase = "report"
    return log


@pytest.mark.slow
@pytest.mark.parametrize(
    "phases, seconds", [(["build", "samples", "update 7"], 2.0), (["samples", "update 7", "report", "update 8"], 0.5)]
)
def test_until_an_update_is_complete_four_times_as_long_is_allowed(tmp_path, capfd, phases, seconds):
    ended = threading.Event()
    log = RankLog(tmp_path / "rank00000.log", 0, print)
    for phase in phases:
        log.phase = phase
    begun = time.monotonic()
    with Watchdog(0, 1, 0.5, log, Board, end=lambda _: ended.set()).watching():
        assert ended.wait(60)
    assert time.monotonic() - begun > seconds
    assert f"no progress for {seconds:.0f} s: rank 0 in phase '{phases[-1]}' at" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("progresses", [True, False])
def test_only_a_phase_that_lasts_ends_the_run(tmp_path, capfd, progresses):
    ended = threading.Event()
    log = rank_log(tmp_path / "rank00000.log")
    watchdog = Watchdog(0, 1, 0.4, log, Board, end=lambda _: ended.set())
    log.phase = "update 3"
    with watchdog.watching():
        for _ in range(20):
            time.sleep(0.05)
            if progresses:
                log.phase = "update 4"
    assert ended.wait(0 if progresses else 10) != progresses
    printed = capfd.readouterr().err
    if progresses:
        assert printed == ""
        return
    assert printed.startswith("bigsgan: no progress for 0 s: rank 0 in phase 'update 3' at unit/test_watchdog.py:")
    assert "test_only_a_phase_that_lasts_ends_the_run" in printed
    assert "test_watchdog.py" in (tmp_path / "rank00000.log").read_text()


def test_one_rank_reads_what_the_others_do_and_all_tell_the_same(tmp_path, capfd, monkeypatch):
    """However many hang, of which one does not beat any more: what the store is asked grows with the ranks alone."""
    num_ranks = 12
    monkeypatch.setattr(watchdog, "FORWARDING_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "_SILENT_RANKS_WAIT_SECONDS", 0.1)
    asked, ended, board = Counter(), threading.Semaphore(0), Board()
    board.set("beat/0", json.dumps(UPDATE))
    board.set(watchdog._BEATING, "0 ")

    class Counting:
        def __getattr__(self, method):
            asked[method] += 1
            return getattr(board, method)

    with ExitStack() as stack:
        logs = [rank_log(tmp_path / f"rank{rank}.log") for rank in range(num_ranks)]
        for rank in range(1, num_ranks):
            dog = Watchdog(rank, num_ranks, 1.0, logs[rank], Counting, end=lambda _: ended.release())
            stack.enter_context(dog.watching())
        for _ in range(1, num_ranks):
            assert ended.acquire(timeout=60)
    assert asked["multi_get"] == 2
    assert sum(asked.values()) < 200 * num_ranks
    expected = f"no progress for 1 s: rank 0 does not answer, last seen in phase 'update 6' on host-a{REMEDY}"
    assert capfd.readouterr().err == f"bigsgan: {expected}\n"
    assert all(f"ending this rank: {expected}" in log.path.read_text() for log in logs[1:])


def test_where_the_reader_does_not_tell_the_next_rank_reads(tmp_path, capfd):
    log, board, ended = rank_log(tmp_path / "rank00000.log"), Board(), threading.Event()
    board.set("reader/2/0", "1")  # of the rank's two phases
    with Watchdog(0, 1, 0.4, log, lambda: board, end=lambda _: ended.set()).watching():
        assert ended.wait(60)
    assert "no progress for 0 s: rank 0 in phase 'report' at" in capfd.readouterr().err
    assert board.get("reader/2/0") == b"2"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["this rank", "another"])
def test_the_ranks_wait_for_one_that_compiles(tmp_path, monkeypatch, compiler):
    ended, compiled = threading.Event(), threading.Event()
    log = rank_log(tmp_path / "rank00000.log")

    class Shared(Board):
        def add(self, key: str, num: int) -> int:  # another rank has looked since the last time
            elsewhere = key == "compiled" and compiler == "another" and not compiled.is_set()
            return super().add(key, num + elsewhere)

    def seconds() -> float:
        return 0.0 if compiled.is_set() or compiler == "another" else 1.0

    log.phase = "update 0"
    with Watchdog(0, 1, 0.4, log, Shared, seconds, end=lambda _: ended.set()).watching():
        assert not ended.wait(1.2)
        compiled.set()
        assert ended.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("phase, mover", [("checkpoint", "this rank"), ("rollback", "another")])
def test_files_may_take_long_as_long_as_they_move(tmp_path, capfd, phase, mover):
    ended, moving = threading.Event(), threading.Event()
    log, board = rank_log(tmp_path / "rank00000.log"), Board()

    def move() -> None:
        while not moving.wait(0.05):
            log.moved(1) if mover == "this rank" else board.add("moved", 1)

    log.phase = phase
    with Watchdog(0, 1, 0.4, log, lambda: board, end=lambda _: ended.set()).watching():
        mover_thread = threading.Thread(target=move)
        mover_thread.start()
        assert not ended.wait(1.2)
        moving.set()
        mover_thread.join()
        assert ended.wait(10)
    assert f"no progress for 0 s: rank 0 in phase '{phase}' at " in capfd.readouterr().err


def test_what_moves_beside_an_update_does_not_keep_it_alive(tmp_path):
    """The save before may still be written then."""
    ended = threading.Event()
    log = rank_log(tmp_path / "rank00000.log")
    log.phase = "update 5"
    with Watchdog(0, 1, 0.2, log, Board, end=lambda _: ended.set()).watching():
        until = time.monotonic() + 10
        while not ended.wait(0.02) and time.monotonic() < until:
            log.moved(1)
    assert ended.is_set()


@pytest.mark.slow
def test_a_disk_that_is_slow_is_told_from_one_that_hangs(tmp_path, monkeypatch, capfd):
    """A save in many pieces, each soon enough; and one whose second piece never comes back from the disk."""
    ended, gone = threading.Event(), threading.Event()
    log = rank_log(tmp_path / "rank00000.log")
    saver = checkpoint.Saver(tmp_path, checkpoint.SingleProcess(), Checkpoints(), log.moved)
    state = {"generator": entry({"a": torch.rand(300)})}
    description = checkpoint.Description({}, {}, {})
    syncs = []

    def fdatasync(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 20:
            gone.wait(60)
        time.sleep(0.08)

    monkeypatch.setattr(files, "_PIECE_BYTES", 120)
    monkeypatch.setattr(files.os, "fdatasync", fdatasync)
    log.phase = "checkpoint"
    with Watchdog(0, 1, 0.5, log, Board, end=lambda _: ended.set()).watching():
        assert saver.save(64, state, description)
        assert saver.finish()  # 11 pieces of 0.08 s
        assert len(syncs) == 11
        assert not ended.is_set()
        log.phase = "update 1"
        log.phase = "checkpoint"
        assert saver.save(128, state, description)
        assert ended.wait(20)
    assert len(syncs) == 20
    assert "rank 0 in phase 'checkpoint' at " in capfd.readouterr().err
    gone.set()
    assert saver.finish()


def test_a_board_that_is_gone_does_not_keep_a_run_from_ending(tmp_path, capfd):
    class Gone(Board):
        def set(self, key: str, text: str = "") -> None:
            raise RuntimeError("connection reset")

        check = add = set  # type: ignore[assignment]

    ended = threading.Event()
    log = rank_log(tmp_path / "rank00000.log")
    with Watchdog(0, 2, 0.2, log, Gone, end=lambda _: ended.set()).watching():
        assert ended.wait(10)
    assert "rank 0 does not answer, nor does the store that it or its launcher hosts" in capfd.readouterr().err


@pytest.mark.parametrize("timeout, first", [(6, 24), (60, 240), (300, 300), (480, 480), (86400, 86400)])
def test_a_hang_before_the_first_update_is_told_within_minutes(tmp_path, timeout, first):
    log = RankLog(tmp_path / "rank00000.log", 0, print)
    watch = Watchdog(0, 2, timeout, log, Board)
    assert watch._limit() == first
    log.phase = "update 0"
    assert watch._limit() == first
    log.phase = "report"
    assert watch._limit() == timeout
