"""Reports of a run that stopped and resumed equal, row by row, those of one that did not."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from bigsgan import checkpoint
from bigsgan.metrics import real_cache
from tests.distributed.whole_runs import BATCH, rows, run_whole

SETTINGS = {
    "total_nimg": 12 * BATCH, "report_nimg": 3 * BATCH, "sample_nimg": 2 * BATCH, "checkpoint_nimg": 4 * BATCH,
    "checkpoints.keep": 100, "metrics": f"{{names: [fid64], every_nimg: {5 * BATCH}}}",
    "objective.r1": "{weight: 0.1, every: 2}", "objective.lecam": "{weight: 0.3, decay: 0.5}",
}  # fmt: skip
FIRST = {"alarm/discriminator_wins", "diversity/ema", "penalty/r1", "metrics/fid64", "grad_norm/generator"}


def run_apart(directory: str, *more: object) -> str:
    """``run_whole`` with a cache of its own: a test beside it may add up the features of reals in another order."""
    cache = Path(directory).parent / "cache"
    cache.mkdir(exist_ok=True)
    for classifier in real_cache.directory().glob("digits-classifier-*"):
        with suppress(FileExistsError):
            (cache / classifier.name).symlink_to(classifier)
    with mock.patch.dict(os.environ, BIGSGAN_CACHE=str(cache)):
        return run_whole(directory, *more)


def samples(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "samples").iterdir())


def kept(run: Path) -> dict[int, dict[str, float]]:
    """What the manifest of each checkpoint tells of reports, by images seen; keep_best reads it."""
    found = {each.nimg: each.manifest["metrics"] for each in checkpoint.tags.complete(run / "checkpoints")}
    return {
        nimg: {name: value for name, value in metrics.items() if name.startswith(("loss/", "metrics/fid"))}
        for nimg, metrics in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "num, stops",
    [
        (1, [4, 9]),  # measurements are due after these
        pytest.param(1, [0, 1, 2, 5, 7], marks=pytest.mark.nightly),
        (2, [3, 6]),
    ],
)
def test_rows_are_those_of_a_run_that_did_not_stop(ranks, tmp_path, num, stops):
    names = ["whole", "stopped"]
    for name in names:
        (tmp_path / name).mkdir()
    assert ranks(num).run(run_apart, str(tmp_path / "whole"), SETTINGS) == ["done"] * num
    for stop in stops:
        assert ranks(num).run(run_apart, str(tmp_path / "stopped"), SETTINGS, stop) == ["SIGTERM"] * num
    assert ranks(num).run(run_apart, str(tmp_path / "stopped"), SETTINGS) == ["done"] * num
    whole, stopped = (tmp_path / name / "run" for name in names)
    assert rows(stopped) == rows(whole)
    assert FIRST - {"alarm/discriminator_wins"} <= {name for row in rows(whole) for name in row}
    assert samples(stopped) == samples(whole)
    told = kept(stopped)
    assert {nimg: told[nimg] for nimg in kept(whole)} == kept(whole)
    assert all(
        "metrics/fid64" in told[(stop + 1) * BATCH] for stop in stops if stop % 5 == 4
    )  # though it was measured later


@pytest.mark.slow
def test_rows_after_a_kill_are_those_of_a_run_that_went_on(ranks, tmp_path):
    """Of one whose newest checkpoint is not its last report."""
    assert ranks(1).run(run_apart, str(tmp_path), {**SETTINGS, "total_nimg": 7 * BATCH}) == ["done"]
    run = tmp_path / "run"
    before = rows(run)
    shutil.rmtree(run / "checkpoints" / f"{7 * BATCH:012d}")
    assert ranks(1).run(run_apart, str(tmp_path), {**SETTINGS, "total_nimg": 7 * BATCH}) == ["done"]
    assert rows(run) == before


@pytest.mark.slow
def test_a_complete_run_that_goes_on(ranks, tmp_path):
    """Its last report and samples, which were not due, change nothing about later ones."""
    for name in ("whole", "longer"):
        (tmp_path / name).mkdir()
    assert ranks(1).run(run_apart, str(tmp_path / "whole"), SETTINGS) == ["done"]
    for total in (5 * BATCH, 12 * BATCH):
        settings = {**SETTINGS, "total_nimg": total}
        assert ranks(1).run(run_apart, str(tmp_path / "longer"), settings) == ["done"]
    longer, whole = (rows(tmp_path / name / "run") for name in ("longer", "whole"))
    assert [row for row in longer if "loss/generator" not in row or row["nimg"] != 5 * BATCH] == whole


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_other_ranks_go_on_with_the_reports(ranks, tmp_path, first, then):
    """Images weigh the same on either number of ranks, so that all means are the same to rounding."""
    for name in ("whole", "changed"):
        (tmp_path / name).mkdir()
    assert ranks(then).run(run_apart, str(tmp_path / "whole"), SETTINGS) == ["done"] * then
    assert ranks(first).run(run_apart, str(tmp_path / "changed"), SETTINGS, 4) == ["SIGTERM"] * first
    assert ranks(then).run(run_apart, str(tmp_path / "changed"), SETTINGS) == ["done"] * then
    whole, changed = (rows(tmp_path / name / "run") for name in ("whole", "changed"))
    names = ("loss/generator", "loss/discriminator", "grad_norm/generator", "penalty/r1", "metrics/fid64")
    for row, other in zip(whole, changed, strict=True):
        assert row["nimg"] == other["nimg"]
        for name in row.keys() & names:
            assert row[name] == pytest.approx(other[name], rel=1e-3)
