"""Two hosts over a real ssh: `deepspeed --hostfile`, and agents that start ranks again as hosts come and go."""

from __future__ import annotations

import pytest
import yaml

from bigsgan import checkpoint
from tests import REPOSITORY
from tests.clusters import laboratory
from tests.tiny import tiny_recipe


@pytest.mark.slow
def test_deepspeed_on_two_hosts(tmp_path):
    tiny_recipe(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    (tmp_path / "wrong").write_text("node1 slots=1\nnode9 slots=1\n")
    script = """
        start="deepspeed --hostfile hosts --master_addr node1 $REPOSITORY/launch/train.py --config tiny.yaml"
        python -m bigsgan.preflight wrong || echo "wrong $?"
        soon() { echo "after less than $((SECONDS / 60 + 1)) minutes"; }
        SECONDS=0
        ${start/hosts/wrong} out=never > never.log 2>&1 || echo "never $? $(soon)"
        SECONDS=0
        $start batch=3 > bad.log 2>&1 || echo "bad $? $(soon)"
        python -m bigsgan.preflight hosts
        $start out=run total_nimg=64 checkpoint_nimg=64
    """
    done = laboratory.run("ssh", script, tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:4] == [
        "wrong 2",
        "never 255 after less than 1 minutes",  # pdsh returns the highest status, which is of its own ssh
        "bad 2 after less than 1 minutes",
        "2 hosts are ready: node1, node2",
    ]
    assert "bigsgan: hosts: node9 cannot be reached: " in (tmp_path / "never.log").read_text()
    assert "bigsgan: wrong: node9 cannot be reached: " in done.stderr
    bad = (tmp_path / "bad.log").read_text()
    assert (
        bad.count("bigsgan: batch: must be a multiple of 2, got 3 (1 micro-batch on 2 ranks for the generator)") == 1
    ), bad
    found = checkpoint.find_intact(tmp_path / "run")
    assert (found.nimg, found.manifest["world_size"]) == (64, 2)
    logs = [(tmp_path / "run" / "logs" / f"rank0000{rank}.log").read_text() for rank in range(2)]
    assert [f"node{rank + 1} rank {rank}" in log for rank, log in enumerate(logs)] == [True, True]


LOSSES = {
    "killed": 'ssh node2 "kill -KILL -1" || true',  # all that runs there
    "cut off": 'ssh node2 "(sleep 0.2; ip link set eth0 down) > /dev/null 2>&1 &"',  # no connection is closed
    "without its launcher": "ssh node2 \"pkill -KILL -f '[b]igsgan.elastic'\"",
}

AGENT = """
    start="python -m bigsgan.elastic --nnodes 1:2 --nproc_per_node 1 --rdzv-id lab --rdzv-endpoint node1:29400"
    start="$start --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=5"
    start="$start -- --config tiny.yaml out=run hang_timeout_seconds=20"
"""
"""Agents look once a second whether another one has come: with a last call of one second, they can miss each other."""
ON_SECOND = """
    on_second() { ssh node2 "cd $PWD; export PATH=$PATH PYTHONPATH=${PYTHONPATH:-}; exec $1" >> second.log 2>&1; }
"""


@pytest.mark.nightly  # CI sees a host that is lost and returns
@pytest.mark.parametrize("loss", LOSSES)
def test_the_hosts_that_are_left_go_on(loss, tmp_path):
    """The second host is lost: the job resumes from its checkpoint with half the ranks, in which the batch divides."""
    tiny_recipe(tmp_path)
    script = f"""
        {AGENT} {ON_SECOND}
        start="$start total_nimg=128 report_nimg=8 checkpoint_nimg=8"
        on_second "$start" &
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
    assert "Resuming with another layout:\n  world_size: 2 -> 1" in first
    if loss == "killed":
        assert "bigsgan: rank 0 on node1 lost its connection in phase '" in first
    found = checkpoint.find_intact(tmp_path / "run")
    assert (found.nimg, found.manifest["world_size"]) == (128, 1)


@pytest.mark.slow
def test_a_lost_host_returns(tmp_path):
    """One host, two, one, and two again, with each change from the newest checkpoint."""
    tiny_recipe(tmp_path)
    script = f"""
        {AGENT} {ON_SECOND}
        start="$start total_nimg=1000000 report_nimg=800 checkpoint_nimg=32"
        told() {{ [ "$(grep -hc "world_size: $1" first.log)" = $2 ]; }}
        $start > first.log 2>&1 &
        first=$!
        wait_for grep -qrs '"world_size": 1' run/checkpoints
        on_second "$start" &
        wait_for told "1 -> 2" 1
        wait_for grep -qrs '"world_size": 2' run/checkpoints
        ssh node2 "pkill -KILL -f '[-]m bigsgan'"
        wait_for told "2 -> 1" 1
        on_second "$start" &
        second=$!
        wait_for told "1 -> 2" 2
        wait_for grep -qrs '"world_size": 2' run/checkpoints
        kill -TERM $first
        wait $first || echo "first $?"
        pkill -TERM -P $second || true
    """
    done = laboratory.run("ssh", script, tmp_path)
    first = (tmp_path / "first.log").read_text()
    print(first[-6000:], (tmp_path / "second.log").read_text()[-6000:])
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "first 85"
    changes = [line.strip() for line in first.splitlines() if line.strip().startswith("world_size: ")]
    assert changes[:3] == ["world_size: 1 -> 2", "world_size: 2 -> 1", "world_size: 1 -> 2"]


def manifest_command(*more: str) -> str:
    """The command of launch/k8s/train.yaml, with the paths, the host and the devices of a laboratory."""
    *_, job = yaml.safe_load_all((REPOSITORY / "launch" / "k8s" / "train.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = " ".join([*container["command"], *more])
    for pod, laboratory_ in (
        ("--nproc_per_node=8", "--nproc_per_node=1"),
        ("bigsgan-0.bigsgan:", "node1:"),
        ("/data/recipe.yaml", "tiny.yaml"),
        ("/data/run", "run"),
    ):
        assert pod in words
        words = words.replace(pod, laboratory_)
    return words


@pytest.mark.slow
def test_pods_of_the_manifest_are_drained_and_refuse_bad_input(tmp_path):
    """A pod that is asked to stop is replaced while the other waits: both end complete. Bad input ends all, once."""
    tiny_recipe(tmp_path)
    script = f"""
        {ON_SECOND}
        both() {{ on_second "$1" & second=$!; $1 > $2 2>&1 & first=$!; }}
        both "{manifest_command("batch=3")}" bad.log
        wait $first || echo "first $?"
        wait $second || echo "second $?"
        mv second.log second_bad.log
        start="{manifest_command("total_nimg=400", "report_nimg=80", "checkpoint_nimg=32")}"
        both "$start" first.log
        wait_for grep -qrs '"world_size": 2' run/checkpoints
        ssh node2 "pkill -TERM -f '[b]igsgan.elastic'"
        wait $second || echo "drained $?"
        on_second "$start"
        wait $first
        echo complete
    """
    done = laboratory.run("ssh", script, tmp_path)
    logs = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    print(*(f"{name}: {text[-4000:]}" for name, text in logs.items()))
    assert done.returncode == 0
    assert done.stdout.split("\n")[:4] == ["first 2", "second 2", "drained 85", "complete"]
    told = [line for name in ("bad", "second_bad") for line in logs[name].splitlines() if "bigsgan: " in line]
    problem = "must be a multiple of 2, got 3 (1 micro-batch on 2 ranks for the generator)"
    assert told == [f"bigsgan: batch: {problem}; set batch=4"]
    assert "stopped by SIGTERM at " in logs["first"]
    assert "Resuming from " in logs["first"]
    assert checkpoint.find_intact(tmp_path / "run").nimg == 400


@pytest.mark.slow
def test_pdsh_returns_when_a_rank_of_another_host_fails(tmp_path):
    """Though pdsh waits for all hosts, and the rank that is left for a message that never comes."""
    tiny_recipe(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    script = """
        start="deepspeed --hostfile hosts --master_addr node1 $REPOSITORY/tests/distributed/failing.py"
        for how in killed refuses; do
            $start build $how -1 --config tiny.yaml out=$how > $how.log 2>&1 || echo "$how $? $(date +%s)"
        done
    """
    done = laboratory.run("ssh", script, tmp_path)
    assert done.returncode == 0
    for line, said in zip(
        done.stdout.splitlines(), (" ended without a message: killed, or", "'images' is planted"), strict=True
    ):
        how, status, now = line.split()
        text = (tmp_path / f"{how}.log").read_text()
        print(text[-4000:])
        (failed,) = [float(each.split()[-2]) for each in text.splitlines() if each.endswith(" fails")]
        assert int(now) - failed < 60
        assert status != "0"
        assert sum("bigsgan: " in each and said in each for each in text.splitlines()) == 1
