"""How the doctor's ranks hear of each other, where one is quicker than another or is gone; one process."""

from __future__ import annotations

import pickle
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bigsgan.doctor import ranks
from bigsgan.doctor.ranks import Job, RankLeftError
from bigsgan.errors import UserError


class Racing:
    """A store in which something happens behind the first look."""

    def __init__(self, happens):
        self._real, self._happens = dist.HashStore(), happens

    def __getattr__(self, name):
        return getattr(self._real, name)

    def check(self, keys):
        found, happens = self._real.check(keys), self._happens
        self._happens = lambda store: None
        happens(self._real)
        return found


def a_job(rank, store):
    job = object.__new__(Job)
    job.rank, job.size, job._store, job._num_checks, job._num_gathers = rank, 2, store, 1, 0
    job._watch = SimpleNamespace(close=lambda: None)
    return job


def ends(store):
    """Rank 0 ends the check."""
    store.set("1/found/1", pickle.dumps((0, "found")))
    store.add("1/found/num", 1)


def gathers_and_ends(store):
    store.set("1/gather1/all", pickle.dumps(["a", "b"]))
    ends(store)


def test_a_rank_that_looks_late_has_what_was_gathered():
    assert a_job(1, Racing(gathers_and_ends)).gather("b") == ["a", "b"]


def test_a_rank_that_ends_before_it_gathers_is_told_of():
    with pytest.raises(RankLeftError, match="rank 0 has ended the check"):
        a_job(1, Racing(ends)).gather("b")


def test_a_port_that_is_in_use(monkeypatch):
    monkeypatch.setattr(ranks.roll_call, "taken", nullcontext)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_PORT: {port} cannot be used on .*: another program uses it"):
            ranks.meet()


def test_a_rank_that_is_gone_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(ranks, "_LEAVING_SECONDS", 0.05)
    store = dist.HashStore()
    a_job(0, store).leave()
    assert store.add("left", 0) == 1
