"""Ranks of two hosts that find the same mistake before they have met."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from bigsgan.runtime import first_word
from bigsgan.runtime.launched import LAUNCHERS
from tests.ports import free_port


@pytest.fixture
def port(monkeypatch):
    """A free port, in the environment of two hosts with two ranks each."""
    port = free_port()
    for name, value in {"WORLD_SIZE": 4, "LOCAL_SIZE": 2, "MASTER_PORT": port, "RANK": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def test_other_hosts_learn_that_rank_0_has_spoken(port, capsys):
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(first_word.rank_zero_spoke(10))) for _ in range(2)]
    for thread in asking:  # before rank 0 has come so far
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    first_word.tell_other_hosts(10)
    for thread in asking:
        thread.join()
    assert answers == [True, True]
    assert capsys.readouterr().err == "bigsgan: rank 0 of 4 waits up to 10 s for ranks on other hosts, to end them\n"
    assert time.monotonic() - start < 5  # not longer than the two ranks of the other host need


def test_a_rank_0_that_waits_for_the_others_has_not_spoken(port, monkeypatch):
    monkeypatch.setattr(first_word, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", port)):  # accepts, and says nothing, as a store does
        assert not first_word.rank_zero_spoke(10)


@pytest.mark.slow
def test_nobody_answers(port):
    assert not first_word.rank_zero_spoke(0.5)
    start = time.monotonic()
    first_word.tell_other_hosts(0.5)  # nobody asks
    assert time.monotonic() - start < 10


def test_ranks_of_rank_0s_host_are_ended_by_their_launcher(port, monkeypatch):
    assert first_word.is_on_another_host()
    monkeypatch.setenv("LOCAL_SIZE", "4")  # of a host with more ranks than rank 0's
    assert first_word.is_on_another_host()
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not first_word.is_on_another_host()
    monkeypatch.setenv("WORLD_SIZE", "2")
    first_word.tell_other_hosts(60)  # at once: there is no other host
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not first_word.is_on_another_host()


@pytest.mark.parametrize("launcher", [None, "CROSS_SIZE"])
def test_a_store_may_come_later(port, monkeypatch, launcher):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher:
        monkeypatch.setenv(launcher, "2")
    monkeypatch.setattr(first_word, "ALONE_SECONDS" if launcher else "_STORE_SECONDS", 0)
    later = threading.Timer(0.3, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    servers: list[socket.socket] = []
    later.start()
    try:
        assert first_word.meets_store()
    finally:
        later.join()
        servers[0].close()


def test_a_host_that_does_not_exist_has_no_store(port, monkeypatch):
    monkeypatch.setattr(first_word, "ALONE_SECONDS", 60)
    for host in ("local..host", "", "x" * 80):
        monkeypatch.setenv("MASTER_ADDR", host)
        assert not first_word.meets_store()
