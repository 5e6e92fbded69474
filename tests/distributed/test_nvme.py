"""Optimizer state on NVMe changes nothing: updates, the EMA, skipped updates, checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from bigsgan.engines.deepspeed import internals
from bigsgan.errors import UserError
from tests.distributed import scenarios, test_layouts
from tests.tiny import stages, zero

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# With a first moment, which an optimizer on NVMe keeps even if beta1 is 0.
ADAM = [f"optimizer.{n}={{kind: adam, lr: 1e-3, betas: [0.5, 0.99]}}" for n in ("generator", "discriminator")]
# Wide enough that, on each rank, sub-groups of both networks exceed the 1 MiB from which DeepSpeed swaps.
WIDE = ["generator.channels=48", "discriminator.channels=48"]
SUB_GROUP_SIZE = 300_000
SECONDS = 900


@pytest.fixture
def files(async_io, tmp_path):
    """files(nvme, **options): both networks at ZeRO 3, in the same sub-groups, optimizer state on NVMe or not."""

    (tmp_path / "nvme").mkdir()

    def make(nvme, offload=(), **options):
        section = {"sub_group_size": SUB_GROUP_SIZE}
        if nvme:
            section["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path / "nvme"), **dict(offload)}
        return dict.fromkeys(("generator", "discriminator"), zero(3, zero=section, **options))

    return make


def swapped(overrides, ds):
    """Sizes of the files in which each of a network's masters and its optimizer state lie after an update."""
    run = scenarios.build(overrides, ds)
    scenarios.update(run, 1)
    sizes = {}
    for network in ("generator", "discriminator"):
        engine = getattr(run.step, network)._engine
        files = [internals._swap_files(engine, key) for key in internals.keys(engine)]
        sizes[network] = [[Path(file.path).stat().st_size for file in of_one] for of_one in files]
    scenarios.destroy(run)
    return sizes


def test_some_masters_are_swapped_out_and_some_are_not(ranks, files, tmp_path):
    """The others would prove nothing if nothing were swapped."""
    for sizes in ranks(2).run(swapped, [*ADAM, *WIDE], files(True), timeout=SECONDS):
        for of_network in sizes.values():
            counts = [len(of_one) for of_one in of_network]
            assert counts.count(3) >= 2  # master, exp_avg, exp_avg_sq
            assert counts.count(0) == 1  # the rest
            assert all(size >= 4 * SUB_GROUP_SIZE for of_one in of_network for size in of_one)
    left = [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()]
    assert {path.suffix for path in left} == {".lock"}


def same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.array_equal(value, other[key]), key


def check_same(pool, overrides, plain, moved, num_updates):
    """Compare runs with two pairs of DeepSpeed files."""
    runs = (pool.run(scenarios.uninterrupted, overrides, ds, num_updates, timeout=SECONDS) for ds in (plain, moved))
    for one, other in zip(*runs, strict=True):
        same(one["state"], other["state"])


@pytest.mark.parametrize(
    "world_size, offload, precision",
    [
        (2, {}, {}),
        (1, {}, {}),  # here gradients are swapped out too
        (2, {"pipeline_read": True, "pipeline_write": True}, {}),
        (2, {}, {"bf16": {"enabled": True}}),
        (2, {}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ],
    ids=["fp32", "one-rank", "pipelined", "bf16", "fp16"],
)
def test_nvme_changes_nothing(ranks, files, world_size, offload, precision):
    overrides = [*ADAM, *WIDE, "accumulation=2", "objective.r1={weight: 0.2, every: 2}"]
    check_same(ranks(world_size), overrides, files(False, **precision), files(True, offload, **precision), 4)


@pytest.mark.nightly
def test_nor_where_each_network_has_a_rank_of_its_own(ranks, files):
    overrides = [*ADAM, *WIDE, "accumulation=2", "engines.generator.ranks=1"]
    check_same(ranks(2), overrides, files(False), files(True), 3)


@pytest.mark.parametrize("kind", ["adam", "sgd, momentum: 0.9", "rmsprop, momentum: 0.5"])
def test_resume_is_the_same_run(ranks, files, kind, tmp_path):
    optimizers = [f"optimizer.{n}={{kind: {kind}, lr: 1e-3}}" for n in ("generator", "discriminator")]
    overrides = [*optimizers, *WIDE, "accumulation=2"]
    whole = ranks(2).run(scenarios.uninterrupted, overrides, files(True), 6, timeout=SECONDS)
    parts = ranks(2).run(scenarios.resume, overrides, files(True), str(tmp_path), 3, 3, timeout=SECONDS)
    for one, other in zip(whole, parts, strict=True):
        same(one["state"], other["state"])


def test_ema_is_swapped_in_and_out(ranks, files):
    moved = ranks(2).run(scenarios.ema_swap, [*ADAM, *WIDE], files(True), timeout=SECONDS)
    plain = ranks(2).run(scenarios.ema_swap, [*ADAM, *WIDE], files(False), timeout=SECONDS)
    for one, other in zip(moved, plain, strict=True):
        assert one["restored"]
        assert np.array_equal(one["ema"], other["ema"])
        assert np.array_equal(one["live"], other["live"])
        assert np.abs(one["ema"] - one["live"]).max() > 1e-3


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_non_finite_gradients_skip_the_update(ranks, files, network):
    for result in ranks(2).run(scenarios.poisoned, [*ADAM, *WIDE], files(True), network, timeout=SECONDS):
        assert result["counts"] == (1, 1, False)
        assert result["later"] == (2, 1, True)
        assert result["moved"] == []
        assert result["other_moved"]
        assert result["finite"]


@pytest.mark.parametrize("there", [False, True], ids=["from memory", "to memory"])
def test_a_checkpoint_goes_to_and_from_nvme(ranks, files, tmp_path, there):
    """Parameters, moments, EMA and buffers are equal bit for bit, and so are the next updates."""
    overrides, directory = [*ADAM, *WIDE], str(tmp_path / "checkpoints")
    saved = ranks(2).run(test_layouts.saved_run, overrides, files(there), directory, timeout=SECONDS)
    expected, end = zip(*saved, strict=True)
    resumed = ranks(2).run(
        test_layouts.resumed_runs, overrides, files(not there), [directory], test_layouts.THEN, timeout=SECONDS
    )
    begun, later = zip(*(results[0] for results in resumed), strict=True)
    test_layouts.check_equal(expected, begun)
    test_layouts.check_equal(end, later)


def test_a_checkpoint_in_stages_goes_to_nvme(ranks, files, tmp_path):
    overrides, directory = [*ADAM, *WIDE], str(tmp_path / "checkpoints")
    staged = [*overrides, *stages(2, 2)], dict.fromkeys(("generator", "discriminator"), zero(0))
    saved = ranks(2).run(test_layouts.saved_run, *staged, directory, timeout=SECONDS)
    resumed = ranks(2).run(test_layouts.resumed_runs, overrides, files(True), [directory], 0, timeout=SECONDS)
    test_layouts.check_equal([first for first, _ in saved], [results[0][0] for results in resumed])


def second_run(ds):
    """What a run is told whose swap files another one uses, and whether it can begin once the other has ended."""
    run = scenarios.build(ADAM, ds)
    try:
        scenarios.build(ADAM, ds)
        message = None
    except UserError as error:
        message = str(error)
    scenarios.destroy(run)
    scenarios.destroy(scenarios.build(ADAM, ds))
    return message


def test_two_runs_do_not_share_their_files(ranks, files):
    for message in ranks(1).run(second_run, files(True), timeout=SECONDS):
        assert "nvme_path" in message
        assert "is in use by process " in message
