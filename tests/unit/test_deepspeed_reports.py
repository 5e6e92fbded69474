"""DeepSpeed's own reports: the log of collectives, counted, and one profile a network."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.comm.comm import comms_logger
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.utils.timer import SynchronizedWallClockTimer

from bigsgan.engines.deepspeed import reports


@pytest.fixture
def log(monkeypatch):
    """DeepSpeed's log of collectives, switched on."""
    monkeypatch.setattr(comms_logger, "enabled", True)
    reports.keep_log()
    yield comms_logger
    reports.forget_log()
    del comms_logger.append


def test_collectives_are_counted_by_name_and_size(log):
    for _ in range(3):
        log.append("all_reduce", "all_reduce", 2.0, 4096)
    log.append("all_reduce", "all_reduce", 1.5, 8)
    # DeepSpeed has no formula for these two: its own log would end the process.
    log.append("all_gather_object", "all_gather_object", 0.25, 0)
    log.append("monitored_barrier", "monitored_barrier", 0.0, 0)
    assert reports.logged() == [
        ("all_gather_object", 0, 1, 0.25),
        ("all_reduce", 8, 1, 1.5),
        ("all_reduce", 4096, 3, 6.0),
        ("monitored_barrier", 0, 1, 0.0),
    ]
    assert reports.summary().splitlines() == [
        "comms_logger: collectives of both engines on this rank",
        "collective         bytes  calls   ms  ms a call",
        "all_gather_object      0      1  0.2      0.250",
        "all_reduce             8      1  1.5      1.500",
        "all_reduce         4,096      3  6.0      2.000",
        "monitored_barrier      0      1  0.0      0.000",
    ]
    assert log.comms_dict == {}  # nothing that grows
    reports.forget_log()
    assert reports.logged() == []
    assert reports.summary() == ""


def test_gradients_go_through_deepspeed_only_while_it_logs(log):
    assert reports.collectives().__name__ == "deepspeed.comm"
    reports.forget_log()
    assert reports.collectives() is torch.distributed


def engine_with(profiler: FlopsProfiler) -> SimpleNamespace:
    return SimpleNamespace(
        flops_profiler=profiler, flops_profiler_enabled=lambda: True, flops_profiler_profile_step=lambda: 7,
        global_rank=0, timers=SynchronizedWallClockTimer(),
    )  # fmt: skip


def profiled(out: Path) -> FlopsProfiler:
    """A profiler of a linear map, after a pass of 5 samples through it."""
    profiler = FlopsProfiler(torch.nn.Linear(3, 4))
    reports.profile_into(engine_with(profiler), "discriminator", out, False)
    profiler.start_profile()
    profiler.model(torch.zeros(5, 3))
    profiler.stop_profile()
    return profiler


def test_a_profile_has_a_file_of_its_network_in_the_run_directory(tmp_path, capsys):
    other = tmp_path / "mine.txt"
    other.write_text("kept")
    profiled(tmp_path).print_model_profile(profile_step=2, output_file=str(other))
    text = (tmp_path / "flops_discriminator.txt").read_text()
    assert "Profile Summary at step 2" in text
    assert "fwd MACs per GPU:" in text
    assert "60 MACs" in text  # 5 samples, 3 inputs, 4 outputs
    assert other.read_text() == "kept"
    assert capsys.readouterr().out == ""


def test_a_profile_that_cannot_be_written_or_made_is_a_warning(tmp_path, caplog, monkeypatch):
    path = tmp_path / "gone" / "flops_discriminator.txt"
    with caplog.at_level(logging.WARNING):
        profiler = profiled(tmp_path / "gone")
        profiler.print_model_profile()
        monkeypatch.setattr(profiler, "get_total_flops", lambda: 1 / 0)
        profiler.print_model_profile()
    assert [record.getMessage() for record in caplog.records if record.name == reports.__name__] == [
        f"flops_profiler: {path} is not written: No such file or directory: {path}.tmp",
        f"flops_profiler: {path} is not written: division by zero",
    ]


def test_a_profile_that_was_not_made_is_told_at_the_end(tmp_path):
    profiler = FlopsProfiler(torch.nn.Linear(3, 4))
    try:
        reports.profile_into(engine_with(profiler), "generator", tmp_path, False)
        path = tmp_path / "flops_generator.txt"
        text = f"flops_profiler: {path} is not written, as the run ended before update 7 of the network since its start"
        assert reports.summary() == text
        profiled(tmp_path).print_model_profile()
        assert reports.summary() == text  # of the other network
    finally:
        reports.forget_log()
    assert reports.summary() == ""


@pytest.mark.parametrize("breaks_down", [True, False])
def test_a_profiler_prints_no_times_of_its_own(tmp_path, capsys, breaks_down):
    engine = engine_with(FlopsProfiler(torch.nn.Linear(3, 4)))
    reports.profile_into(engine, "generator", tmp_path, breaks_down)
    reports.forget_log()
    engine.timers("fwd").start()
    engine.timers("fwd").stop()
    engine.timers.log(["fwd"])
    assert ("time (ms)" in capsys.readouterr().out) == breaks_down
    assert not engine.timers("fwd").event_timers
