"""launch/slurm/train.sbatch, unmodified, on a real Slurm of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bigsgan import checkpoint
from tests.clusters import laboratory
from tests.tiny import tiny_recipe

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
        cancelled=$({SBATCH} out=cancelled {common})
        wait_for test -s cancelled/metrics.jsonl
        scancel $cancelled
        echo "cancelled $(wait_job $cancelled)"
        swept=$(bigsgan submit --tasks-per-node 1 --sweep sweep.txt --array 2 --sbatch=--parsable --config tiny.yaml \
            total_nimg=16)
        echo "swept $(wait_job ${{swept}}_2)"
        measured=$(sbatch --parsable --nodes 2 $REPOSITORY/launch/slurm/evaluate.sbatch --run whole --metrics fid40)
        echo "measured $(wait_job $measured)"
    """
    done = laboratory.run("slurm", script, directory)
    return directory, done.stdout


@pytest.mark.slow
def test_a_job_on_two_nodes_runs_through(jobs):
    directory, said = jobs
    assert "whole JobState=COMPLETED ExitCode=0:0 Restarts=0" in said
    found = checkpoint.find_intact(directory / "whole")
    assert found.nimg == TOTAL
    assert found.manifest["world_size"] == 2
    assert len(rows(directory / "whole")) == TOTAL // 8
    hosts = [(directory / "whole" / "logs" / f"rank0000{rank}.log").read_text() for rank in range(2)]
    assert [f"node{rank + 1} rank {rank}" in log for rank, log in enumerate(hosts)] == [True, True]


@pytest.mark.slow
def test_a_signalled_job_requeues_itself_and_is_the_same_run(jobs):
    directory, said = jobs
    assert "stopped JobState=COMPLETED ExitCode=0:0 Restarts=1" in said
    (output,) = [p.read_text() for p in directory.glob("slurm-*.out") if "back into the queue" in p.read_text()]
    stopped = int(output.partition("stopped by SIGUSR1 at ")[2].split()[0])
    assert 0 < stopped < TOTAL
    assert f"Resuming from stopped/checkpoints/{stopped:012d} ({stopped} images)" in output
    whole, other = (checkpoint.find_intact(directory / name) for name in ("whole", "stopped"))
    assert other.nimg == TOTAL
    assert other.manifest["files"] == whole.manifest["files"]  # checksums of all tensors


@pytest.mark.slow
def test_a_cancelled_job_saves_and_does_not_come_back(jobs):
    directory, said = jobs
    assert "cancelled JobState=CANCELLED ExitCode=85:0 Restarts=0" in said
    assert 0 < checkpoint.find_intact(directory / "cancelled").nimg < TOTAL


@pytest.mark.slow
def test_a_task_of_an_array_takes_its_line(jobs):
    directory, said = jobs
    assert "swept JobState=COMPLETED" in said
    assert not (directory / "first").exists()
    recipe = yaml.safe_load((directory / "second" / "config.yaml").read_text())
    assert (recipe["seed"], recipe["batch"]) == (12, 16)
    assert checkpoint.find_intact(directory / "second").nimg == 16


@pytest.mark.slow
def test_a_job_measures_on_two_nodes(jobs):
    directory, said = jobs
    assert "measured JobState=COMPLETED" in said
    (record,) = [json.loads(line) for line in (directory / "whole" / "evaluations.jsonl").read_text().splitlines()]
    assert (record["metric"], record["nimg"], record["num_fake"], record["num_real"]) == ("fid40", TOTAL, 40, 1797)


@pytest.mark.slow
def test_a_bad_recipe_is_recorded_and_a_failed_rank_is_started_again(tmp_path):
    tiny_recipe(tmp_path)
    script = f"""
        bad=$({SBATCH} out=bad batch=63)
        unknown=$({SBATCH} out=/dev/null/run)
        killed=$({SBATCH} out=killed total_nimg={TOTAL} report_nimg=8 checkpoint_nimg=80)
        echo "bad $(wait_job $bad)"
        echo "unknown $(wait_job $unknown)"
        wait_for test -d killed/checkpoints/000000000080
        srun --jobid $killed --overlap -w node2 -N1 -n1 pkill -KILL -f 'bigsgan train'
        echo "killed $(wait_job $killed)"
    """
    said = laboratory.run("slurm", script, tmp_path).stdout
    assert "bad JobState=FAILED ExitCode=2:0 Restarts=0" in said
    assert "unknown JobState=FAILED ExitCode=2:0 Restarts=0" in said  # which the ranks alone find
    assert "killed JobState=COMPLETED ExitCode=0:0 Restarts=1" in said
    outputs = [path.read_text() for path in sorted(tmp_path.glob("slurm-*.out"))]
    message = "bigsgan: batch: must be a multiple of 2, got 63 (1 micro-batch on 2 ranks for the generator)"
    assert sum(text.count(message) for text in outputs) == 1
    assert sum(text.count("bigsgan: /dev/null/run") + text.count("bigsgan: out: ") for text in outputs) == 1
    assert checkpoint.find_intact(tmp_path / "killed").nimg == TOTAL


# In the place of `bigsgan`: ranks that train until they are signalled and save; in the job's second life they are done,
# but for the run `endless`. All of Slurm is real, with its own time between SIGTERM and SIGKILL, 30 s.
TRAINING = """#!/bin/bash
for word; do case $word in out=*) out=${word#out=} ;; --print) echo ${out:-run}; exit ;; esac; done
[ -z "${SLURM_RESTART_COUNT:-}" ] || [ $out = endless ] || exit 0
trap 'sleep 0.5; exit 85' TERM USR1
touch $out.$SLURM_PROCID${SLURM_ARRAY_TASK_ID:+.$SLURM_ARRAY_TASK_ID}.started
[ $out != endless ] || { sleep 3; exit 85; }  # the other rank has come then: srun ends it with the first
while :; do sleep 0.1; done
"""
PREEMPTION = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=requeue Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
PartitionName=cancel Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=grace Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF"""
ENDS = {
    "cancelled": "JobState=CANCELLED ExitCode=85:0 Restarts=0",  # not back into the queue
    "warned": "JobState=COMPLETED ExitCode=0:0 Restarts=1",
    "requeue": "JobState=COMPLETED ExitCode=0:0 Restarts=1",  # by Slurm alone
    "cancel": "JobState=COMPLETED ExitCode=0:0 Restarts=1",
    "grace": "JobState=COMPLETED ExitCode=0:0 Restarts=1",
    "array_1": "JobState=CANCELLED ExitCode=85:0 Restarts=0",
    "array_2": "JobState=COMPLETED ExitCode=0:0 Restarts=1",  # it alone, though its number is the array's
    "endless": "JobState=FAILED ExitCode=85:0 Restarts=1",
}


@pytest.mark.slow
def test_what_slurm_ends_goes_on_and_what_a_user_cancels_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_SLURM_EXTRA", PREEMPTION)
    (tmp_path / "bigsgan").write_text(TRAINING)
    (tmp_path / "bigsgan").chmod(0o755)
    script = """
        export PATH=$PWD:$PATH
        submit() {
            echo "$1 $(sbatch --parsable --nodes 2 "${@:2}" $REPOSITORY/launch/slurm/train.sbatch out=$1)" >> jobs
            [ $1 = endless ] || wait_for test -f $1.0.started -a -f $1.1.started
        }
        for partition in requeue cancel grace; do
            submit $partition -p $partition
            urgent=$(sbatch --parsable -p high -N 2 --exclusive -o /dev/null --wrap true)
            wait_job $urgent
        done
        submit cancelled
        scancel $(tail -n 1 jobs | cut -d' ' -f2)
        submit warned
        scancel --signal=USR1 $(tail -n 1 jobs | cut -d' ' -f2)
        array=$(sbatch --parsable --array 1-2 $REPOSITORY/launch/slurm/train.sbatch out=array)
        wait_for test -f array.0.1.started -a -f array.0.2.started
        scancel ${array}_1
        scancel --signal=USR1 ${array}_2
        for task in 1 2; do echo "array_$task ${array}_$task" >> jobs; done
        export BIGSGAN_RESTARTS=1
        submit endless
        while read -r name job; do echo "$name $(wait_job $job)"; done < jobs
    """
    said = laboratory.run("slurm", script, tmp_path).stdout.splitlines()
    assert {line.split()[0]: line.partition(" ")[2] for line in said if line.split()[0] in ENDS} == ENDS
    outputs = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert outputs.count("bigsgan: 1 restarts without a new checkpoint: the job ends") == 1


TWO = [("0", "0,1"), ("1", "0,1")]
BOUND = [("0", "0"), ("0", "1")]
# Script and options of sbatch: for each task of a node, its local rank as we set it, and the GPUs that it sees.
GPUS = {
    "train": TWO,
    "train --gpus-per-node 2": TWO,
    "train --gpus-per-node 1": [("0", "0")],
    "train --gpus 4": TWO,
    "train --gres gpu:2": TWO,
    "train --gpus-per-task 1 --ntasks-per-node 2": BOUND,
    "train --ntasks-per-gpu 1 --gpus-per-node 2": BOUND,
    "train --gpu-bind single:1 --gpus-per-node 2": BOUND,
    "train --gpu-bind none --gpus-per-task 1 --ntasks 4": [("0", None), ("1", None)],  # all
    "evaluate": TWO,
    "evaluate --gpus-per-node 1": [("0", "0")],
}
STAND_IN = """#!/bin/bash
[[ "$*" != *"--print out" ]] || { echo run; exit; }
exec python - <<'END'
import json, os, sys
from bigsgan.runtime.slurm import launcher_variables
known = launcher_variables(os.environ)
known |= {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_JOB_ID")}
with open(f"{known['SLURM_JOB_ID']}.{known['RANK']}.json", "w") as file:
    json.dump(known, file)
END
"""
SUBMIT = """
    export PATH=$PWD:$PATH PYTHONPATH=$REPOSITORY
    submit() {
        local job=$(sbatch --parsable --nodes 2 "${@:2}" $REPOSITORY/launch/slurm/$1.sbatch)
        echo "$job $(wait_job $job)"
    }
"""


@pytest.mark.slow
def test_each_gpu_has_a_task(tmp_path):
    """Two nodes with two GPUs, which are none, and in the place of `bigsgan` what says what it was given."""
    (tmp_path / "bigsgan").write_text(STAND_IN)
    (tmp_path / "bigsgan").chmod(0o755)
    script = SUBMIT + "\n".join(f"submit {options}" for options in GPUS)
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
            seen = {len((task["CUDA_VISIBLE_DEVICES"] or "0,1").split(",")) for task in here}
            assert seen == {int(here[0]["LOCAL_SIZE"])}


# Nodes with two GPUs and one: for each rank its node, its local rank and the GPUs that it sees, or the message.
UNEQUAL = {
    "train": "nodes: have 2 and 1 GPUs; give --gpus-per-node, or --gpus-per-task 1 with --ntasks",
    "train --gpus 3": "nodes: have 2 and 1 GPUs; give --gpus-per-node, or --gpus-per-task 1 with --ntasks",
    "train --gpus-per-node 1": [("node1", "0", "0"), ("node2", "0", "0")],
    "train --gpus-per-task 1 --ntasks 3": [("node1", "0", "0"), ("node1", "0", "1"), ("node2", "0", "0")],
    "train --gpus-per-task 1 --ntasks 2 --export NONE": "bigsgan: must be on the PATH of the job; activate its",
}


@pytest.mark.nightly  # unit/test_slurm_scripts.py has it by stand-ins of Slurm
def test_nodes_that_are_not_alike(tmp_path):
    (tmp_path / "bigsgan").write_text(STAND_IN)
    (tmp_path / "bigsgan").chmod(0o755)
    script = SUBMIT + "\n".join(f"submit {options}" for options in UNEQUAL)
    said = laboratory.run("slurm", script, tmp_path, "-g", "2,1").stdout.splitlines()
    for line, (options, expected) in zip(said, UNEQUAL.items(), strict=True):
        job, *state = line.split()
        tasks = [json.loads(path.read_text()) for path in tmp_path.glob(f"{job}.*.json")]
        tasks.sort(key=lambda task: int(task["RANK"]))
        output = (tmp_path / f"slurm-{job}.out").read_text()
        if isinstance(expected, str):
            assert state == ["JobState=FAILED", "ExitCode=2:0", "Restarts=0"], options
            assert (tasks, output.count(f"bigsgan: {expected}")) == ([], 1), options
        else:
            assert state[0] == "JobState=COMPLETED", output
            found = [(task["SLURMD_NODENAME"], task["LOCAL_RANK"], task["CUDA_VISIBLE_DEVICES"]) for task in tasks]
            assert found == expected, options


STAGED = """#!/bin/bash
[[ "$*" != *"--print out" ]] || { echo run; exit; }
[[ "$*" != *"--print data.root" ]] || { echo images; exit; }
root=${!#}
echo "${root%/*/*} ${root##*/} $(cat "$root/shard.tar") $(ls /dev/shm/disk/*)" > $SLURMD_NODENAME.$SLURM_LOCALID
"""


@pytest.mark.nightly  # unit/test_slurm_scripts.py has it by stand-ins of Slurm
def test_data_is_copied_to_each_node(tmp_path):
    """To /dev/shm, which each of the laboratory's nodes has for itself; with two ranks on each."""
    (tmp_path / "bigsgan").write_text(STAGED)
    (tmp_path / "bigsgan").chmod(0o755)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "shard.tar").write_text("pixels")
    (tmp_path / "site.sh").write_text("stage_to=/dev/shm/disk\n")
    script = f"""
        export BIGSGAN_SITE=$PWD/site.sh
        {SUBMIT}
        submit train --ntasks-per-node 2
        submit train --gpus-per-task 1 --ntasks 4
    """
    said = laboratory.run("slurm", script, tmp_path, "-g", "2").stdout.splitlines()
    assert [line.split()[1] for line in said] == 2 * ["JobState=COMPLETED"]
    for name in ("node1.0", "node1.1", "node2.0", "node2.1"):
        assert (tmp_path / name).read_text() == "/dev/shm/disk images pixels images\n"
