"""launch/slurm/*.sbatch, with stand-ins for Slurm's commands: what they start, refuse and put back into the queue."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import REPOSITORY

SCRIPTS = REPOSITORY / "launch" / "slurm"
STATE = "JobState=RUNNING Requeue=1 Restarts=0"
# As scontrol of Slurm 22.05 shows a job: in many lines, or with -o in one.
SCONTROL = """#!/bin/bash
case $1 in
requeue) echo "requeue $2" >> calls; exit ${REQUEUE_STATUS:-0} ;;
*) [[ " $* " == *" -o "* ]] && { echo "JobId=7 $STATE "; exit; }
   echo "   Command=$SCRIPT --config R.yaml"; echo -e "$NODES" ;;
esac
"""
SRUN = """#!/bin/bash
echo "srun $*" >> calls
[[ "$*" != *"bash -c"* ]] || { "${@:4}"; exit; }
[ ! -f step ] || . ./step
exit ${STATUS:-0}
"""
# Asked of one, before srun.
BIGSGAN = """#!/bin/bash
echo "bigsgan ${RANK-} of ${WORLD_SIZE-}: $*" >> calls
[ "${!#}" != out ] || echo the run
[ "${!#}" != data.root ] || echo data
exit ${ASKED:-0}
"""


class Job:
    """A directory with stand-ins, in which scripts run as in a job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "bin").mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "bigsgan": BIGSGAN, "sleep": "#!/bin/bash\n"}.items():
            (directory / "bin" / name).write_text(text)
            (directory / "bin" / name).chmod(0o755)

    def run(
        self, *arguments: str, script: str = "train", **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run a copy of a script, as Slurm does; return also what it called."""
        (self.directory / "calls").write_text("")
        copy = shutil.copy(SCRIPTS / f"{script}.sbatch", self.directory / "slurm_script")
        env = {
            "PATH": f"{self.directory / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin", "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
            "SLURM_TASKS_PER_NODE": "8(x2)", "SCRIPT": str(SCRIPTS / f"{script}.sbatch"), "STATE": STATE,
            "NODES": nodes("(null)", "(null)"), **variables,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", copy, *arguments], cwd=self.directory, env=env, capture_output=True, text=True, timeout=20
        )
        return done, (self.directory / "calls").read_text().splitlines()

    def progress(self, nimg: int) -> None:
        (self.directory / "the run" / "checkpoints" / f"{nimg:012d}").mkdir(parents=True)


def nodes(*resources: str) -> str:
    """What `scontrol show job -d` says of each node."""
    return "\\n".join(f"     Nodes=node{i} CPU_IDs=0-7 Mem=0 GRES={text}" for i, text in enumerate(resources))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


TWO = nodes("gpu:2(IDX:0-1)", "gpu:2(IDX:0-1)")
UNEQUAL = {"NODES": nodes("gpu:a100:2(IDX:0-1)", "gpu:a100:1(IDX:0)"), "SLURM_GPUS_ON_NODE": "2"}
THREE = {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
# What sbatch was asked for, the variables that it sets, and what the ranks are then started with.
LAYOUTS: dict[str, tuple[dict[str, str], str]] = {
    "no GPUs": ({}, "--ntasks-per-node=1 --ntasks=2 --cpus-per-task=8"),
    "--ntasks 3": (THREE, "--ntasks=3 --cpus-per-task=4"),
    "--ntasks-per-node 4": (
        {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"},
        "--ntasks=8 --cpus-per-task=2",
    ),
    "whole nodes": ({"NODES": TWO}, "--ntasks-per-node=2 --gpus-per-node=2 --ntasks=4 --cpus-per-task=4"),
    "--gpus-per-node a100:1": (
        {"NODES": TWO, "SLURM_GPUS_PER_NODE": "a100:1"},
        "--ntasks-per-node=1 --gpus-per-node=a100:1 --ntasks=2 --cpus-per-task=8",
    ),
    "2 + 1 GPUs --ntasks 3 --gpus-per-task 1": (
        {**UNEQUAL, **THREE, "SLURM_GPUS_PER_TASK": "h100:1"},
        "--ntasks=3 --cpus-per-task=4",
    ),
    "nodes with 8 and 2 CPUs": (
        {"NODES": TWO, "SLURM_JOB_CPUS_PER_NODE": "8,2"},
        "--ntasks-per-node=2 --gpus-per-node=2 --ntasks=4 --cpus-per-task=1",
    ),
    "another version's scontrol": (
        {"NODES": "", "SLURM_GPUS_ON_NODE": "2"},
        "--ntasks-per-node=2 --gpus-per-node=2 --ntasks=4 --cpus-per-task=4",
    ),
}


@pytest.mark.parametrize("variables, options", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("script", ["train", "evaluate"])
def test_every_rank_that_was_asked_for_is_started(job, script, variables, options):
    done, calls = job.run("--config", "R.yaml", "a='b c'", script=script, **variables)
    assert done.returncode == 0, done.stderr
    stopped = " --stopped-status 85" if script == "train" else ""
    assert calls[-1] == f"srun --kill-on-bad-exit=1 {options} bigsgan {script}{stopped} --config R.yaml a='b c'"
    if script == "train":  # the recipe is checked for as many ranks
        ranks = options.partition("--ntasks=")[2].split()[0]
        assert calls[0] == f"bigsgan 0 of {ranks}: train --config R.yaml a='b c' --print out"


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "2 + 1 GPUs": (UNEQUAL, "nodes: have 2 and 1 GPUs; give --gpus-per-node, or --gpus-per-task 1 with --ntasks"),
    "GPUs on one node": ({"NODES": nodes("gpu:2(IDX:0-1)", "(null)")}, "nodes: have 2 and 0 GPUs; give"),
    "--ntasks 3 with 4 GPUs": ({"NODES": TWO, **THREE}, "--ntasks: 3 is not one for each of 4 GPUs; leave it out, or"),
    "--gpus-per-task 2": ({"NODES": TWO, "SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "2"}, "--gpus-per-task"),
    "--gpus-per-task 1 alone": ({"NODES": TWO, "SLURM_GPUS_PER_TASK": "1"}, "--ntasks: must be given with"),
    "hetjob": ({"SLURM_HET_SIZE": "2"}, "--het-group: ranks run on one component; submit without ':'"),
    "notice": ({"BIGSGAN_NOTICE": "3m"}, "BIGSGAN_NOTICE: must be a number of seconds, got '3m'; give one such as 180"),
}


@pytest.mark.parametrize("variables, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line(job, variables, message):
    done, calls = job.run("--config", "R.yaml", **variables)
    assert (done.returncode, calls) == (2, [])
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bigsgan: {message}")


def test_without_the_environment_it_is_refused(job):
    (job.directory / "bin" / "bigsgan").unlink()
    done, calls = job.run("--config", "R.yaml")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("bigsgan: bigsgan: must be on the PATH of the job; activate its environment")


def test_a_script_apart_from_the_clone_says_so(job):
    done, calls = job.run("--config", "R.yaml", SCRIPT="(null)")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.splitlines()[-1] == "bigsgan: BIGSGAN_SLURM: set it to launch/slurm of the clone"
    assert job.run("--config", "R.yaml", SCRIPT="(null)", BIGSGAN_SLURM=str(SCRIPTS))[0].returncode == 0


def test_a_bad_recipe_ends_the_job_before_ranks_start(job):
    done, calls = job.run("--config", "R.yaml", ASKED="2")
    assert done.returncode == 2
    assert [call.split()[0] for call in calls] == ["bigsgan"]


START = "StartTime=2026-11-23T01:52:00"
REASONS = {
    "running": (f"JobState=RUNNING Reason=None Restarts=0 {START}", True),  # the time limit is near, or USR1 by hand
    "pre-empted, with grace": (f"JobState=RUNNING Reason=None {START} PreemptTime=2026-11-23T01:52:19", True),
    "pre-empted, PreemptMode=CANCEL": (
        f"JobState=COMPLETING Reason=None {START} PreemptTime=2026-11-23T01:52:07",
        True,
    ),
    "pre-empted, PreemptMode=REQUEUE": ("JobState=COMPLETING Reason=None Restarts=1 StartTime=Unknown", False),
    "the time limit, while saving": (f"JobState=COMPLETING Reason=TimeLimit {START}", True),
    "cancelled": (f"JobState=COMPLETING Reason=None {START} EndTime=2026-11-23T01:52:07", False),
}


@pytest.mark.parametrize("status", ["85", "1", "137"])
@pytest.mark.parametrize("state, back", REASONS.values(), ids=REASONS)
def test_a_job_goes_back_into_the_queue_where_slurm_has_not_ended_it(job, state, back, status):
    done, calls = job.run("--config", "R.yaml", STATUS=status, STATE=state)
    assert done.returncode == int(status)
    assert ("requeue 7" in calls) == back
    assert ("back into the queue" in done.stdout) == back


@pytest.mark.parametrize("status", ["0", "2"])
def test_what_is_complete_or_bad_does_not(job, status):
    done, calls = job.run("--config", "R.yaml", STATUS=status)
    assert done.returncode == int(status)
    assert "requeue 7" not in calls


@pytest.mark.slow
def test_restarts_without_a_new_checkpoint_are_counted(job):
    def requeued(**variables: str) -> bool:
        done, calls = job.run("--config", "R.yaml", STATUS="85", **variables)
        found = "requeue 7" in calls
        message = "restarts without a new checkpoint: the job ends; the same command resumes"
        assert (message in done.stderr) != found
        return found

    assert [requeued() for _ in range(4)] == [True, True, True, False]
    job.progress(200)
    assert [requeued() for _ in range(4)] == [True, True, True, False]
    job.progress(1000)
    assert requeued()
    job.progress(1008)
    assert [requeued() for _ in range(4)] == [True, True, True, False]
    assert not requeued(BIGSGAN_RESTARTS="0")
    assert requeued(BIGSGAN_RESTARTS="4")
    assert requeued(SLURM_JOB_ID="7", STATE=STATE, BIGSGAN_RESTARTS="5")


@pytest.mark.parametrize(
    "limit, back", [("00:03:00", False), ("00:01:00", False), ("00:30:00", True), ("1-00:00:00", True)]
)
def test_a_job_that_is_warned_as_it_starts_does_not_start_again_and_says_why(job, limit, back):
    state = f"{STATE} TimeLimit={limit} TimeMin=N/A"
    done, calls = job.run("--config", "R.yaml", STATUS="85", STATE=state)
    assert done.returncode == 85
    assert ("requeue 7" in calls) == back
    said = "bigsgan: --time: must be longer than the 180 s that Slurm warns before, got "
    assert (said in done.stderr) != back
    if limit == "00:03:00":
        remedy = "give more, or BIGSGAN_NOTICE=45 and --signal=USR1@45"
        assert done.stderr == f"{said}180 s; {remedy}; the same command resumes\n"
        assert "requeue 7" in job.run("--config", "R.yaml", STATUS="85", STATE=state, BIGSGAN_NOTICE="045")[1]
    assert "requeue 7" in job.run("--config", "R.yaml", STATUS="1", STATE=state)[1]  # a failure is none


def test_a_task_of_an_array_speaks_for_itself_alone(job):
    """The last task has the array's own number, and `scontrol requeue` would take it for all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert "requeue 7_3" in job.run("--config", "R.yaml", STATUS="85", **array)[1]


def test_another_job_counts_anew_and_the_end_forgets(job):
    for _ in range(4):
        job.run("--config", "R.yaml", STATUS="1")
    _, calls = job.run("--config", "R.yaml", STATUS="1", SLURM_JOB_ID="8")
    assert "requeue 8" in calls
    assert (job.directory / "the run" / "restarts").read_text() == "8 - 1\n"
    job.run("--config", "R.yaml")
    assert not (job.directory / "the run" / "restarts").exists()


def test_a_site_sets_the_job_up(job):
    site = job.directory / "my site.sh"
    site.write_text(
        "echo $UNSET_AS_CONDA_HAS_IT\nexport NCCL_SOCKET_IFNAME=ib0\n"
        "command=(apptainer exec --nv 'an image.sif')\nsrun_options+=(--cpu-bind=cores)\n"
    )
    apptainer = job.directory / "bin" / "apptainer"
    apptainer.write_text('#!/bin/bash\necho "$3 $NCCL_SOCKET_IFNAME" >> calls; exec "${@:4}"\n')
    apptainer.chmod(0o755)
    done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
    assert done.returncode == 0, done.stderr
    assert calls[:2] == ["an image.sif ib0", "bigsgan 0 of 2: train --config R.yaml --print out"]
    start = " --cpu-bind=cores apptainer exec --nv an image.sif bigsgan train --stopped-status 85 --config R.yaml"
    assert calls[2].endswith(start)
    site.write_text("srun_options+=(--container-image=image.sqsh)\n")  # which srun alone can start
    (job.directory / "bin" / "bigsgan").unlink()
    done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
    first = "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --container-image=image.sqsh bigsgan train --config R.yaml"
    assert (done.returncode, calls[0]) == (0, f"{first} --print out")
    site.write_text("module load nothing\n")
    done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
    assert (done.returncode, calls) == (2, [])
    assert f"bigsgan: {site}: ended with status 127" in done.stderr


def test_srun_carries_the_environment_though_sbatch_was_told_not_to(job):
    (job.directory / "step").write_text('echo "export $SLURM_EXPORT_ENV" >> calls\n')
    assert "export ALL" in job.run("--config", "R.yaml", SLURM_EXPORT_ENV="NONE")[1]


def test_data_is_copied_to_the_nodes_once(job):
    (job.directory / "data").mkdir()
    (job.directory / "data" / "shard.tar").write_text("images")
    site = job.directory / "site.sh"
    site.write_text(f"stage_to='{job.directory}/own disk'\n")
    done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
    assert done.returncode == 0, done.stderr
    (copy,) = (job.directory / "own disk").glob("*/data")
    assert (copy / "shard.tar").read_text() == "images"
    assert [path.name for path in copy.parent.iterdir()] == ["data"]
    assert calls[2].startswith("srun --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c")
    assert calls[-1].endswith(f" --config R.yaml --data-root {copy}")
    (copy / "shard.tar").write_text("of an earlier job")
    assert job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))[0].returncode == 0
    assert (copy / "shard.tar").read_text() == "of an earlier job"
    for own in (["--data-root", "own"], ["--data-root=own"]):  # a second one would be refused
        assert job.run("--config", "R.yaml", *own, BIGSGAN_SITE=str(site))[1][-1].endswith(" ".join(["R.yaml", *own]))
    shutil.rmtree(job.directory / "data")
    done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
    assert done.returncode == 2
    assert "bigsgan: data.root: " in done.stderr


def test_other_data_of_the_same_name_is_copied_too(job):
    """And data that has changed since."""
    data, site = job.directory / "data", job.directory / "site.sh"
    site.write_text(f"stage_to='{job.directory}/own disk'\n")

    def staged() -> str:
        done, calls = job.run("--config", "R.yaml", BIGSGAN_SITE=str(site))
        assert done.returncode == 0, done.stderr
        return Path(calls[-1].partition("--data-root ")[2], "shard.tar").read_text()

    for name in ("first", "second"):
        (job.directory / name / "train").mkdir(parents=True)
        (job.directory / name / "train" / "shard.tar").write_text(name)
        data.unlink(missing_ok=True)
        data.symlink_to(job.directory / name / "train")
        assert staged() == name
    (data / "shard.tar").write_text("new")
    os.utime(data, (0, 0))
    assert staged() == "new"


def test_the_example_of_a_site_changes_nothing_as_it_stands(job):
    plain, calls = job.run("--config", "R.yaml")
    assert job.run("--config", "R.yaml", BIGSGAN_SITE=str(SCRIPTS / "site.example.sh"))[1] == calls
    assert plain.returncode == 0
