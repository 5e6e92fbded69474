"""A run directory that is removed, renamed, emptied, replaced or unmounted while its run trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bigsgan import checkpoint
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.runtime import comm
from tests.distributed.whole_runs import BATCH, rows, run_whole

SETTINGS = {
    "total_nimg": 48, "report_nimg": 16, "sample_nimg": 48, "checkpoint_nimg": 1000, "monitor": "[tensorboard, csv]"
}  # fmt: skip
FILES = ["config.yaml", "ds_generator.json", "ds_discriminator.json", ".lock", "metrics.jsonl", "metrics.csv"]


def remove(run: Path) -> None:
    shutil.rmtree(run)


def rename(run: Path) -> None:
    run.rename(run.with_name("renamed"))


def empty(run: Path) -> None:
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def copy(run: Path) -> None:
    """Leave a copy in the directory's place."""
    run.rename(run.with_name("renamed"))
    shutil.copytree(run.with_name("renamed"), run)
    (run / "notes.txt").touch()


def change(run: Path) -> None:
    """Replace the reports, as an editor does."""
    (run / "edited").write_text('{"nimg": 1}\n' + (run / "metrics.jsonl").read_text())
    os.replace(run / "edited", run / "metrics.jsonl")


def train_and(directory: str, name: str, overrides: dict[str, object]) -> tuple[str, list[str]]:
    """Train, and do that to the directory after the third update."""
    seen: list[str] = []

    def after(update: int) -> None:
        if update == 2:
            globals()[name](Path(directory) / "run")
        if update == 3:
            seen.extend(path.name for path in sorted((Path(directory) / "run" / "checkpoints").glob("0*")))

    return run_whole(directory, {**SETTINGS, **overrides}, after=after), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num",
    [
        *[("remove", 1), ("rename", 2), ("empty", 1), ("copy", 2)],
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in [("remove", 2), ("rename", 1), ("empty", 2)]),
    ],
)
def test_what_is_gone_is_written_again(ranks, tmp_path, name, num, capfd):
    ends = ranks(num).run(train_and, str(tmp_path), name, {})
    assert [end for end, _ in ends] == ["done"] * num
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {*FILES, "checkpoints", "logs", "samples"}
    assert [row["nimg"] for row in rows(run)] == [16, 32, 48]
    assert read_saved_recipe(run).total_nimg == 48
    assert checkpoint.find_intact(run).nimg == 48
    assert len(list((run / "logs").iterdir())) == num
    assert "lacks files of the run: it was removed or renamed" in (run / "logs" / "rank00000.log").read_text()
    assert ranks(num).run(run_whole, str(tmp_path), {**SETTINGS, "total_nimg": 64}) == ["done"] * num
    assert [row["nimg"] for row in rows(run)] == [16, 32, 48, 64]


@pytest.mark.slow
def test_a_checkpoint_follows_at_once(ranks, tmp_path):
    """Of the next report, as those before are gone."""
    ((end, seen),) = ranks(1).run(
        train_and, str(tmp_path), "remove", {"report_nimg": 8, "checkpoints.background": "false"}
    )
    assert (end, seen) == ("done", [f"{3 * BATCH:012d}"])


@pytest.mark.slow
def test_changed_reports_are_appended_to(ranks, tmp_path):
    ((end, _),) = ranks(1).run(train_and, str(tmp_path), "change", {})
    assert end == "done"
    assert [row["nimg"] for row in rows(tmp_path / "run")] == [1, 16, 32, 48]


def occupy(run: Path) -> None:
    """Let another process lock the directory, as where its lock was removed."""
    (run / ".lock").unlink()
    code = "import sys, time; from pathlib import Path; from bigsgan.runtime.locking import hold; "
    code += "hold(Path(sys.argv[1]), 'out', 'run', 'wait'); print(flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code, run / ".lock"], stdout=subprocess.PIPE)
    OTHERS.append(other)
    assert other.stdout is not None
    other.stdout.readline()


OTHERS: list[subprocess.Popen[bytes]] = []


def beside_another(directory: str) -> str:
    try:
        return train_and(directory, "occupy", {})[0]
    finally:
        for other in OTHERS:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_a_run_does_not_go_on_beside_another_job(ranks, tmp_path):
    (end,) = ranks(1).run(beside_another, str(tmp_path))
    assert end.startswith(f"out: '{tmp_path}/run' is in use by process ")


def another(run: Path, name: str = "config.yaml") -> None:
    rename(run)
    run.mkdir()
    (run / name).write_text("out: of another program\n")


def thesis(run: Path) -> None:
    another(run, "thesis.txt")


@pytest.mark.slow
@pytest.mark.parametrize("name, file", [("another", "config.yaml"), ("thesis", "thesis.txt")])
def test_another_directory_is_left_alone(ranks, tmp_path, name, file):
    ((end, _),) = ranks(1).run(train_and, str(tmp_path), name, {})
    run = tmp_path / "run"
    assert end == (
        f"out: '{run}' is another directory than at the start of the run; run the same command once that directory is "
        "back, to resume from its newest checkpoint"
    )
    assert [path.name for path in run.iterdir()] == [file]


def unmount(run: Path) -> None:
    subprocess.run(["umount", "-l", run.parent if run.parent.name == "disk" else run], check=True)


@pytest.fixture(params=["disk", "run"])
def disk(tmp_path, request):
    """A mounted file system with the run directory in it, or that is the run directory."""
    disk = tmp_path / request.param
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    yield disk
    subprocess.run(["umount", "-l", disk], capture_output=True)


@pytest.mark.slow
def test_an_unmounted_disk_ends_the_run(ranks, disk):
    where = disk.parent if disk.name == "run" else disk
    ((end, _),) = ranks(1).run(train_and, str(where), "unmount", {})
    assert f"out: '{where}/run' is on another disk than at the start of the run: unmounted, or replaced; run" in end
    assert not list(disk.iterdir())


def of_manifest(directory: str) -> str:
    """Train two updates, remove config.yaml, and resume."""
    run = Path(directory) / "run"
    assert run_whole(directory, {**SETTINGS, "total_nimg": 16}) == "done"
    if comm.rank() == 0:
        (run / "config.yaml").unlink()
        assert read_saved_recipe(run).total_nimg == 16
    comm.barrier()
    return run_whole(directory, {**SETTINGS, "total_nimg": 32})


@pytest.mark.slow
def test_a_checkpoint_tells_the_recipe_of_a_directory_that_lacks_it(ranks, tmp_path):
    assert ranks(1).run(of_manifest, str(tmp_path)) == ["done"]
    assert read_saved_recipe(tmp_path / "run").total_nimg == 32
    assert [row["nimg"] for row in rows(tmp_path / "run")] == [16, 32]
