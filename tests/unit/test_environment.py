"""What a launcher's environment may get wrong, met by real processes, and what a process alone listens at."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from deepspeed.accelerator.real_accelerator import SUPPORTED_ACCELERATOR_LIST

from bigsgan.errors import UserError
from bigsgan.runtime import launched
from bigsgan.runtime.launched import LAUNCHERS
from tests import REPOSITORY
from tests.ports import free_port
from tests.tiny import tiny_recipe

TRAIN = [sys.executable, str(REPOSITORY / "launch" / "train.py"), "--config", "tiny.yaml"]
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in NAMES}, **changes}


def refusal(directory, variables):
    """The line which a run in a process of its own is refused by."""
    found = subprocess.run(TRAIN, cwd=directory, env=variables, capture_output=True, text=True, timeout=100)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("bigsgan: ")]
    return line


@pytest.mark.parametrize(
    "changes, field, problem",
    [
        pytest.param(
            {"MASTER_PORT": "taken"}, "MASTER_PORT", "another program uses it, or it is reserved for root; give",
            marks=pytest.mark.nightly,
        ),
        # A network for documentation (RFC 5737).
        ({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "free"}, "MASTER_ADDR", "must be an address of rank 0's host, "),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_ranks_that_could_not_meet_are_told_so(tmp_path, changes, field, problem):
    tiny_recipe(tmp_path)
    with socket.socket() as other:
        port = str(free_port())
        if changes["MASTER_PORT"] == "taken":
            other.bind(("", int(port)))
            other.listen()
        start = time.monotonic()
        line = refusal(tmp_path, environment(**{**RANK, **changes, "MASTER_PORT": port}))
    assert line.startswith(f"bigsgan: {field}: ")
    assert problem in line
    assert time.monotonic() - start < 60
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_an_accelerator_that_is_not_there_is_named(tmp_path):
    tiny_recipe(tmp_path)
    line = refusal(tmp_path, environment(DS_ACCELERATOR="cuda"))
    assert line.startswith("bigsgan: DS_ACCELERATOR: must be a device of ")
    assert line.endswith(", got 'cuda' (an environment variable); run `unset DS_ACCELERATOR`")


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param("", id="by hand", marks=pytest.mark.nightly),
        pytest.param("1", id="launched", marks=pytest.mark.slow),
    ],
)
def test_one_process_listens_at_most_to_itself(tmp_path, world_size):
    tiny_recipe(tmp_path)
    variables = {**RANK, "WORLD_SIZE": "1", "MASTER_PORT": "29511"} if world_size else {}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*TRAIN, "out=run", "report_nimg=8", "total_nimg=1000000"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(**variables), **pipes) as process:
        try:
            report = tmp_path / "run" / "metrics.jsonl"
            until = time.monotonic() + 60
            while not (report.exists() and report.read_text()):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_interfaces_that_exist(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "eth0")])
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([path / "nvidia0"]))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for variable, text, good in [
        ("GLOO_SOCKET_IFNAME", "ib0", True),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("GLOO_SOCKET_IFNAME", "ib", False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth1", False),
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "hsn,eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "=ib0", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "hsn", False),
    ]:
        monkeypatch.setenv(variable, text)
        if good:
            launched.check_launcher()
        else:
            with pytest.raises(UserError, match=f"{variable}: must be a network interface of .*, got '{text}'"):
                launched.check_launcher()
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "hsn")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launched.check_launcher()  # as a site's profile sets it also where there is no GPU


def test_accelerators_are_those_of_deepspeed():
    assert tuple(SUPPORTED_ACCELERATOR_LIST) == launched._ACCELERATORS


def test_a_pods_name_may_come_later(monkeypatch):
    for name, value in {**RANK, "MASTER_PORT": "29500", "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched, "_NAME_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"MASTER_ADDR: must be a host that .* can resolve, got 'no-such-host.invalid'"):
        launched.check_launcher()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    launched.check_launcher()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"RANK": "3"}, id="RANK"),
        pytest.param({"RANK": "1", "LOCAL_WORLD_SIZE": "0"}, id="LOCAL_WORLD_SIZE"),
        pytest.param({"RANK": "1", "LOCAL_RANK": "5", "LOCAL_SIZE": "2"}, id="LOCAL_RANK"),
        pytest.param({"RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "local..host"}, id="MASTER_ADDR"),
    ],
)
def test_a_rank_alone_says_what_is_wrong_and_ends(tmp_path, changes, request):
    """Without what torch says of a store that nobody serves, and without waiting for it."""
    tiny_recipe(tmp_path)
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = {name: value for name, value in environment(**variables | changes).items() if name not in LAUNCHERS}
    with subprocess.Popen([*TRAIN, "out=run"], cwd=tmp_path, env=variables, **pipes) as process:
        line = process.stderr.readline()
        since = time.monotonic()
        out, rest = process.communicate(timeout=100)
    assert (process.returncode, out, rest) == (2, "", "")
    assert line.startswith(f"bigsgan: {request.node.callspec.id}: ")
    assert time.monotonic() - since < 5


def test_whose_mistake_a_variable_is(monkeypatch):
    for name in launched.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    by_hand = ("MASTER_PORT", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert all(map(launched.is_own_mistake, (*by_hand, "SLURM_JOB_ID", "SLURM_PROCID")))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not any(map(launched.is_own_mistake, by_hand))
    assert not launched.is_own_mistake("batch")
