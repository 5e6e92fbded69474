"""Signals, hanging ranks and gradients that are not finite: a run saves, names the culprit, or goes back."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from bigsgan import checkpoint, comm
from bigsgan.errors import UserError
from bigsgan.training.loop import training_loop
from bigsgan.training.stopping import StopRequests
from tests.distributed import launching, scenarios
from tests.distributed.launching import TIMEOUT, launch, rank_processes, started
from tests.tiny import tiny_recipe, zero

RUN = ["--config", "tiny.yaml", "out=run", "report_nimg=8"]
two_devices = launching.needs_two_devices


@pytest.mark.slow
@two_devices
@pytest.mark.parametrize(
    "launcher, target, number",
    [
        ("torchrun", "launcher", signal.SIGTERM),
        ("deepspeed", "rank 0", signal.SIGUSR1),
        ("deepspeed", "launcher", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_saves_and_ends_all_ranks(launcher, target, number, tmp_path):
    tiny_recipe(tmp_path)
    with started(launcher, tmp_path, *RUN) as process:
        ranks = rank_processes(process, tmp_path / "run")
        goal = process if target == "launcher" else ranks[int(target[-1])]
        goal.send_signal(number)
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() for rank in ranks)
        output, _ = process.communicate(timeout=TIMEOUT)
    found = checkpoint.find_intact(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found.nimg == rows[-1]["nimg"]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    assert "Traceback" not in log
    if target != "launcher":  # which passes nothing on afterwards
        assert f"stopped by {number.name} at {found.nimg} images, which are saved; the same command goes on" in output
        assert process.returncode == 0


@pytest.mark.slow
@two_devices
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
        tiny_recipe(tmp_path / name)
    with started("torchrun", tmp_path / "stopped", *RUN) as process:
        rank_processes(process, tmp_path / "stopped" / "run")[1].send_signal(signal.SIGUSR1)
        process.communicate(timeout=TIMEOUT)
    total = checkpoint.find(tmp_path / "stopped" / "run").nimg + 24
    states = []
    for name in ("stopped", "whole"):
        assert launch("torchrun", tmp_path / name, *RUN, f"total_nimg={total}").returncode == 0
        found = checkpoint.find(tmp_path / name / "run")
        assert found.nimg == total
        states.append(found.manifest["files"])
    assert states[0] == states[1]  # checksums of all tensors


@pytest.mark.slow
@two_devices
def test_a_rank_that_hangs_is_named_and_ends_the_job(tmp_path):
    tiny_recipe(tmp_path)
    with started("deepspeed", tmp_path, *RUN, "hang_timeout_seconds=6") as process:
        ranks = rank_processes(process, tmp_path / "run")
        ranks[1].send_signal(signal.SIGSTOP)
        hung = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert time.monotonic() - hung < 90
        _, alive = psutil.wait_procs(ranks, timeout=5)
    assert process.returncode != 0
    assert not alive
    (line,) = [line for line in output.splitlines() if "bigsgan: " in line]
    assert "bigsgan: nothing has happened for 6 s: rank 1 does not answer, last seen in phase 'update " in line
    assert 'File "' in (tmp_path / "run" / "logs" / "rank00000.log").read_text()  # the stacks


def agreements(flags):
    """What a rank hears when it raises its flag in some of its calls."""
    agreement = comm.Agreement()
    return [agreement.any_rank(flag) for flag in flags[comm.rank()]]


def test_a_flag_on_one_rank_is_heard_on_all_one_call_later(ranks):
    flags = [[False, True, False, False], [False, False, False, True]]
    assert ranks(2).run(agreements, flags) == [[False, False, True, False]] * 2
    assert ranks(1).run(agreements, [[False, True, False]]) == [[False, True, False]]


ADAM = [f"optimizer.{n}={{kind: adam, lr: 1e-3}}" for n in ("generator", "discriminator")]
SAVING = ["total_nimg=48"]


def not_finite(overrides, ds, network, most, every=16):
    """Train six updates; update 3 has gradients that are not finite, ``most`` times, on the last rank alone."""
    run = scenarios.build([*ADAM, *SAVING, f"checkpoint_nimg={every}", *overrides], ds)
    out = Path(comm.from_rank_zero(tempfile.mkdtemp()))
    run.saver = checkpoint.Saver(out, comm, run.recipe.checkpoints)
    run.recovery._directory = out
    engine = getattr(run.step, network)

    def poison(grad):
        bad = run.counters.update == 3 and run.counters.rollbacks < most and comm.rank() == comm.world_size() - 1
        return grad * float("nan") if bad else grad

    next(p for p in engine.network.parameters() if p.requires_grad).register_hook(poison)
    try:
        assert training_loop(run, StopRequests(launched=False))
    except UserError as error:
        return str(error)
    finally:
        result = run.counters.rollbacks, run.counters.skipped, scenarios.full_state(run)
        scenarios.destroy(run)
    return result


def passing_over(overrides, ds, skipped):
    """Train six updates without the phases of the data ``skipped``."""
    run = scenarios.build([*ADAM, *SAVING, *overrides], ds)
    run.step._reals.rewind(0, skipped)
    scenarios.update(run, 6)
    result = scenarios.full_state(run)
    scenarios.destroy(run)
    return result


@pytest.mark.parametrize(
    "stage, network",
    [(0, "generator"), pytest.param(3, "discriminator", marks=pytest.mark.slow)],
)
def test_a_run_goes_back_and_passes_over_the_data(ranks, stage, network):
    """As if that data had never been there, bit for bit, but for the counts."""
    both = {"generator": zero(stage), "discriminator": zero(stage)}
    for most, skipped in ((1, (3,)), (2, (3, 4))):
        found = ranks(2).run(not_finite, [], both, network, most)
        expected = ranks(2).run(passing_over, [], both, skipped)
        for (rollbacks, passed_over, state), reference in zip(found, expected, strict=True):
            assert (rollbacks, passed_over) == (most, skipped)
            values = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
            assert len(values) > 50
            for key, value in values.items():
                assert np.array_equal(value, reference[key]), key


def test_too_many_rollbacks_end_the_run_with_a_report(ranks):
    both = {"generator": zero(1), "discriminator": zero(1)}
    for message in ranks(2).run(not_finite, ["max_rollbacks=1"], both, "discriminator", 5):
        assert message.startswith(
            "max_rollbacks: 1 rollbacks were not enough: update 3 is not finite (rank 1: first in "
        )
        assert "the gradient of " in message
        assert "of the discriminator" in message


def test_before_the_first_checkpoint_there_is_nothing_to_go_back_to(ranks):
    both = {"generator": zero(0), "discriminator": zero(0)}
    for message in ranks(2).run(not_finite, [], both, "generator", 1, 40):
        assert message.startswith(
            "update 3: is not finite, before there is a checkpoint to go back to (rank 1: first in"
        )
