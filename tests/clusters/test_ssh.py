"""Two hosts over a real ssh: `deepspeed --hostfile`, and torchrun's elastic restarts."""

from __future__ import annotations

import pytest

from bigsgan import checkpoint
from tests.clusters import laboratory
from tests.tiny import tiny_recipe


@pytest.mark.slow
def test_deepspeed_on_two_hosts(tmp_path):
    tiny_recipe(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    script = """
        deepspeed --hostfile hosts --master_addr node1 $REPOSITORY/launch/train.py --config tiny.yaml \
            out=run total_nimg=64 checkpoint_nimg=64
    """
    done = laboratory.run("ssh", script, tmp_path)
    assert done.returncode == 0
    found = checkpoint.find_intact(tmp_path / "run")
    assert (found.nimg, found.manifest["world_size"]) == (64, 2)
    logs = [(tmp_path / "run" / "logs" / f"rank0000{rank}.log").read_text() for rank in range(2)]
    assert [f"node{rank + 1} rank {rank}" in log for rank, log in enumerate(logs)] == [True, True]


LOSSES = {
    "killed": 'ssh node2 "kill -KILL -1" || true',  # all that runs there
    "cut off": 'ssh node2 "(sleep 0.2; ip link set eth0 down) > /dev/null 2>&1 &"',  # no connection is closed
    "without its launcher": "ssh node2 \"pkill -KILL -f '[t]orchrun'\"",
}


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=pytest.mark.slow if loss == "killed" else pytest.mark.nightly) for loss in LOSSES],
)
def test_torchrun_goes_on_with_the_hosts_that_are_left(loss, tmp_path):
    """The second host is lost: the job goes on from its checkpoint with half the ranks, in which the batch divides."""
    tiny_recipe(tmp_path)
    script = f"""
        start="torchrun --nnodes 1:2 --nproc_per_node 1 --max-restarts 9 --rdzv-backend c10d --rdzv-id lab"
        start="$start --rdzv-endpoint node1:29400"
        start="$start --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=20"
        start="$start $REPOSITORY/launch/train.py --config tiny.yaml out=run"
        start="$start total_nimg=128 report_nimg=8 checkpoint_nimg=8 hang_timeout_seconds=20"
        ssh node2 "cd $PWD; export PATH=$PATH PYTHONPATH=${{PYTHONPATH:-}}; exec $start" > second.log 2>&1 &
        $start > first.log 2>&1 &
        first=$!
        wait_for grep -qrs '"world_size": 2' run/checkpoints
        {LOSSES[loss]}
        wait $first
    """
    done = laboratory.run("ssh", script, tmp_path)
    first = (tmp_path / "first.log").read_text()
    print(first[-6000:], (tmp_path / "second.log").read_text()[-6000:])
    assert done.returncode == 0
    assert "going on in another layout:\n  world_size: 2 -> 1" in first
    found = checkpoint.find_intact(tmp_path / "run")
    assert (found.nimg, found.manifest["world_size"]) == (128, 1)
