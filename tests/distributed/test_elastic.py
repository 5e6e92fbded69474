"""The agent of one host. What several hosts' agents do together, tests/clusters/test_ssh.py shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bigsgan import elastic
from bigsgan.errors import UserError
from tests.distributed.launching import TIMEOUT, needs_two_devices

MESSAGE = "bigsgan: batch: must be a multiple of 2, got 63 (1 micro-batch on 2 ranks for the generator); set batch=64"


@pytest.mark.slow
@needs_two_devices
def test_bad_input_is_told_once_and_not_tried_again(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "bigsgan.elastic", "--standalone", "--nproc_per_node=2", "--", "batch=63"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "bigsgan: " in line] == [MESSAGE]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_options_that_torchrun_does_not_take():
    with pytest.raises(UserError, match=r"^arguments: '--nnodes=0:x' are not valid: "):
        elastic.main(["--nnodes=0:x", "--", "--config=R.yaml"])


@pytest.mark.parametrize(
    "endpoint, conf, expected",
    [
        ("pod-0.pods:29400", "join_timeout=9", "join_timeout=9,is_host=true"),
        ("pod-0.pods:29400", "", "is_host=true"),
        ("pod-0.pods:29400", "is_host=false", "is_host=false"),
        ("pod-1.pods:29400", "join_timeout=9", "join_timeout=9"),
        ("pod-0:29400", "", ""),  # torch compares whole names itself
        ("", "", ""),
    ],
)
def test_the_host_that_the_endpoint_names_has_the_store(monkeypatch, endpoint, conf, expected):
    """Whether or not its name can be looked up yet."""
    started = []
    monkeypatch.setattr(elastic.socket, "gethostname", lambda: "pod-0")
    monkeypatch.setattr(elastic.run, "run", started.append)
    assert elastic.main([f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}", "--", "--config=R.yaml"]) == 0
    assert [options.rdzv_conf for options in started] == [expected]


def test_the_runs_options_stand_behind_two_dashes():
    with pytest.raises(UserError, match=r"^arguments: must contain --; write torchrun's options, then --"):
        elastic.main(["--nnodes=2", "--config=R.yaml"])
