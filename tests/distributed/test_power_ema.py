"""Power function averages against a float64 loop over the weights of every update; snapshots, and what is kept of them.

What is made of them for other widths is in tests/unit/test_post_hoc.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from bigsgan import checkpoint
from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.inference.post_hoc import reconstruct
from bigsgan.training.loop import finished, training_loop
from bigsgan.training.snapshots import Snapshots
from bigsgan.training.state import _narrowed
from bigsgan.training.stopping import StopRequests
from tests.distributed import scenarios
from tests.tiny import stages, tiny_recipe, zero

WIDTHS, BATCH, NUM, EVERY = (0.05, 0.1), 8, 24, 2
POWER = [f"ema.power={{widths: [0.05, 0.1], snapshot_nimg: {BATCH * EVERY}}}"]
ADAM = [f"optimizer.{network}={{kind: adam, lr: 3e-3, betas: [0.5, 0.9]}}" for network in NETWORKS]
HOST = {"offload_optimizer": {"device": "cpu"}}

LAYOUTS = {
    "zero0": ([], zero(0)),
    "zero1": ([], zero(1)),
    "zero2": ([], zero(2)),
    "zero3": ([], zero(3)),
    "zero2, offload": ([], zero(2, zero=HOST)),
    "stages": ([*stages(2, 1)], zero(1)),
}


def trained(overrides, ds, directory):
    """G's weights after each update, with a snapshot now and then; and what is saved in the end."""
    run = scenarios.build(overrides, ds)
    snapshots = Snapshots(Path(directory), run.recipe, run.entries["average"], run.layout, lambda _: None)
    weights = []
    for _ in range(NUM):
        scenarios.update(run, 1)
        weights.append(scenarios.named_parts(run, "generator", [s.master for s in run.step.generator.shards()]))
        if snapshots.is_due(run.counters.nimg):
            snapshots.save(run.counters.nimg)
    snapshots.finish()
    saved = scenarios.saved_parts(run)
    scenarios.destroy(run)
    return weights, saved


def trajectories(by_rank):
    """Weights by name, float64 (updates, elements); ZeRO 0 has all of them on both ranks."""
    found = {}
    for name in {name for weights in by_rank for name in weights[0]}:
        rows = []
        for k in range(NUM):
            pieces = {offset: values for weights in by_rank for offset, values in weights[k].get(name, [])}
            rows.append(np.concatenate([pieces[offset] for offset in sorted(pieces)]).astype(np.float64))
        found[name] = np.stack(rows)
    return found


def exponent(width):
    """The published equation, solved numerically."""
    return brentq(lambda g: (g + 1) ** 0.5 / (g + 2) / (g + 3) ** 0.5 - width, 0, 1e6, xtol=1e-12)


def average(weights, width):
    """The published update in float64, over weights (updates, elements)."""
    found = np.zeros(weights.shape[1])
    for t, now in enumerate(weights, 1):
        beta = (1 - 1 / t) ** (exponent(width) + 1)
        found = beta * found + (1 - beta) * now
    return found


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2, offload", "zero3", "stages")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("zero0", "zero1", "zero2")),
    ],
)
def test_averages_are_the_published_ones(ranks, name, tmp_path):
    more, ds = LAYOUTS[name]
    overrides = [*ADAM, *POWER, *more]
    by_rank, saved = zip(*ranks(2).run(trained, overrides, dict.fromkeys(NETWORKS, ds), str(tmp_path)), strict=True)
    live, kept = trajectories(by_rank), scenarios.whole_values(saved)
    assert saved[0]["numbers"]["average.power.begun_nimg"] == 0
    for width in WIDTHS:
        for each, weights in live.items():
            expected = average(weights, width)
            assert np.abs(kept[f"average/power_{width}/{each}"] - expected).max() <= 1e-6 * np.abs(weights).max(), each
    nimg, network = reconstruct(tmp_path, tiny_recipe(tmp_path, *overrides), WIDTHS[0], None)
    assert nimg == BATCH * NUM
    for each, value in (*network.named_parameters(), *network.named_buffers()):
        kind = "buffer" if each in dict(network.named_buffers()) else f"power_{WIDTHS[0]}"
        expected = kept[f"average/{kind}/{each}"]
        assert np.abs(value.detach().numpy().ravel() - expected).max() <= 1e-6 * np.abs(expected).max(), each


def rewound(overrides, ds, directory):
    """Names that are left of two snapshots after a return to the first."""
    run = scenarios.build(overrides, ds)
    snapshots = Snapshots(Path(directory), run.recipe, run.entries["average"], run.layout, lambda _: None)
    for nimg in (BATCH, 2 * BATCH):
        scenarios.update(run, 1)
        snapshots.save(nimg)
    snapshots.rewind(BATCH)
    names = sorted(path.name for path in (Path(directory) / "ema_snapshots").iterdir())
    scenarios.destroy(run)
    return names


@pytest.mark.slow
def test_a_run_that_returns_leaves_no_snapshots_of_its_future(ranks, tmp_path):
    names = ranks(2).run(rewound, [*ADAM, *POWER], dict.fromkeys(NETWORKS, zero(1)), str(tmp_path))
    assert names[0] == [f"{BATCH:012d}", "latest"]


def ended(overrides, ds, spoil):
    """Train two updates to the end; the message, and the images seen of checkpoints and of snapshots."""
    run = scenarios.build([*overrides, f"total_nimg={2 * BATCH}", f"checkpoint_nimg={BATCH}"], ds)
    directories = [run.out / "checkpoints", run.out / "ema_snapshots"]
    if spoil:
        directories[1].write_text("")  # as good as a full disk
    try:
        finished(training_loop(run, StopRequests(launched=False)))
        message = ""
    except UserError as error:
        message = str(error)
    run.close()
    scenarios.destroy(run)
    return message, [sorted(int(p.name) for p in d.glob("0*")) for d in directories]


@pytest.mark.slow
def test_a_run_that_cannot_save_its_last_snapshot_is_not_complete(ranks):
    both, every = dict.fromkeys(NETWORKS, zero(1)), [*ADAM, f"ema.power={{snapshot_nimg: {BATCH}}}"]
    assert ranks(1).run(ended, every, both, False) == [("", [[8, 16], [8, 16]])]
    ((message, (saved, _)),) = ranks(1).run(ended, every, both, True)
    assert "ema_snapshots: does not hold the last EMA snapshot; fix what the warnings above name, then run" in message
    assert saved == [BATCH]  # from which the same command takes that snapshot again


@pytest.mark.slow
def test_snapshots_in_half_precision(ranks, tmp_path):
    """Half the size, and a reconstruction as near as the type allows."""
    sizes, networks = [], []
    for precision in ("fp32", "fp16"):
        directory = tmp_path / precision
        directory.mkdir()
        overrides = [*ADAM, f"ema.power={{snapshot_nimg: {BATCH * EVERY}, snapshot_precision: {precision}}}"]
        ranks(2).run(trained, overrides, dict.fromkeys(NETWORKS, zero(2)), str(directory))
        networks.append(reconstruct(directory, tiny_recipe(directory, *overrides), 0.07, None)[1])
        parts = [found.manifest["files"] for found in checkpoint.tags.complete(directory / "ema_snapshots")]
        sizes.append(sum(file["bytes"] for files in parts for file in files.values()))
    numel = sum(p.numel() for p in networks[0].parameters())
    assert sizes[0] - sizes[1] == pytest.approx(2 * numel * len(WIDTHS) * NUM // EVERY, rel=0.02)
    for one, half in zip(*(network.parameters() for network in networks), strict=True):
        error = float((one - half).detach().abs().max())
        assert error <= 2e-3 * float(one.detach().abs().max()) + 1e-6


def test_numbers_too_large_for_half_precision():
    """Become its largest; infinite ones tell of a lost run."""
    found = _narrowed(torch.tensor([1.5, 1e5, -1e6, float("inf"), float("nan")]), torch.float16)
    assert found[:4].tolist() == [1.5, 65504, -65504, float("inf")]
    assert found[4].isnan()


@pytest.mark.slow
@pytest.mark.parametrize("ds", [zero(2), pytest.param(zero(3), marks=pytest.mark.nightly)], ids=["zero2", "zero3"])
def test_resume_is_the_same_run(ranks, ds, tmp_path):
    both, overrides = dict.fromkeys(NETWORKS, ds), [*ADAM, *POWER]
    whole = ranks(2).run(scenarios.uninterrupted, overrides, both, 6)
    parts = ranks(2).run(scenarios.resume, overrides, both, str(tmp_path), 3, 3)
    for one, other in zip(whole, parts, strict=True):
        assert one["state"].keys() == other["state"].keys()
        assert any("power_0.05" in key for key in one["state"])
        for key, value in one["state"].items():
            assert np.array_equal(value, other["state"][key]), key


def changed(overrides, then, ds, directory):
    """Three updates with one recipe and one with another: what is saved in the end."""
    run = scenarios.build(overrides, ds)
    scenarios.update(run, 3)
    scenarios.save(run, Path(directory))
    scenarios.destroy(run)
    run = scenarios.build(then, ds, checkpoint.newest(Path(directory)))
    scenarios.update(run, 1)
    saved = scenarios.saved_parts(run)
    scenarios.destroy(run)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], ["ema.power={widths: [0.2], snapshot_nimg: 8}"]], ids=["none", "another"])
def test_other_widths_begin_anew(ranks, before, tmp_path):
    both = dict.fromkeys(NETWORKS, zero(1))
    saved = ranks(2).run(changed, [*ADAM, *before], [*ADAM, *POWER], both, str(tmp_path))
    assert saved[0]["numbers"]["average.power.begun_nimg"] == 3 * BATCH
    values = scenarios.whole_values(saved)
    for name in [name for name in values if "/power_" in name]:
        live = values["generator/master/" + name.split("/", 2)[2]]
        assert np.array_equal(values[name], live), name
