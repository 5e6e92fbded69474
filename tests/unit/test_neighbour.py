"""A rank of any host sees that the next one is gone, and ends all."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from bigsgan.monitor import RankLog
from bigsgan.runtime import neighbour
from bigsgan.runtime.neighbour import Line
from bigsgan.training import watchdog
from bigsgan.training.watchdog import Watchdog
from tests.ports import free_port

OTHER = """
import socket, time
door = socket.create_server(("127.0.0.1", 0), backlog=16)
print("127.0.0.1", door.getsockname()[1], flush=True)
time.sleep(60)
"""


BEAT = '[%d, 0, "start", "", false, "host-a"]'


@pytest.fixture
def other():
    """Another rank's process, which listens at ``address``."""
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True) as process:
        process.address = process.stdout.readline().strip()
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def of_two_ranks(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watchdog, "_LONGEST_POLL_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_SECOND_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_SILENT_RANKS_WAIT_SECONDS", 0.1)


def test_a_process_that_ends_is_lost(other):
    line = Line()
    assert [line.holds(other.address) for _ in range(3)] == [True] * 3
    other.kill()
    other.wait()
    assert [line.holds(other.address) for _ in range(3)] == [False] * 3


def test_one_that_stands_still_is_not(other):
    """As in a call that holds Python's lock for minutes."""
    line = Line()
    other.send_signal(19)
    assert line.holds(other.address)
    time.sleep(0.2)
    assert line.holds(other.address)


def test_a_connection_that_breaks_is_made_again(other):
    line = Line()
    assert line.holds(other.address)
    line._socket.shutdown(socket.SHUT_RDWR)
    assert line.holds(other.address)
    assert not neighbour._has_ended(line._socket)


def test_what_was_never_reached_is_not_known():
    line = Line()
    assert line.holds(f"127.0.0.1 {free_port()}") is None
    assert line.holds("nowhere.invalid 80") is None


def test_the_end_of_a_rank_ends_the_others_while_the_run_is_built(other, tmp_path, capfd):
    """Without limits of time, and before the ranks know each other's processes."""
    board, done, statuses = dist.HashStore(), threading.Event(), []
    board.set("door/0", other.address)

    def end(status):
        statuses.append(status)
        done.set()

    log = RankLog(tmp_path / "rank1.log", 1, print)
    with Watchdog(1, 2, math.inf, log, lambda: board, end=end).watching():
        assert not done.wait(0.5)
        other.kill()
        assert done.wait(30)
    text = "rank 0 ended without a message: killed, or crashed, or its host is gone"
    assert statuses == [1]
    assert capfd.readouterr().err == f"bigsgan: {text}\n"
    assert board.get(watchdog._OVER) == f"1 {text}".encode()
    assert 'File "' in log.path.read_text()  # the stacks


@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_that_ended_before_it_was_reached_is_known_by_its_heart(tmp_path, monkeypatch, beats):
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 0.5)
    board, done = dist.HashStore(), threading.Event()
    board.set("door/0", f"127.0.0.1 {free_port()}")
    board.set("beat/0", BEAT % 0)
    with Watchdog(
        1, 2, math.inf, RankLog(tmp_path / "log", 1, print), lambda: board, end=lambda _: done.set()
    ).watching():
        until = time.monotonic() + (1 if beats else 20)
        while not done.wait(0.1) and time.monotonic() < until:
            if beats:
                board.set("beat/0", BEAT % time.monotonic_ns())
    assert done.is_set() != beats


def test_time_is_limited_only_while_a_run_trains(tmp_path, capfd):
    done, log = threading.Event(), RankLog(tmp_path / "log", 0, print)
    log.phase = "update 0"
    log.phase = "report"
    watch = Watchdog(0, 1, math.inf, log, dist.HashStore, end=lambda _: done.set())
    with watch.watching():
        assert not done.wait(0.2)
        assert watch._limit() == math.inf
        with watch.judging(0.2):
            assert watch._limit() == 0.2
        assert watch._limit() == math.inf


def test_one_of_the_ranks_that_hang_alike_speaks(tmp_path, monkeypatch, capfd):
    """Though all come to the same words."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(watchdog, "describe", lambda *arguments: "all hang")
    board, ended = dist.HashStore(), threading.Semaphore(0)
    logs = [RankLog(tmp_path / f"log{rank}", rank, print) for rank in range(2)]
    dogs = [Watchdog(rank, 2, 0.2, log, lambda: board, end=lambda _: ended.release()) for rank, log in enumerate(logs)]
    with dogs[0].watching(), dogs[1].watching():
        assert [ended.acquire(timeout=30) for _ in dogs] == [True, True]
    assert capfd.readouterr().err == "bigsgan: all hang\n"
