"""`bigsgan submit`: what it checks before a job is queued, and what it queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsgan import cli
from bigsgan.commands import submit
from tests.tiny import tiny_recipe

SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > submitted
echo "restarts ${BIGSGAN_RESTARTS-} site ${BIGSGAN_SITE-} notice ${BIGSGAN_NOTICE-}" >> submitted
exit ${SBATCH_STATUS:-0}
"""
SCRIPT = str(submit.SLURM / "train.sbatch")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a recipe, and an `sbatch` that writes down what it was given."""
    for name, text in {"sbatch": SBATCH, "bigsgan": "#!/bin/bash\n"}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("BIGSGAN_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return cli.main(["submit", "--config", "tiny.yaml", *arguments])


def test_a_job_is_queued(here):
    options = ["--nodes", "2", "--gpus-per-node", "4", "--account", "me", "--partition", "gpu", "--time", "24:00:00"]
    assert run(*options, "--sbatch=--qos=high", "--restarts", "5", "out=a run") == 0
    assert (here / "submitted").read_text().splitlines() == [
        "--nodes=2", "--gpus-per-node=4", "--account=me", "--partition=gpu", "--time=24:00:00", "--qos=high", SCRIPT,
        "--config", "tiny.yaml", "out=a run", "restarts 5 site  notice ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "time, notice",
    [("3", 45), ("00:03:00", 45), ("10:30", 157), ("0-0:11", 165), ("12", None), ("2-12", None), ("0", None),
     ("UNLIMITED", None)],
)  # fmt: skip
def test_the_warning_is_a_part_of_a_short_limit(here, time, notice):
    assert run("--gpus-per-node", "1", "--time", time) == 0
    words = (here / "submitted").read_text().splitlines()
    assert words[2] == f"--time={time}"
    assert [word for word in words if word.startswith("--signal")] == [f"--signal=USR1@{notice}"] * (notice is not None)
    assert words[-1].endswith(f" notice {notice or ''}")
    assert run("--gpus-per-node", "1", "--time", time, "--sbatch=--signal=USR1@50") == 0
    words = (here / "submitted").read_text().splitlines()
    assert [word for word in words if word.startswith("--signal")] == ["--signal=USR1@50"]
    assert words[-1].endswith(" notice 50")


@pytest.mark.parametrize("signal, notice", [("USR1@90", "90"), ("USR1", "60"), ("R:sigterm@30", "30"), ("10@20", "20")])
def test_a_signal_in_the_environment_is_slurms(here, monkeypatch, capsys, signal, notice):
    monkeypatch.setenv("SBATCH_SIGNAL", signal)
    assert run("--gpus-per-node", "1", "--time", "5") == 0
    words = (here / "submitted").read_text().splitlines()
    assert not [word for word in words if word.startswith("--signal")]
    assert words[-1].endswith(f" notice {notice}")
    monkeypatch.setenv("BIGSGAN_NOTICE", "3600")  # of another job
    assert run("--gpus-per-node", "1", "--sbatch=--signal=USR1@180") == 0
    assert (here / "submitted").read_text().splitlines()[-1].endswith(" notice 180")
    monkeypatch.setenv("SBATCH_SIGNAL", "b:USR1@60")
    assert run("--gpus-per-node", "1") == 2
    assert "SBATCH_SIGNAL: must be for the ranks, not for the batch script" in capsys.readouterr().err


def test_options_of_sbatch_that_decide_no_ranks_are_its_own(here):
    others = ["--gres=nvme:1,gpumem:4", "--gres-flags=enforce-binding", "--exclude", "node3"]
    others += ["--mem=0", "-c4", "-Hq", "n"]
    assert run("--gpus-per-node", "2", *(f"--sbatch={word}" for word in others)) == 0
    assert (here / "submitted").read_text().splitlines()[2:-4] == others


def test_the_status_is_that_of_sbatch(here, monkeypatch):
    monkeypatch.setenv("SBATCH_STATUS", "7")
    assert run("--tasks-per-node", "2") == 7
    assert (here / "submitted").read_text().splitlines()[:2] == ["--nodes=1", "--ntasks-per-node=2"]


def test_a_sweep_is_an_array(here):
    (here / "sweep.txt").write_text("# two\nout=a batch=16\nout=b seed=2\n")
    assert run("--gpus-per-node", "2", "--sweep", "sweep.txt") == 0
    words = (here / "submitted").read_text().splitlines()
    told = ["--config", "tiny.yaml", "--sweep", "sweep.txt"]
    assert words[2:] == ["--array=1-2", SCRIPT, *told, "restarts  site  notice "]
    assert run("--gpus-per-node", "2", "--sweep", "sweep.txt", "--array", "2%1") == 0
    assert "--array=2%1" in (here / "submitted").read_text().splitlines()


def test_a_dry_run_prints_the_command_and_the_script(here, capsys):
    (here / "bin" / "sbatch").unlink()
    site = here / "the site.sh"
    site.write_text("true\n")
    assert run("--gpus-per-node", "2", "--site", site.name, "--dry-run", "out=a run") == 0
    command, rest = capsys.readouterr().out.split("\n", 1)
    words = f"--nodes=1 --gpus-per-node=2 {SCRIPT} --config tiny.yaml 'out=a run'"
    assert command == f"BIGSGAN_SITE='{site}' sbatch {words}"
    assert rest == Path(SCRIPT).read_text()
    assert not (here / "submitted").exists()


MISTAKES: dict[str, tuple[list[str], str]] = {
    "batch": (["--nodes", "3"], "batch: must be a multiple of 6, got 8 (1 micro-batch on 6"),
    "a later line": (["--sweep", "sweep.txt"], "batch: must be a multiple of 2, got 9 (1 micro-batch on 2 ranks for"),
    "one out": (["--sweep", "same.txt"], "--sweep: 'unset' is the `out` of both task 1 and task 2; give each line its"),
    "array 0": (["--sweep", "good.txt", "--array", "0-2"], "--array: must be within 1-2, as the sweep has 2 lines of"),
    "array": (["--sweep", "good.txt", "--array", "x"], "--array: must be a list of tasks as in Slurm, got 'x'; write"),
    "array of one": (["--sweep", "one.txt", "--array", "2"], "must be within 1-1, as the sweep has 1 line of"),
    "no account": (["--account", ""], "--account: must have a value, got ''; give one, or remove the option"),
    "an empty option": (["--sbatch", " "], "--sbatch: must have a value, got ' '"),
    **{
        word: (
            [f"--sbatch={word}"],
            f"--sbatch: must be without {flag}, which this command decides, got '4'; give --nodes, --gpus-per-node or",
        )
        for word, flag in {
            "-N4": "--nodes",
            "-HG 4": "--gpus",
            "--gpus-per-n=4": "--gpus-per-node",
            "--gpus-per-task=4": "--gpus-per-task",
            "--ntask=4": "--ntasks",
            "--ntasks-per-node=4": "--ntasks-per-node",
            "--ntasks-per-c=4": "--ntasks-per-core",
        }.items()
    },
    **{
        value: ([f"--sbatch={flag}={value}"], f"--sbatch: must be without {name}, which this command decides, got '")
        for value, flag, name in (
            ("gpu:2", "--gres", "--gres"),
            ("nvme:1,gpu", "--gre", "--gres"),
            ("gres/gpu:1", "--tres-per-t", "--tres-per-task"),
        )
    },
    "a task's ranks in two words": (["--sbatch=-n", "--sbatch=4"], "be without --ntasks, which this command decides"),
    "partition in short": (["--partition", "a", "--sbatch=--part=b"], "must be without --partition, which this"),
    "limit in short": (["--time", "60", "--sbatch=--ti=1"], "--sbatch: must have no time limit with --time, got '1'"),
    "signal in short": (["--sbatch=--sig=B:USR1@60"], "--sbatch: must be for the ranks, not for the batch script"),
    "no dash": (["--sbatch=qos=high"], "--sbatch: must begin with a dash, got 'qos=high' (sbatch would take it for"),
    "one word too many": (["--sbatch=--qos=high", "--sbatch=4"], "--sbatch: must begin with a dash, got '4'"),
    "account twice": (["--account", "a", "--sbatch=--account=b"], "must be without --account, which this command"),
    "another array": (["--sbatch=--arr=1-3"], "got '1-3'; give --array of this command, with --sweep"),
    "array alone": (["--array", "1"], "--array: needs --sweep; give a sweep file"),
    "DeepSpeed file": (["engines.generator.ds_config=none.json"], "engines.generator.ds_config: "),
    "out": (["out=tiny.yaml/run"], "out: 'tiny.yaml/run' cannot be made: "),
    "site": (["--site", "none.sh"], "--site: "),
    "site's syntax": (["--site", "bad.sh"], " must be a valid bash script: bad.sh: line "),
    "ranks": (["--tasks-per-node", "1"], "--gpus-per-node: must be unset with --tasks-per-node, got 2; give"),
    "two minutes": (["--time", "00:02:00"], "--time: must be at least 3 minutes, got '00:02:00' (a job has to start"),
    "a minute for sbatch": (["--sbatch=--time=1"], "--sbatch: must be at least 3 minutes, got '1' ("),
    "-t and its value": (["--sbatch=-t", "--sbatch=1"], "--sbatch: must be at least 3 minutes, got '1' ("),
    "two limits": (["--time", "24:00:00", "--sbatch=--time=1"], "--sbatch: must have no time limit with --time, got"),
    "no time": (["--time", "a day"], "--time: must be a time limit as in Slurm, got 'a day'; write one such as 24:00"),
    "a low least limit": (["--time", "1:00:00", "--sbatch=--time-min=2"], "--sbatch: must be at least 3 minutes, got"),
    "a warning of the script": (["--time", "4", "--sbatch=--signal", "--sbatch=B:USR1@60"], "--sbatch: must be for"),
    **{
        f"signal {signal}": (
            ["--time", "60", f"--sbatch=--signal={signal}"],
            f"--sbatch: must be TERM, USR1, INT or HUP, got '{signal}' "
            "(by others they end without saving); give one such as --sbatch=--signal=USR1@180",
        )
        for signal in ("KILL@60", "12@60", "", "R:CONT", "USR1@x")
    },
    "signal at the end": (["--time", "60", "--sbatch=--signal=USR1@0"], "--sbatch: must come at least a second before"),
    "long notice": (["--time", "10", "--sbatch=--signal=USR1@600"], "--time: must be more than a minute longer than"),
}


@pytest.mark.parametrize("options, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found_before_the_job_is_queued(here, capsys, options, message):
    (here / "sweep.txt").write_text("out=a\nout=b batch=9\n")
    (here / "same.txt").write_text("seed=1\nseed=2\n")
    (here / "one.txt").write_text("out=a\n")
    (here / "good.txt").write_text("out=a\nout=b\n")
    (here / "bad.sh").write_text("echo $(\n")
    before = sorted(here.iterdir())
    assert run("--gpus-per-node", "2", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line.replace(f"{here}/", "")
    assert sorted(here.iterdir()) == before


def test_without_the_number_of_ranks_or_the_environment(here, capsys):
    assert run() == 2
    assert "must be given" in capsys.readouterr().err
    (here / "bin" / "bigsgan").unlink()
    assert run("--gpus-per-node", "1") == 2
    assert "must be on the PATH, which the job inherits" in capsys.readouterr().err
    (here / "bin" / "sbatch").rename(here / "bin" / "bigsgan")
    assert run("--gpus-per-node", "1") == 2
    assert "must be on the PATH" in capsys.readouterr().err


def test_a_limit_in_the_environment_counts_where_no_option_gives_one(here, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    assert run("--gpus-per-node", "1") == 2
    assert "SBATCH_TIMELIMIT: must be at least 3 minutes, got '1'" in capsys.readouterr().err
    assert run("--gpus-per-node", "1", "--time", "12") == 0
