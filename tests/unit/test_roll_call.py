"""Ranks that have not come are named while the others wait."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from bigsgan.errors import UserError
from bigsgan.preflight import Problem
from bigsgan.runtime import roll_call
from tests.ports import free_port


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        ({"node9": True}, ["node9"]),
        ({"node2": True, "node9": True}, ["node2", "node9"]),
        ({"node2": False, "node9": True}, ["node9"]),  # a host that is only slow may still come
        ({"node1": True, "node9": True}, []),  # ssh does not even lead to this host: it says nothing of others
    ],
)
def test_a_host_that_cannot_run_ranks_is_told_from_one_that_is_slow(found, ends, monkeypatch):
    def look_at(hosts):
        assert hosts == ["node1", "node2", "node9"]
        return [Problem(host, "has no python", found[host]) for host in hosts if host in found]

    monkeypatch.setattr(roll_call.preflight, "look_at", look_at)
    hosts = ["node1", "node1", "node2", "node9", "node9"]
    assert [problem.host for problem in roll_call._hosts_without_ranks([1, 2, 3, 4], hosts)] == ends
    assert roll_call._hosts_without_ranks([1, 2, 3], []) == []  # another launcher
    assert roll_call._hosts_without_ranks([1], hosts) == []


def test_a_host_whose_ranks_come_meanwhile_ends_nothing(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(roll_call.os, "_exit", ended.append)
    monkeypatch.setattr(roll_call, "print_error", lambda error: ended.append(str(error)))
    monkeypatch.setattr(roll_call, "_open_store", lambda rank: store)
    monkeypatch.setattr(roll_call, "hosts_of_ranks", lambda: ["node1", "node2", "node3"])
    monkeypatch.setattr(roll_call.launched, "world_size", lambda: 3)
    monkeypatch.setattr(roll_call.launched, "rank", lambda: 0)
    store, joined = dist.HashStore(), threading.Event()

    def look_at(hosts):
        store.set("1", "node2")
        joined_later.start()
        return [Problem("node2", "cannot be reached", sure=True), Problem("node3", "has no python", sure=True)]

    joined_later = threading.Timer(0.5, joined.set)
    monkeypatch.setattr(roll_call.preflight, "look_at", look_at)
    roll_call._take(joined, 0.1, 60)
    assert "is waiting for rank 2 (node3): see" in capsys.readouterr().err  # before another minute
    assert [str(what).partition(";")[0] for what in ended] == ["hosts: node3 has no python", "2"]


def test_without_ssh_nothing_is_known_of_hosts(monkeypatch):
    def look_at(hosts):
        raise UserError("ssh", None, "is not installed", "install an ssh client")

    monkeypatch.setattr(roll_call.preflight, "look_at", look_at)
    assert roll_call._hosts_without_ranks([1], ["node1", "node2"]) == []


@pytest.mark.slow
def test_ranks_that_have_not_come_are_named(monkeypatch, capsys):
    port = free_port()
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(roll_call, "hosts_of_ranks", lambda: ["node1", "node1", "node2", "node9"])
    monkeypatch.setattr(roll_call.preflight, "look_at", lambda hosts: [Problem("node2", "does not answer", sure=False)])
    with roll_call.taken(first_look=0.3, patience=0.5):
        store = roll_call._open_store(1)  # as another process does
        store.set("1", "node1")
        own = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        own.set("joining", "shares the port")  # as init_process_group opens it
        start = f"bigsgan: rank 0 on {socket.gethostname()} is waiting for "
        first, last = (f"{start}{ranks}: see the messages of that host" for ranks in LATE)
        said = lines_until(first, capsys)
        store.set("2", "node2")
        said += lines_until(last, capsys)
    assert list(dict.fromkeys(said)) == [first, last]
    time.sleep(0.6)
    capsys.readouterr()  # one may have been on its way
    time.sleep(1.2)
    assert capsys.readouterr().err == ""


LATE = ["ranks 2 (node2), 3 (node9)", "rank 3 (node9)"]


def lines_until(wanted: str, capsys: pytest.CaptureFixture) -> list[str]:
    """What is printed on standard error until a line is."""
    said, until = "", time.monotonic() + 60
    while wanted not in said.splitlines():
        assert time.monotonic() < until, said
        time.sleep(0.05)
        said += capsys.readouterr().err
    return list(filter(None, said.splitlines()))


def test_deepspeed_has_told_its_processes_of_the_hosts():
    info = base64.urlsafe_b64encode(json.dumps({"node1": [0, 1], "node2": [0]}).encode()).decode()
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", f"--world_info={info}", "more"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"\n"  # before that its command line may be this process's
            assert roll_call.hosts_of_ranks(process.pid) == ["node1", "node1", "node2"]
        finally:
            process.kill()
    assert roll_call.hosts_of_ranks(1) == []
