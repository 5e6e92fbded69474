"""launch/slurm/train.sbatch, unmodified, on a real Slurm of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bigsgan import checkpoint
from tests.clusters import laboratory
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.slow

TOTAL = 400
SBATCH = "sbatch --parsable --nodes 2 $REPOSITORY/launch/slurm/train.sbatch --config tiny.yaml"


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job that runs through, one that is signalled on its way, a task of an array: where, and what was said."""
    directory = tmp_path_factory.mktemp("slurm")
    tiny_recipe(directory)
    (directory / "sweep.txt").write_text("out=first seed=11\nout=second seed=12 batch=16\n")
    common = f"total_nimg={TOTAL} report_nimg=8 checkpoint_nimg=200"
    script = f"""
        whole=$({SBATCH} out=whole {common})
        echo "whole $(wait_job $whole)"
        stopped=$({SBATCH} out=stopped {common})
        wait_for test -s stopped/metrics.jsonl
        scancel --signal=USR1 $stopped
        echo "stopped $(wait_job $stopped)"
        swept=$(sbatch --parsable --array 2 $REPOSITORY/launch/slurm/train.sbatch --sweep sweep.txt --config tiny.yaml \
            total_nimg=16)
        echo "swept $(wait_job ${{swept}}_2)"
        measured=$(sbatch --parsable --nodes 2 $REPOSITORY/launch/slurm/evaluate.sbatch --run whole --metrics fid40 \
            --features means.pt)
        echo "measured $(wait_job $measured)"
    """
    done = laboratory.run("slurm", script, directory)
    return directory, done.stdout


def test_a_job_on_two_nodes_runs_through(jobs):
    directory, said = jobs
    assert "whole JobState=COMPLETED ExitCode=0:0 Restarts=0" in said
    found = checkpoint.find_intact(directory / "whole")
    assert found.nimg == TOTAL
    assert found.manifest["world_size"] == 2
    assert len(rows(directory / "whole")) == TOTAL // 8
    hosts = [(directory / "whole" / "logs" / f"rank0000{rank}.log").read_text() for rank in range(2)]
    assert [f"node{rank + 1} rank {rank}" in log for rank, log in enumerate(hosts)] == [True, True]


def test_a_signalled_job_requeues_itself_and_is_the_same_run(jobs):
    directory, said = jobs
    assert "stopped JobState=COMPLETED ExitCode=0:0 Restarts=1" in said
    (output,) = [p.read_text() for p in directory.glob("slurm-*.out") if "back into the queue" in p.read_text()]
    stopped = int(output.partition("stopped by SIGUSR1 at ")[2].split()[0])
    assert 0 < stopped < TOTAL
    assert f"going on from stopped/checkpoints/{stopped:012d} ({stopped} images)" in output
    whole, other = (checkpoint.find_intact(directory / name) for name in ("whole", "stopped"))
    assert other.nimg == TOTAL
    assert other.manifest["files"] == whole.manifest["files"]  # checksums of all tensors


def test_a_task_of_an_array_takes_its_line(jobs):
    directory, said = jobs
    assert "swept JobState=COMPLETED" in said
    assert not (directory / "first").exists()
    recipe = yaml.safe_load((directory / "second" / "config.yaml").read_text())
    assert (recipe["seed"], recipe["batch"]) == (12, 16)
    assert checkpoint.find_intact(directory / "second").nimg == 16


def test_a_failing_rank_makes_the_job_fail(tmp_path):
    tiny_recipe(tmp_path)
    script = f"""
        bad=$({SBATCH} out=bad batch=63)
        killed=$({SBATCH} out=killed report_nimg=8)
        echo "bad $(wait_job $bad)"
        wait_for test -s killed/metrics.jsonl
        srun --jobid $killed --overlap -w node2 -N1 -n1 pkill -KILL -f 'bigsgan train'
        echo "killed $(wait_job $killed)"
    """
    said = laboratory.run("slurm", script, tmp_path).stdout
    assert "bad JobState=FAILED" in said  # with 2, or 143 where srun ended the rank that left the speaking to the other
    assert "killed JobState=FAILED" in said
    outputs = [path.read_text() for path in sorted(tmp_path.glob("slurm-*.out"))]
    message = "bigsgan: batch: 63 does not divide into 1 micro-batches on 2 ranks for the generator"
    assert sum(text.count(message) for text in outputs) == 1
    assert rows(tmp_path / "killed")[-1]["nimg"] < 1_000_000


TWO = [("0", "0,1"), ("1", "0,1")]
# Script and options of sbatch: for each task of a node, its local rank as we set it, and the GPUs that it sees.
GPUS = {
    "train": TWO,
    "train --gpus-per-node 2": TWO,
    "train --gpus-per-node 1": [("0", "0")],
    "train --gpus 4": TWO,
    "train --gres gpu:2": TWO,
    "train --gpus-per-task 1 --ntasks-per-node 2": [("0", "0"), ("0", "1")],
    "evaluate": TWO,
    "evaluate --gpus-per-node 1": [("0", "0")],
}
STAND_IN = """#!/bin/bash
exec python - <<'END'
import json, os, sys
from bigsgan.slurm import launcher_variables
known = launcher_variables(os.environ)
known |= {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_JOB_ID")}
with open(f"{known['SLURM_JOB_ID']}.{known['RANK']}.json", "w") as file:
    json.dump(known, file)
END
"""


def test_each_gpu_has_a_task(tmp_path):
    """Two nodes with two GPUs, which are none, and in the place of `bigsgan` what says what it was given."""
    (tmp_path / "bigsgan").write_text(STAND_IN)
    (tmp_path / "bigsgan").chmod(0o755)
    script = """
        export PATH=$PWD:$PATH PYTHONPATH=$REPOSITORY
        submit() {
            local job=$(sbatch --parsable --nodes 2 "${@:2}" $REPOSITORY/launch/slurm/$1.sbatch)
            echo "$job $(wait_job $job)"
        }
    """
    script += "\n".join(f"submit {options}" for options in GPUS)
    said = laboratory.run("slurm", script, tmp_path, "-g", "2").stdout.splitlines()
    assert len(said) == len(GPUS)
    for line, (options, expected) in zip(said, GPUS.items(), strict=True):
        job, state, *_ = line.split()
        assert state == "JobState=COMPLETED", options
        tasks = [json.loads(path.read_text()) for path in tmp_path.glob(f"{job}.*.json")]
        assert {int(task["RANK"]) for task in tasks} == set(range(2 * len(expected))), options
        assert {task["WORLD_SIZE"] for task in tasks} == {str(2 * len(expected))}
        for node in ("node1", "node2"):
            here = [task for task in tasks if task["SLURMD_NODENAME"] == node]
            assert sorted((task["LOCAL_RANK"], task["CUDA_VISIBLE_DEVICES"]) for task in here) == expected, options
            # So that comm.initialize finds as many devices as ranks that share them.
            assert {len(task["CUDA_VISIBLE_DEVICES"].split(",")) for task in here} == {int(here[0]["LOCAL_SIZE"])}
