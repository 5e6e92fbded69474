"""A rank that ends before it has met the others ends those that wait for it."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from bigsgan import cli
from bigsgan.errors import UserError
from bigsgan.monitor import RankLog
from bigsgan.runtime import board, comm
from bigsgan.training import watchdog
from bigsgan.training.watchdog import Watchdog
from tests.ports import free_port


@pytest.fixture
def store(monkeypatch):
    """The store of rank 0, which waits for rank 1; this is rank 1 on another host."""
    port = free_port()
    environment = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watchdog, "_LONGEST_POLL_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_SECOND_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_SILENT_RANKS_WAIT_SECONDS", 0.1)
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)


@pytest.mark.timeout(60)
def test_a_port_that_is_none_is_told_at_once(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(RuntimeError, match="99999"):
        board.connect("test", board.JOINING)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(dist.DistError):  # by which a lost connection is told from a fault
        board.connect("test", timedelta(seconds=0.2))


@pytest.mark.parametrize("kind, status", [(UserError, 2), (KeyError, 1)])
def test_what_one_rank_alone_refuses_ends_the_others(store, monkeypatch, tmp_path, capfd, kind, status):
    error = UserError("data.root", "images", "does not exist", "give another") if kind is UserError else KeyError("a")

    def run(options):
        raise error

    monkeypatch.setattr(cli, "_run", run)
    statuses, done = [], threading.Event()

    def end(number):
        statuses.append(number)
        done.set()

    with Watchdog(0, 2, math.inf, RankLog(tmp_path / "log", 0, print), board.of_job, end=end).watching():
        if kind is UserError:
            assert cli.main(["train"]) == 2
        else:
            with pytest.raises(KeyError):
                cli.main(["train"])
        assert done.wait(30)
    assert statuses == [status]
    assert capfd.readouterr().err.count("bigsgan: data.root: 'images' does not exist; give another") == (status == 2)


@pytest.mark.usefixtures("store")
def test_one_rank_speaks_before_the_ranks_have_met():
    assert [comm.claim_message(), comm.claim_message()] == [True, False]


def test_a_restart_has_a_board_of_its_own(store, monkeypatch):
    board.tell_ranks(1, "rank 1: first")
    board.tell_ranks(2, "rank 1: second")
    assert board.of_job().get(board.OVER) == b"1 rank 1: first"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not board.of_job().check([board.OVER])


def test_without_a_store_nothing_is_told(store, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(board, "PATIENCE", board.PATIENCE / 100)
    begun = time.monotonic()
    board.tell_ranks(1, "rank 1: nobody hears")
    assert time.monotonic() - begun < 10
