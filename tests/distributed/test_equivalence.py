"""Same seed, same model, however the work is split: every layout against the plain PyTorch reference."""

import tempfile
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median

import pytest
import torch

from bigsgan.config import NETWORKS, both_engines
from tests import reference
from tests.distributed import scenarios
from tests.distributed.agreement import SAME, check_updates, differences
from tests.tiny import TINY_GAMES, tiny_recipe, zero

UPDATES = 6
FEWER = 4
"""Where each update is compared with the reference's, which begins from the same state."""

TURNS = 3
"""The same of games without schedules: the penalty is due, is not, and is once more, with the optimizer's state."""

# Biases before a batch norm, which takes the mean away: their gradient is rounding.
UNSEEN = [f"layers.{name}.bias" for name in ("1.conv1", "3.conv1", "3.conv2", "3.shortcut")]
SEED = 2

PENALTIES = {
    "none": [],
    "exact": ["objective.r1={weight: 0.2, every: 2}"],
    "finite_difference": ["objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}"],
}

STOCK = ["engines.stock_deepspeed=both"]


@lru_cache
def expected(*overrides: str, updates: int = UPDATES):
    return reference.run_reference(tiny_recipe(Path(tempfile.mkdtemp()), *overrides), updates)


def check(pool, overrides, ds, updates=FEWER):
    """Every update is the reference's, begun from the same state."""
    check_updates(pool, [*overrides, f"seed={SEED}"], ds, updates)


def cells():
    """Every cell of the matrix; the quick tier takes those in which most parts meet."""
    for stage, world_size, accumulation, penalty in product((0, 1, 2, 3), (1, 2), (1, 2), PENALTIES):
        both = (world_size, accumulation) == (2, 2)
        quick = both and stage != 1 and penalty == ("finite_difference" if stage == 0 else "exact")
        alone = (world_size, accumulation, penalty) == (1, 2, "exact")
        slow = (alone and stage == 3) or (both and stage in (1, 3) and penalty != "none")  # which the others include
        marks = pytest.mark.smoke if quick else pytest.mark.slow if slow else pytest.mark.nightly
        yield pytest.param(stage, world_size, accumulation, penalty, marks=marks)


@pytest.mark.parametrize("stage, world_size, accumulation, penalty", [*cells()])
def test_matrix(ranks, stage, world_size, accumulation, penalty):
    overrides = [f"accumulation={accumulation}", *PENALTIES[penalty]]
    check(ranks(world_size), overrides, {"generator": zero(stage), "discriminator": zero(stage)}, TURNS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, world_size, accumulation, penalty", [*product((0, 1, 2, 3), (1, 2), (1, 2), PENALTIES)]
)
def test_matrix_of_deepspeed_as_it_comes(ranks, stage, world_size, accumulation, penalty):
    overrides = [*STOCK, f"accumulation={accumulation}", *PENALTIES[penalty]]
    check(ranks(world_size), overrides, dict.fromkeys(NETWORKS, zero(stage)))


OVERRIDES = {
    "r2": ["objective.r1={weight: 0.2, every: 2}", "objective.r2={weight: 0.1, every: 2}"],
    "r2_finite_difference": [
        "objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}",
        "objective.r2={weight: 0.1, every: 2, form: finite_difference, sigma: 0.5}",
    ],
    "two_d_steps": ["objective.d_steps=2", "objective.r1={weight: 0.2, every: 3}"],
    "non_saturating": ["objective.loss=non_saturating"],
    "least_squares": ["objective.loss=least_squares"],
    "wasserstein": ["objective.loss=wasserstein"],
    "relativistic": ["objective.loss=relativistic", "objective.d_steps=2", "accumulation=2"],
    "reused_fakes": ["objective={reuse_fakes: true, d_steps: 2}"],
    "reused_fakes_made_again": ["objective.reuse_fakes=true", "accumulation=2"],
    "labels_of_the_data": [
        "objective={loss: relativistic, reuse_fakes: true, fake_labels: data, d_steps: 2}",
        "accumulation=2",
    ],
    "reused_fakes_with_path_length": [
        *TINY_GAMES["stylegan2_path_length"],
        "objective.reuse_fakes=true",
        "accumulation=2",
    ],
    "path_length_of_half": [*TINY_GAMES["stylegan2_path_length"], "objective.path_length.batch_shrink=2"],
    "orthogonal": ["objective.orthogonal={generator: 1e-2, discriminator: 1e-2}", "accumulation=2"],
    "unconditional": ["data.num_classes=0"],
    "every_pass": ["statistics=every_pass", "accumulation=2", "objective.d_steps=2"],
    "scheduled": [
        "objective.r1={weight: 0.4, final_weight: 0.1, decay_nimg: 32}",
        "objective.r2={weight: 0.1, final_weight: 0.3}",
        "optimizer.generator={kind: sgd, lr: 0.002, decay: cosine, final_lr: 0.0005, decay_nimg: 32}",
        "ema={half_life_nimg: 16, warmup_nimg: 32}",
    ],
    "gradient_penalty": ["objective.loss=wasserstein", "objective.gradient_penalty={weight: 1}", "accumulation=2"],
    "lecam": ["objective.lecam={weight: 0.3, decay: 0.5}", "accumulation=2"],
    "ada": ["augmentation={pipeline: bgc, p: 0.6, target: 0.1, interval: 2, ramp_nimg: 200}", "accumulation=2"],
    "diffaugment": ["augmentation={kind: diffaugment}", "objective.loss=relativistic"],
    "own_accumulation": ["engines.discriminator.accumulation=2"],
    "weight_decay_on_matrices": [
        f"optimizer.{network}={{kind: sgd, lr: 0.002, weight_decay: 10, weight_decay_on: matrices, {moves}}}"
        for network, moves in [("generator", "decay: cosine, final_lr: 0.0005, decay_nimg: 32"), ("discriminator", "")]
    ],
    "parameter_groups": [
        "optimizer.generator={kind: sgd, lr: 0.002, decay: cosine, decay_nimg: 64, groups: ["
        "{parameters: layers.1.*, lr_multiplier: 3}, {parameters: layers.3.*, frozen_from_nimg: 16}]}",
        "optimizer.discriminator={kind: sgd, lr: 0.002, weight_decay: 10, weight_decay_on: matrices, groups: ["
        "{parameters: layers.0.*, lr_multiplier: 0.5}]}",
    ],
}


# What needs gathered parameters, gradients in the forward pass, or graphs of its own.
AT_STAGE_3 = [
    "r2", "gradient_penalty", "ada", "two_d_steps", "reused_fakes", "reused_fakes_made_again",
    "reused_fakes_with_path_length", "path_length_of_half", "orthogonal", "diffaugment", "own_accumulation",
    "weight_decay_on_matrices", "parameter_groups", "every_pass",
]  # fmt: skip
IN_CI_AT_3 = (
    "r2", "gradient_penalty", "ada", "two_d_steps", "reused_fakes", "diffaugment", "weight_decay_on_matrices",
    "parameter_groups",
)  # fmt: skip
"""Others are at ZeRO 1 there."""


@pytest.mark.parametrize(
    "stage, name",
    [
        *(pytest.param(1, n, marks=pytest.mark.nightly if n in IN_CI_AT_3 else pytest.mark.slow) for n in OVERRIDES),
        *(pytest.param(3, n, marks=pytest.mark.slow if n in IN_CI_AT_3 else pytest.mark.nightly) for n in AT_STAGE_3),
    ],
)
def test_options(ranks, stage, name):
    check(ranks(2), OVERRIDES[name], {"generator": zero(stage), "discriminator": zero(stage)})


@pytest.mark.slow
def test_what_is_gathered_ahead_does_not_hinder_a_double_backward(ranks):
    """With reused fakes D trains between G's two passes, and G's path length is due for the third time."""
    overrides = [*TINY_GAMES["stylegan2_path_length"], "objective.reuse_fakes=true"]
    overrides.append("objective.path_length.method=double_backward")
    ahead = zero(3, zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 300})
    check(ranks(2), overrides, dict.fromkeys(NETWORKS, ahead), 6)


@pytest.mark.parametrize(
    "stages",
    [
        *(pytest.param(stages, marks=pytest.mark.slow) for stages in ((0, 3), (3, 1))),
        *(pytest.param(stages, marks=pytest.mark.nightly) for stages in ((2, 0), (3, 2))),
    ],
)
def test_networks_may_differ_in_stage(ranks, stages):
    ds = {"generator": zero(stages[0]), "discriminator": zero(stages[1])}
    check(ranks(2), PENALTIES["exact"], ds)


@pytest.mark.parametrize(
    "stage",
    [*(pytest.param(s, marks=pytest.mark.nightly) for s in (0, 1, 2)), pytest.param(3, marks=pytest.mark.slow)],
)
def test_checkpointing_changes_nothing(ranks, stage):
    checkpointing = both_engines("activation_checkpointing=true")
    ds = {"generator": zero(stage), "discriminator": zero(stage)}
    check(ranks(2), [*PENALTIES["exact"], *checkpointing], ds)


@pytest.mark.slow
def test_stage_3_with_persistent_parameters(ranks):
    keep = zero(3, zero={"stage3_param_persistence_threshold": 10_000})
    check(ranks(2), PENALTIES["exact"], {"generator": keep, "discriminator": keep})


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.nightly), *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))]
)
def test_groups_of_parameters_change_nothing(ranks, stage):
    """Some parameters are larger than a group may be; of 0, each is one by itself."""
    section = {"reduce_bucket_size": 300, "overlap_comm": True}
    sizes = dict(zip(NETWORKS, (300, 0), strict=True))
    ds = {n: zero(stage, zero=section | ({"sub_group_size": sizes[n]} if stage == 3 else {})) for n in NETWORKS}
    check(ranks(2), ["accumulation=2", *PENALTIES["exact"]], ds)


@pytest.mark.parametrize(
    "stage, section",
    [
        *((stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2)),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
@pytest.mark.slow
def test_offload_changes_nothing(ranks, stage, section):
    offloaded = zero(stage, zero=section)
    ds = {"generator": offloaded, "discriminator": offloaded}
    check(ranks(2), ["accumulation=2", *PENALTIES["exact"]], ds)


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", ["null", "0.05"])
def test_a_norm_on_the_host_is_the_same(ranks, clip_norm):
    """As of gradients that stay on the device, of two micro-batches; and so is what it clips."""
    overrides = ["accumulation=2", *(f"optimizer.{network}.clip_norm={clip_norm}" for network in NETWORKS)]
    on_host = zero(2, zero={"offload_optimizer": {"device": "cpu"}})
    (norms, state), (expected, reference_state) = (
        ranks(2).run(scenarios.norms, overrides, dict.fromkeys(NETWORKS, ds), 2)[0] for ds in (on_host, zero(2))
    )
    assert norms == pytest.approx(expected, rel=1e-6)
    worst, name = reference.worst(scenarios.merge([state]), scenarios.merge([reference_state]))
    assert worst <= SAME, name


@pytest.mark.slow
def test_every_tensor_moves():
    """The matrix would prove nothing about a tensor that stays where it was."""
    start = reference.run_reference(tiny_recipe(Path(tempfile.mkdtemp()), f"seed={SEED}"), 0)
    end = expected(f"seed={SEED}")
    for entry, tensors in start.items():
        for name, value in tensors.items():
            is_unseen = entry != "discriminator" and name in UNSEEN
            if name.endswith(("weight", "bias", "gamma")) and not is_unseen:
                assert reference.distance(end[entry][name], value) > 10 * SAME, f"{entry}.{name}"


@pytest.mark.slow
def test_penalties_matter():
    """The matrix would prove nothing about penalties that are too weak to see."""
    plain = expected()
    for overrides in (PENALTIES["exact"], PENALTIES["finite_difference"]):
        distance, _ = reference.worst(expected(*overrides), plain)
        assert distance > 100 * SAME


def moved(pool, overrides, ds):
    """How far every weight of both networks and of the EMA has come, as one vector."""
    start = reference.run_reference(tiny_recipe(Path(tempfile.mkdtemp()), *overrides), 0)
    states = scenarios.merge(pool.run(scenarios.train, overrides, ds, UPDATES))
    deltas = [(states[e][n] - v.flatten()) for e, t in start.items() for n, v in t.items() if n.endswith("weight")]
    return torch.cat(deltas)


@pytest.mark.nightly  # all other tests of this file count kinks as well, of networks that are smooth
def test_most_updates_agree_where_networks_have_kinks(ranks):
    """With ReLU and max-pooling as they are, the median over seeds and updates agrees, and few meet a kink.

    ``-s`` prints how many did: none of 36.
    """
    overrides, ds = ["accumulation=2", *PENALTIES["exact"]], dict.fromkeys(NETWORKS, zero(1))
    found = []
    for seed in range(SEED, SEED + 6):
        found += differences(ranks(2), [*overrides, f"seed={seed}"], ds, UPDATES, is_smooth=False)
    at_once = [shares[0][0] for shares in found]
    num_other = sum(share > 1 for share in at_once)
    explained = sum(len(shares) > 1 >= shares[-1][0] for shares in found)
    print(f"of {len(found)} updates {num_other} differ, {explained} of them by a kink that was found")
    assert median(at_once) < 0.5
    assert num_other <= len(found) / 6


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=pytest.mark.slow), pytest.param("fp16", marks=pytest.mark.nightly)]
)
def test_low_precision_agrees_across_stages(ranks, precision):
    """The same rounding at every ZeRO stage: the updates, not only the weights, agree far better than with fp32's."""
    low = {precision: {"enabled": True}} | (
        {"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}
    )
    stages = (0, 1, 2, 3) if precision == "bf16" else (1, 2, 3)
    overrides = ["accumulation=2", *PENALTIES["exact"]]

    def at(ds):
        return moved(ranks(2), overrides, {"generator": ds, "discriminator": ds})

    exact, first = at(zero(0)), at(zero(stages[0], **low))
    assert 0 < (first - exact).norm() / exact.norm() < 0.2
    for stage in stages[1:]:
        assert (at(zero(stage, **low)) - first).norm() / first.norm() < 0.05
