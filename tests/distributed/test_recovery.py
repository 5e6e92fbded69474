"""Gradients that are not finite: a run goes back to its last checkpoint; how ranks agree, and stay alone in a run."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from bigsgan import checkpoint
from bigsgan.adversarial import AdversarialStep
from bigsgan.config import NETWORKS
from bigsgan.config.sections import Checkpoints
from bigsgan.engines.outcomes import Outcomes
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.runtime.agreement import Agreement
from bigsgan.runtime.locking import hold
from bigsgan.training.loop import finished, training_loop
from bigsgan.training.opening import exclusive_lock
from bigsgan.training.recovery import Attempt, Recovery
from bigsgan.training.stopping import StopRequests
from tests.distributed import scenarios
from tests.single_process import entry, save
from tests.tiny import stages, zero


def agreements(flags):
    """What a rank hears when it raises its flag in some of its calls."""
    agreement = Agreement()
    return [agreement.any_rank(flag) for flag in flags[comm.rank()]]


def test_a_flag_on_one_rank_is_heard_on_all_one_call_later(ranks):
    flags = [[False, True, False, False], [False, False, False, True]]
    assert ranks(2).run(agreements, flags) == [[False, False, True, False]] * 2
    assert ranks(1).run(agreements, [[False, True, False]]) == [[False, True, False]]


def alone(out):
    """What ranks are told of a run directory that another job trains in, and whether they get it afterwards."""
    release = hold(Path(out) / ".lock", "out", out, "wait") if comm.rank() == 1 else None
    comm.barrier()
    with pytest.raises(UserError) as caught, exclusive_lock(Path(out)):
        pass
    if release is not None:
        release()
    comm.barrier()
    with exclusive_lock(Path(out)):
        return str(caught.value), os.getpid()


def test_all_ranks_are_told_of_another_job(ranks, tmp_path):
    (first, _), (second, pid) = ranks(2).run(alone, str(tmp_path))
    assert first == second
    assert f"is in use by process {pid} on " in first


ADAM = [f"optimizer.{n}={{kind: adam, lr: 1e-3}}" for n in ("generator", "discriminator")]
SAVING = ["total_nimg=48"]


def run_that_saves(overrides, ds):
    """A run with a directory of its own for its checkpoints, and that directory."""
    run = scenarios.build([*ADAM, *SAVING, *overrides], ds)
    out = Path(comm.from_rank_zero(tempfile.mkdtemp()))
    run.saver = checkpoint.Saver(out, comm, run.recipe.checkpoints)
    run.recovery._saver, run.recovery._bad = run.saver, run.saver.bad
    return run, out


def train_to_the_end(run, made, stop_in, after=lambda step, update: None):
    """Train to the end, or until the first rank is asked to stop during update ``stop_in``.

    Each update goes to ``made`` as it begins; ``after`` is called when it was made.
    """
    make, requests = AdversarialStep.__call__, StopRequests(launched=False)

    def noted(step, update, scheduled):
        made.append(update)
        if update == stop_in and comm.rank() == 0:
            requests.signal = "SIGTERM"
        make(step, update, scheduled)
        after(step, update)

    with mock.patch.object(AdversarialStep, "__call__", noted):
        assert finished(training_loop(run, requests)) == (stop_in is None)


def not_finite(overrides, ds, network, most, every=16, on_device=False, bad=(3,), stop_in=None):
    """Train six updates; some have gradients that are not finite, ``most`` times, on the network's last rank alone.

    With ``stop_in`` the first rank is asked to stop during that update.
    """
    with scenarios.decided(on_device):
        run, _ = run_that_saves([f"checkpoint_nimg={every}", *overrides], ds)
    engine, made = getattr(run.step, network), []

    def poison(grad):
        is_bad = made[-1] in bad and run.counters.rollbacks < most and comm.rank() == holders[-1]
        return grad * float("nan") if is_bad else grad

    holders = [r for r, held in enumerate(comm.from_rank_zero(comm.gather_objects(engine.is_held))) if held]
    if engine.is_held:
        next(p for p in engine.network.parameters() if p.requires_grad).register_hook(poison)
    try:
        train_to_the_end(run, made, stop_in)
    except UserError as error:
        return str(error)
    finally:
        result = run.counters.rollbacks, run.counters.skipped, scenarios.full_state(run), made
        scenarios.destroy(run)
    return result


def losing(overrides, ds, spoil, bad, stop_in=None, most=1):
    """Train six updates; the last rank's state is spoilt after ``bad``, ``most`` times. Also returns the saved tags."""
    (run, out), made = run_that_saves(overrides, ds), []

    def lose(step, update):
        if update == bad and run.counters.rollbacks < most and comm.rank() == comm.world_size() - 1:
            shard = next(shard for shard in step.generator.shards() if shard.pieces)
            values = shard.master if spoil == "master" else shard.optimizer_state[spoil].view(-1)
            values[shard.pieces[-1].start + shard.pieces[-1].numel - 1] = float("inf")

    try:
        train_to_the_end(run, made, stop_in, lose)
    except UserError as error:
        return str(error)
    finally:
        tags = sorted(int(path.name) for path in out.iterdir() if path.name.isdecimal())
        result = tags, run.counters.rollbacks, run.counters.skipped, scenarios.full_state(run), made
        scenarios.destroy(run)
    return result


def passing_over(overrides, ds, skipped, num_updates=6):
    """Train without the stretches of the data ``skipped``."""
    run = scenarios.build([*ADAM, *SAVING, *overrides], ds)
    run.reals.rewind(0, skipped)
    scenarios.update(run, num_updates)
    result = scenarios.full_state(run)
    scenarios.destroy(run)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, network, most, skipped",
    [(0, "generator", 1, (24, 32)), (3, "discriminator", 2, (24, 40))],
)
def test_a_run_goes_back_and_passes_over_the_data(ranks, stage, network, most, skipped):
    """As if that data had never been there, bit for bit, but for the counts."""
    both = {"generator": zero(stage), "discriminator": zero(stage)}
    found = ranks(2).run(not_finite, [], both, network, most)
    expected = ranks(2).run(passing_over, [], both, [skipped])
    check_passed_over(found, expected, (most, (skipped,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, more", [pytest.param(3, [], marks=pytest.mark.nightly), (1, stages(2, 2))], ids=["zero3", "stages"]
)
def test_so_it_does_where_d_carries_tangents(ranks, stage, more):
    overrides, both = [*more, "objective.r1={weight: 0.1, method: forward_mode}"], dict.fromkeys(NETWORKS, zero(stage))
    found = ranks(2).run(not_finite, overrides, both, "discriminator", 1)
    expected = ranks(2).run(passing_over, overrides, both, [(24, 32)])
    check_passed_over(found, expected, (1, ((24, 32),)))


@pytest.mark.parametrize(
    "every, made",
    [
        pytest.param(16, [0, 1, 2, 3, 3, 2, 3, 4, 5], marks=pytest.mark.slow),
        pytest.param(24, [0, 1, 2, 3, 4, 3, 3, 4, 5], marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("network", ["generator", pytest.param("discriminator", marks=pytest.mark.nightly)])
def test_where_the_device_decides_the_host_learns_of_it_an_update_later(ranks, network, every, made):
    """Or at once, where the update is saved; 8 images are one."""
    both = dict.fromkeys(NETWORKS, zero(1, bf16={"enabled": True}))
    found = ranks(2).run(not_finite, [], both, network, 1, every, True)
    check_passed_over(found, ranks(2).run(passing_over, [], both, [(24, 32)]), (1, ((24, 32),)))
    assert [each[3] for each in found] == [made] * 2


LATE = [0, 1, 2, 3, 4, 3]
"""Update 3 is found out after update 4, and repeated."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, more, bad, stop_in, skipped, made",
    [
        (0, ["objective.d_steps=2"], (3,), None, (48, 64), [*LATE, 3, 4, 5]),
        (3, [], (3, 4), None, (24, 32), [*LATE, 3, 4, 5]),
        (2, [], (3,), 4, (24, 32), [*LATE, 3]),
        pytest.param(1, [], (5,), None, (40, 48), [0, 1, 2, 3, 4, 5, 5, 3, 4, 5], marks=pytest.mark.nightly),
    ],
    ids=["two steps of D", "two in a row", "asked to stop before it is known", "the last"],
)
def test_what_is_learnt_late_is_undone_whole(ranks, stage, more, bad, stop_in, skipped, made):
    both = dict.fromkeys(NETWORKS, zero(stage))
    found = ranks(2).run(not_finite, more, both, "discriminator", 1, 24, True, bad, stop_in)
    num_updates = made[-1] + 1
    check_passed_over(found, ranks(2).run(passing_over, more, both, [skipped], num_updates), (1, (skipped,)))
    assert [each[3] for each in found] == [made] * 2


def recovering(step, directory):
    return Recovery(step, None, None, None, {}, checkpoint.Saver(directory, comm, Checkpoints()), 1, lambda num: None)


def stepping(**engines):
    return SimpleNamespace(executor=SimpleNamespace(engines=engines), **engines)


def test_where_d_scales_its_loss_no_update_of_g_is_a_failure():
    """The gradient that G gets from it overflows now and then, until its scale fits."""

    def engine(scales_loss, num_skipped):
        outcomes = Outcomes()
        outcomes.restore(5, num_skipped)
        return SimpleNamespace(scales_loss=scales_loss, outcomes=outcomes, is_held=True)

    for d_scales, g_scales, expected in ((True, False, None), (False, False, 7), (False, True, None)):
        step = stepping(generator=engine(g_scales, 0), discriminator=engine(d_scales, 0))
        recovery = recovering(step, Path())
        step.generator.outcomes.add(False)
        failed = recovery.failed(Attempt(7, (0, 8), None), at_once=False)
        assert (failed and failed.update) == expected


def check_passed_over(found, expected, counts):
    """Runs rolled back so often, over that data, and ended as runs that never saw it."""
    for (*rolled_back, state, _), reference in zip(found, expected, strict=True):
        assert tuple(rolled_back) == counts
        values = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        assert len(values) > 20
        for key, value in values.items():
            assert np.array_equal(value, reference[key]), key


@pytest.mark.slow
def test_too_many_rollbacks_end_the_run_with_a_report(ranks):
    both = {"generator": zero(1), "discriminator": zero(1)}
    for message in ranks(2).run(not_finite, ["max_rollbacks=1"], both, "discriminator", 5):
        assert message.startswith("max_rollbacks: 1 is not enough: update 3 is not finite (rank 1: first in ")
        assert "the gradient of " in message
        assert "of the discriminator" in message


@pytest.mark.slow
def test_a_checkpoint_whose_next_update_fails_on_other_data_too_is_passed_over(ranks):
    """The one before it is taken, and the run ends as if it had never seen the data of both failures."""
    both = dict.fromkeys(NETWORKS, zero(2))
    found = ranks(2).run(not_finite, [], both, "discriminator", 2, 16, False, (4,))
    check_passed_over(found, ranks(2).run(passing_over, [], both, [(32, 48)]), (2, ((32, 48),)))
    assert [each[3] for each in found] == [[0, 1, 2, 3, 4, 4, 4, 4, 2, 3, 4, 5]] * 2


def test_a_checkpoint_that_is_saved_anew_is_not_the_bad_one(tmp_path):
    """The run that went further back comes to the same number of images again."""
    step = stepping(**dict.fromkeys(NETWORKS, SimpleNamespace(scales_loss=True, is_held=True)))
    recovery = recovering(step, tmp_path)
    for nimg in (16, 32):
        assert save(tmp_path, nimg, {"generator": entry({"a": torch.full((3,), float(nimg))})})
    assert checkpoint.newest_or_none(tmp_path, [], recovery._bad).nimg == 32
    recovery._bad.add(checkpoint.newest(tmp_path).manifest["sha256"])
    assert checkpoint.newest_or_none(tmp_path, [], recovery._bad).nimg == 16
    assert checkpoint.newest_or_none(tmp_path, [tmp_path / "000000000016"], recovery._bad) is None
    assert save(tmp_path, 32, {"generator": entry({"a": torch.full((3,), 33.0)})})
    assert checkpoint.newest_or_none(tmp_path, [], recovery._bad).nimg == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, spoil, every, more, bad, stop_in, skipped, made, tags",
    [
        (0, "master", 16, [], 5, None, (32, 48), [0, 1, 2, 3, 4, 5, 4, 5], [16, 32, 48]),
        (2, "master", 24, [], 3, 2, (24, 32), [0, 1, 2, 3, 3], [24, 32]),
        (1, "exp_avg_sq", 16, [], 3, None, (16, 48), [0, 1, 2, 3, 4, 5, 2, 3, 4, 5], [16, 32, 48]),
        (1, "exp_avg_sq", 16, ["checkpoints.background=false"], 3, None, (16, 32), [0, 1, 2, 3, 2, 3, 4, 5], None),
    ],
    ids=["at the last update", "asked to stop", "in a checkpoint before", "in the foreground"],
)
def test_a_lost_state_is_rolled_back(ranks, stage, spoil, every, more, bad, stop_in, skipped, made, tags):
    """No gradient was at fault, and the data of all updates since the checkpoint may have been."""
    both = dict.fromkeys(NETWORKS, zero(stage))
    found = ranks(2).run(losing, [f"checkpoint_nimg={every}", *more], both, spoil, bad, stop_in)
    num_updates = made[-1] + 1
    expected = ranks(2).run(passing_over, more, both, [skipped], num_updates)
    check_passed_over([each[1:] for each in found], expected, (1, (skipped,)))
    assert [each[4] for each in found] == [made] * 2
    assert [each[0] for each in found] == [tags or [16, 32, 48]] * 2


@pytest.mark.slow
def test_a_tag_after_which_the_state_is_lost_twice_is_passed_over(ranks):
    """The data was not at fault, as the second time it was other data."""
    both = dict.fromkeys(NETWORKS, zero(0))
    found = ranks(2).run(losing, ["checkpoint_nimg=16"], both, "master", 5, None, 2)
    expected = ranks(2).run(passing_over, [], both, [(16, 64)], 6)
    check_passed_over([each[1:] for each in found], expected, (2, ((16, 64),)))
    assert [each[4] for each in found] == [[0, 1, 2, 3, 4, 5, 4, 5, 2, 3, 4, 5]] * 2


@pytest.mark.slow
def test_a_state_that_is_lost_before_the_first_checkpoint_is_told_so(ranks):
    both = dict.fromkeys(NETWORKS, zero(0))
    for message in ranks(2).run(losing, ["checkpoint_nimg=48"], both, "master", 5):
        assert message.startswith(
            "the state after update 5: is not finite, and there is no checkpoint to roll back to ("
        )
        assert re.search(r"\(rank [01]: generator/master/.* has non-finite values\); lower the learning rates", message)


@pytest.mark.slow
def test_before_the_first_checkpoint_there_is_nothing_to_go_back_to(ranks):
    both = {"generator": zero(0), "discriminator": zero(0)}
    for message in ranks(2).run(not_finite, [], both, "generator", 1, 40):
        assert message.startswith(
            "update 3: is not finite, and there is no checkpoint to roll back to (rank 1: first in"
        )
