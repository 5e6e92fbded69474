"""The state of reports: what a checkpoint holds of them."""

from __future__ import annotations

import math

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.config.sections import Checkpoints
from bigsgan.monitor import Statistics
from bigsgan.runtime import comm
from bigsgan.training.reports import REPORTS, Reports
from tests.single_process import entry, save


def begun() -> Reports:
    """Sums of which one is infinite, and one only declared."""
    reports = Reports(Statistics(torch.device("cpu")))
    reports.statistics.declare("spectral_norm/generator")
    reports.statistics.add("loss/generator", torch.tensor([0.1, 0.2, 0.7]))
    reports.statistics.add("logits", torch.tensor([math.inf, 1.0]))
    reports.statistics.add_host("grad_norm/generator", 0.3)
    return reports


def restored(directory, entries, reports: Reports) -> Reports:
    assert save(directory, 8, entries)
    found = checkpoint.newest(directory)
    assert found is not None
    checkpoint.restore(found, {REPORTS: reports}, checkpoint.SingleProcess())
    return reports


def test_sums_go_on_to_the_last_bit(tmp_path):
    whole, first = begun(), begun()
    second = restored(tmp_path, {REPORTS: first}, Reports(Statistics(torch.device("cpu"))))
    for reports in (whole, second):
        reports.statistics.add("loss/generator", torch.tensor([1 / 3]))
        for _ in range(3):
            reports.statistics.add_host("grad_norm/generator", 0.1)
    expected = whole.statistics.reduce(lambda vector: vector)
    assert second.statistics.reduce(lambda vector: vector) == expected
    assert expected["logits"] == math.inf
    assert list(expected) == ["grad_norm/generator", "logits", "loss/generator"]


def test_all_ranks_know_the_sums_that_rank_0_takes(tmp_path, monkeypatch):
    """Of other ranks than before: some names are added to in few updates, and a report may come before the next."""
    first = begun()
    monkeypatch.setattr(comm, "rank", lambda: 1)
    assert save(tmp_path, 8, {REPORTS: first})
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    other = Reports(Statistics(torch.device("cpu")))
    checkpoint.restore(found, {REPORTS: other}, checkpoint.SingleProcess())
    assert other.statistics.names == first.statistics.names
    assert other.statistics.reduce(lambda vector: vector) == {}


def test_what_was_reported_goes_on(tmp_path):
    reports = begun()
    reports.last, reports.diversity, reports.owed = {"loss/generator": math.nan, "ranks": 1}, 0.5, True
    found = restored(tmp_path, {REPORTS: reports}, begun())
    assert (found.diversity, found.owed, found.last["ranks"]) == (0.5, True, 1)
    assert math.isnan(found.last["loss/generator"])


def test_a_checkpoint_of_before_there_were_reports(tmp_path):
    reports = begun()
    reports.diversity, reports.last = 0.5, {"loss/generator": 1.0}
    found = restored(tmp_path, {"other": entry({"weight": torch.ones(4)})}, reports)
    assert (found.diversity, found.last) == (None, {})
    assert found.statistics.reduce(lambda vector: vector) == {}


@pytest.mark.parametrize("due", [True, False])
def test_what_was_not_due_does_not_count(due):
    reports, kept = begun(), begun()
    with reports.counting(due):
        reports.statistics.add("report/only", torch.ones(1))
        reports.statistics.reduce(lambda vector: vector)
        reports.alarms.examine({"grad_norm/generator": 1.0})
        reports.diversity = 0.1
    expected = {} if due else kept.statistics.reduce(lambda vector: vector)
    assert reports.statistics.reduce(lambda vector: vector) == expected
    assert (reports.diversity, len(reports.alarms.numbers())) == ((0.1, 3) if due else (None, 2))


def test_quality_metrics_belong_to_the_state_that_they_were_measured_of():
    reports = begun()
    reports.last, reports.measured = {"loss/generator": 1.0}, (10, {"metrics/fid10": 3.0})
    assert reports.metrics_at(10) == {"loss/generator": 1.0, "metrics/fid10": 3.0}
    reports.last = {"loss/generator": 2.0}
    assert reports.metrics_at(20) == {"loss/generator": 2.0}


def test_metrics_that_came_after_a_checkpoint_are_noted_in_it(tmp_path):
    """keep_best reads them there, and a run that is killed and resumes does not measure again."""
    reports = begun()
    reports.owed = True
    assert save(tmp_path, 8, {REPORTS: reports, "other": entry({"weight": torch.ones(4)}, {"count": 3})})
    reports.owed = False
    saver = checkpoint.Saver(tmp_path, checkpoint.SingleProcess(), Checkpoints())
    saver.amend(8, REPORTS, reports.numbers(), {"metrics/fid10": 3.0})
    (found,) = checkpoint.tags.complete(tmp_path)
    assert found.manifest["metrics"] == {"metrics/fid10": 3.0}
    other, again = entry({"weight": torch.zeros(4)}), Reports(Statistics(torch.device("cpu")))
    checkpoint.restore(found, {REPORTS: again, "other": other}, checkpoint.SingleProcess())
    assert (again.owed, other.loaded[1]) == (False, {"count": 3})
    assert again.statistics.reduce(lambda vector: vector) == begun().statistics.reduce(lambda vector: vector)


def test_means_of_parts_weigh_what_the_parts_do():
    """Two micro-batches of 4 on one rank, and of 2 on each of two ranks later, with one loss each."""
    statistics = Statistics(torch.device("cpu"))
    statistics.add("loss", torch.tensor(1.0), 4)
    statistics.add("loss", torch.tensor(2.0), 2)
    statistics.add("loss", torch.tensor(4.0), 2)
    statistics.add_host("grad_norm", 1.0, 4)
    statistics.add_host("grad_norm", 2.0, 2)
    assert statistics.reduce(lambda vector: vector) == {"grad_norm": 8 / 6, "loss": 2.0}
