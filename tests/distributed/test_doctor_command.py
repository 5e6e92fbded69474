"""The command as a user starts it, with its real checks, under each launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.launching import TIMEOUT, needs_two_devices
from tests.ports import free_port

LAUNCHERS = {"deepspeed": ["--num_gpus", "2", "--no_python"], "torchrun": ["--nproc_per_node", "2", "--no-python"]}
ONLY = ("environment", "layouts.collectives", "layouts.hand_overs")


@needs_two_devices
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("deepspeed", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.nightly)],
)
def test_two_ranks_of_a_launcher(tmp_path, launcher):
    chosen = [word for name in ONLY for word in ("--only", name)]
    words = [*LAUNCHERS[launcher], "--master_port", str(free_port()), "bigsgan", "doctor", "--json", *chosen]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
    done = subprocess.run([launcher, *words], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    record, _ = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{\n"))  # among the launcher's own lines
    assert (record["ranks"], record["failed"]) == (2, [])
    checks = {check["name"]: check for check in record["checks"]}
    for name in ("environment.alike", "environment.paths", *ONLY[1:]):
        assert checks[name]["status"] == "pass", checks[name]
        assert [rank["status"] for rank in checks[name]["ranks"]] == ["pass", "pass"]
    assert checks["environment.alike"]["command"] == "bigsgan doctor --only environment.alike"
