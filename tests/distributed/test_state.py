"""What an update may and may not touch: D in G's phase, everything around the EMA, skipped updates, resumes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bigsgan import checkpoint
from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.training.initial_weights import InitialWeights, load_initial_weights
from tests.codebooks import MEANS, game
from tests.distributed import scenarios
from tests.features import judged
from tests.single_process import Entry, save
from tests.tiny import TINY_GAMES, tiny_recipe, zero

ADAM = [  # with and without a first moment
    "optimizer.generator={kind: adam, lr: 1e-3, betas: [0.5, 0.9]}",
    "optimizer.discriminator={kind: adam, lr: 1e-3}",
]
STAGES = [0, 1, 2, 3]
FP32 = [zero(stage) for stage in STAGES]
LOW = [zero(s, bf16={"enabled": True}) for s in STAGES] + [
    zero(s, fp16={"enabled": True, "initial_scale_power": 8}) for s in (1, 2, 3)
]


BF16 = {"bf16": {"enabled": True}}
QUICK = [FP32[0], FP32[3]]
SLOW = [FP32[2], LOW[1], LOW[5]]
GROUPS = zero(2, zero={"reduce_bucket_size": 300}, fp16={"enabled": True, "initial_scale_power": 8})
ALL = [
    *QUICK,
    pytest.param(GROUPS, marks=pytest.mark.slow),
    *(pytest.param(ds, marks=pytest.mark.slow) for ds in SLOW),
    *(pytest.param(ds, marks=pytest.mark.nightly) for ds in [*FP32[1:3], *LOW] if ds not in SLOW),
]


def name_of(ds):
    return f"{ds['zero_optimization']['stage']}-{next((p for p in ('bf16', 'fp16') if p in ds), 'fp32')}"


@pytest.mark.slow
@pytest.mark.parametrize("ds", ALL, ids=name_of)
def test_generator_phase_leaves_the_discriminator_alone(ranks, ds):
    for touched in ranks(2).run(scenarios.generator_phase_touches, ADAM, {"generator": ds, "discriminator": ds}):
        assert len(touched) == 8
        assert not any(touched.values()), touched


@pytest.mark.slow
@pytest.mark.parametrize("ds", ALL, ids=name_of)
def test_ema_is_swapped_in_and_out(ranks, ds, tmp_path):
    by_rank = ranks(2).run(scenarios.ema_swap, ADAM, {"generator": ds, "discriminator": ds})
    assert all(rank["restored"] for rank in by_rank)
    # An independent network with the merged EMA's weights, on both ranks' inputs: batch norm sees both.
    merged = scenarios.merge([rank["state"] for rank in by_rank])["average"]
    network = build_network(tiny_recipe(tmp_path), "generator")
    state = {name: merged[name].view(tensor.shape) for name, tensor in network.state_dict().items()}
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name_of(ds)[2:])
    network.load_state_dict(state)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(low or torch.float32).float()
    with torch.no_grad():
        latents, labels = (torch.cat([torch.from_numpy(r["inputs"][i]) for r in by_rank]) for i in (0, 1))
        images = network(latents, labels).numpy()
    got = np.concatenate([rank["ema"] for rank in by_rank])
    tolerance = 1e-5 if low is None else 0.1
    assert np.abs(got - images).max() < tolerance
    assert np.abs(got - np.concatenate([rank["live"] for rank in by_rank])).max() > 1e-3


OFFLOADED = zero(3, zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})
RESUMED = [
    FP32[3],
    pytest.param(FP32[0], marks=pytest.mark.slow),
    pytest.param(OFFLOADED, id="3-fp32-offload", marks=pytest.mark.slow),
    *(pytest.param(ds, marks=pytest.mark.slow) for ds in (FP32[2], LOW[5])),
    *(pytest.param(ds, marks=pytest.mark.nightly) for ds in (FP32[1], *LOW[:5], LOW[6])),
]


@pytest.mark.slow
@pytest.mark.parametrize("ds", RESUMED, ids=name_of)
def test_resume_is_the_same_run(ranks, ds, tmp_path):
    both = {"generator": ds, "discriminator": ds}
    overrides = [*ADAM, "accumulation=2", "objective.r1={weight: 0.2, every: 2}"]
    whole = ranks(2).run(scenarios.uninterrupted, overrides, both, 6)
    parts = ranks(2).run(scenarios.resume, overrides, both, str(tmp_path), 3, 3)
    check_same_run(whole, parts)
    assert [rank["position"] for rank in [*whole, *parts]] == [48] * 4


def refused(overrides, ds, directory):
    """What is said of a checkpoint as of a version whose networks had a bias more: on resuming, and as weights."""
    run = scenarios.build(overrides, ds)
    engines = {"generator": run.step.generator, "discriminator": run.step.discriminator}
    parts = {name: entry.parts() for name, entry in run.entries.items()}
    said = []
    for nimg, name in enumerate(("generator", "average", "discriminator"), 1):
        extra = checkpoint.StateShard("master", "layers.1.conv.bias", 0, torch.full((4,), 5.0))
        entries = {n: Entry([*part, extra] if n == name else part) for n, part in parts.items()}
        assert save(Path(directory), nimg, entries)
        found = checkpoint.newest(Path(directory))
        for start in (
            lambda found=found: scenarios.build(overrides, ds, found),
            lambda found=found, live=name != "average": load_initial_weights(
                run.recipe, InitialWeights(run.recipe, found, live), engines
            ),
        ):
            with pytest.raises(UserError) as caught:
                start()
            said.append((name, str(caught.value)))
    scenarios.destroy(run)
    return said


@pytest.mark.slow
def test_a_value_without_a_place_is_refused(ranks, tmp_path):
    (said,) = ranks(1).run(refused, TINY_GAMES["pix2pix"], dict.fromkeys(NETWORKS, zero(1)), str(tmp_path))
    problem = "which the network of this run's recipe does not have; use another checkpoint, or the version of bigsgan"
    assert len(said) == 6
    for entry, text in said:
        assert f"has {entry}/master/layers.1.conv.bias, {problem}" in text


def check_same_run(whole, parts, num_updates=6):
    """Two runs ended in the same state on every rank, bit for bit."""
    for one, other in zip(whole, parts, strict=True):
        assert one["update"] == other["update"] == num_updates
        assert one["state"].keys() == other["state"].keys()
        for key, value in one["state"].items():
            assert np.array_equal(value, other["state"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("ds", ALL, ids=name_of)
def test_non_finite_gradients_skip_the_update(ranks, ds, network):
    check_skipped(ranks(2).run(scenarios.poisoned, ADAM, {"generator": ds, "discriminator": ds}, network), network)


@pytest.mark.slow
@pytest.mark.parametrize("stage, low", [(1, "fp16"), pytest.param(2, "bf16", marks=pytest.mark.slow)])
def test_an_optimizer_on_the_host_passes_over_the_update(ranks, stage, low):
    """Of gradients that lie on the device, and are looked at by their norm alone."""
    precision = {"enabled": True} | ({"initial_scale_power": 8} if low == "fp16" else {})
    ds = zero(stage, zero={"offload_optimizer": {"device": "cpu"}}, **{low: precision})
    both = dict.fromkeys(NETWORKS, ds)
    check_skipped(ranks(2).run(scenarios.poisoned, [*ADAM, "accumulation=2"], both, "generator"), "generator")


DECIDED = pytest.mark.parametrize(
    "ds",
    [
        pytest.param(zero(0), marks=pytest.mark.nightly),
        zero(0, **BF16),
        pytest.param(zero(1), marks=pytest.mark.nightly),
        zero(2, **BF16),
        pytest.param(zero(3), marks=pytest.mark.slow),
    ],
    ids=["0", "0-bf16", "1", "2-bf16", "3"],
)


def trained(overrides, ds, on_device):
    """State after three updates."""
    with scenarios.decided(on_device):
        run = scenarios.build(overrides, ds)
    scenarios.update(run, 3)
    state = scenarios.full_state(run)
    scenarios.destroy(run)
    return state


@pytest.mark.slow
@DECIDED
def test_it_is_the_same_run_whoever_decides(ranks, ds):
    overrides, both = [*ADAM, "optimizer.discriminator.clip_norm=0.1"], dict.fromkeys(NETWORKS, ds)
    by_host, by_device = (ranks(2).run(trained, overrides, both, on_device) for on_device in (False, True))
    for one, other in zip(by_host, by_device, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert np.array_equal(value, other[key]), key


@pytest.mark.slow
@DECIDED
@pytest.mark.parametrize("network", ["generator", pytest.param("discriminator", marks=pytest.mark.nightly)])
def test_a_device_that_decides_refuses_the_update(ranks, ds, network):
    clipped = [*ADAM, f"optimizer.{network}.clip_norm=1", "objective.lecam={weight: 0.3, decay: 0.5}"]
    check_skipped(ranks(2).run(scenarios.poisoned, clipped, dict.fromkeys(NETWORKS, ds), network, True), network, True)


def check_skipped(results, network, on_device=False):
    """One update of the network was skipped on every rank, and nothing but the other network moved.

    Where the device decides the EMA of G's weights moves on towards the weights, which are what they were.
    """
    for result in results:
        assert result["counts"] == (1, 1, False)
        assert result["later"] == (2, 1, True)
        assert result["moved"] == []
        assert result["ema_moved"] == (on_device or network == "discriminator")
        assert result["other_moved"]
        assert result["finite"]


REMEMBERED = {
    "ada_and_lecam": [
        "augmentation={p: 0.5, target: 0.1, interval: 2, ramp_nimg: 200}", "objective.lecam={weight: 0.3, decay: 0.5}",
    ],
    "path_length": TINY_GAMES["stylegan2_path_length"],
    "codes": game(MEANS),
    "judged_features": judged,
    "pairs": TINY_GAMES["pix2pix"],
    "weight_decay_on_matrices": [
        f"optimizer.{network}.{key}"
        for network in ("generator", "discriminator")
        for key in ("kind=adamw", "weight_decay=0.3", "weight_decay_on=matrices")
    ],
    "parameter_groups": [
        f"optimizer.{network}.groups=[{{parameters: conv1.*, lr_multiplier: 2}}, "
        "{parameters: layers.0.*, frozen_from_nimg: 32}]"
        for network in ("generator", "discriminator")
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REMEMBERED)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_what_a_recipe_adds_is_the_same_run(ranks, name, tmp_path):
    """Averages of logits, signs in the middle of an interval, the mean length, the uses of codes: all are resumed."""
    game = REMEMBERED[name]
    overrides = [*ADAM, *(game(tmp_path) if callable(game) else game)]
    both = {"generator": zero(2), "discriminator": zero(3)}
    whole = ranks(2).run(scenarios.uninterrupted, overrides, both, 6)
    parts = ranks(2).run(scenarios.resume, overrides, both, str(tmp_path), 3, 3)
    check_same_run(whole, parts)
