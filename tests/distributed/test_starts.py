"""A start that is refused: ranks that do not share the run directory, and nothing that stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.training.directory import Traces, check_shared
from tests.distributed.whole_runs import BATCH, run_whole


def apart(directory: str, out: str) -> tuple[str, list[str]]:
    """What a rank hears whose ``out`` is in its own directory, and what is in there afterwards."""
    own = Path(directory) / f"host{comm.rank() // 2}"
    own.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(own)
    try:
        end = run_whole(directory, {}, out=out)
        comm.barrier()
        return end, sorted(str(path.relative_to(own)) for path in own.rglob("*"))
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_ranks_that_do_not_share_out_are_told_at_the_start(ranks, tmp_path):
    ends = ranks(4).run(apart, str(tmp_path), "runs/one")
    assert len({message for message, _ in ends}) == 1
    message = ends[0][0]
    assert message.startswith("out: must be the same directory on all ranks, got 'runs/one' (rank 0 on ")
    for rank in (2, 3):
        assert f"rank {rank} on {os.uname().nodename} {tmp_path}/host1/runs/one" in message
    assert f"has {tmp_path}/host0/runs/one, rank 2" in message
    assert message.endswith("; give an absolute path on a file system that all hosts share")
    assert [left for _, left in ends] == [[]] * 4


@pytest.mark.slow
def test_what_was_there_stays(ranks, tmp_path):
    for host in ("host0", "host1"):
        (tmp_path / host / "runs").mkdir(parents=True)
        (tmp_path / host / "runs" / "notes").write_text("mine")
    ends = ranks(4).run(apart, str(tmp_path), "runs")
    assert [left for _, left in ends] == [["runs", "runs/notes"]] * 4


REFUSED = [
    ({"data": "{kind: folder, root: nowhere, resolution: 16, image_channels: 1}"}, "data.root"),
    ({"metrics": "{names: [fid64], every_nimg: 16, reference: nothing.npz}"}, "metrics.reference"),
    ({"init_from": "{run: nowhere}"}, "init_from.run"),
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides, field", REFUSED, ids=[field for _, field in REFUSED])
def test_a_refused_start_leaves_nothing(ranks, tmp_path, overrides, field):
    before = {path.name for path in tmp_path.iterdir()}
    ends = ranks(2).run(run_whole, str(tmp_path), overrides, None, None, str(tmp_path / "runs" / "new"))
    assert all(end.startswith(f"{field}: ") for end in ends)
    assert {path.name for path in tmp_path.iterdir()} - before <= {"tiny.yaml", "generator.json", "discriminator.json"}


def test_a_refused_start_leaves_what_others_made(tmp_path):
    run = tmp_path / "runs" / "new"
    traces = Traces(run)
    (run / "logs").mkdir(parents=True)
    (run / "notes").write_text("of another program")
    traces.remove(files=True)
    assert [path.name for path in run.iterdir()] == ["notes"]
    traces = Traces(run)
    (run / "logs").mkdir()
    (run / "config.yaml").write_text("of a run that began")
    traces.remove(files=True)
    assert {path.name for path in run.iterdir()} == {"notes", "logs", "config.yaml"}


def test_who_does_not_hold_the_lock_removes_no_files(tmp_path):
    run = tmp_path / "runs" / "new"
    traces = Traces(run)
    (run / "checkpoints").mkdir(parents=True)
    traces.remove(files=False)
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def fail_without_recipe(directory: str) -> str:
    """Save, then end with an error while the recipe is not there."""
    run = Path(directory) / "run"

    def after(update: int) -> None:
        if update == 2:
            (run / "config.yaml").unlink()
            raise UserError("data.max_corrupt", 0, "is less than 1", "repair the files")

    settings = {"total_nimg": 48, "report_nimg": 1000, "checkpoint_nimg": 8, "checkpoints.background": "false"}
    return run_whole(directory, settings, after=after)


@pytest.mark.slow
def test_a_run_that_began_keeps_its_checkpoints(ranks, tmp_path):
    """Though it ends with an error, and its recipe was removed since its last report."""
    (end,) = ranks(1).run(fail_without_recipe, str(tmp_path))
    assert end.startswith("data.max_corrupt")
    assert (tmp_path / "run" / "checkpoints" / f"{2 * BATCH:012d}").is_dir()


def shared(out: str) -> list[str]:
    check_shared(Path(out))
    comm.barrier()
    return os.listdir(out)


def test_a_shared_directory_is_made_and_left_empty(ranks, tmp_path):
    assert ranks(2).run(shared, str(tmp_path / "a" / "b")) == [[], []]
