"""Ranks that have not come are named while the others wait."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import time

import torch.distributed as dist

from bigsgan import roll_call


def test_ranks_that_have_not_come_are_named(monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(roll_call, "hosts_of_ranks", lambda: ["node1", "node1", "node2", "node9"])
    with roll_call.taken(patience=0.5):
        store = roll_call._open_store(1)  # as another process does
        store.set("1", "node1")
        own = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        own.set("joining", "shares the port")  # as init_process_group opens it
        time.sleep(1.2)
        said = capsys.readouterr().err
        store.set("2", "node2")
        time.sleep(0.6)
        later = capsys.readouterr().err
    start = f"bigsgan: rank 0 on {socket.gethostname()} still waits for "
    assert said.splitlines()[0] == f"{start}ranks 2 (node2), 3 (node9): look at the messages of that host"
    assert later.splitlines()[-1] == f"{start}rank 3 (node9): look at the messages of that host"
    time.sleep(0.6)
    assert capsys.readouterr().err == ""


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
