"""A network in stages is the same network: pipelines against the plain PyTorch reference."""

from itertools import product

import numpy as np
import pytest
import torch

from bigsgan.config import both_engines
from bigsgan.models.build import build_network
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_adam import check_adam
from tests.distributed.test_equivalence import OVERRIDES, PENALTIES, TURNS, UPDATES, check, moved
from tests.distributed.test_state import ADAM, check_same_run, check_skipped
from tests.tiny import both, stages, tiny_recipe, zero

FINITE = PENALTIES["finite_difference"]


def cells():
    """Every cell of the matrix; the quick tier takes those in which most parts meet."""
    for num, replicas, stage, accumulation, penalty, mode in product(
        (2, 4), (1, 2), (0, 1), (2, 4), ("none", "finite_difference"), ("keep", "recompute")
    ):
        if penalty == "none" and (accumulation == 4 or replicas == 2):
            continue  # less than the cell with a penalty
        quick = num * replicas == 2 and accumulation == 4 and (stage, mode) == (1, "keep")
        name = f"{num}stages-{replicas}replicas-zero{stage}-accumulation{accumulation}-{penalty}-{mode}"
        # Of the rest with two micro-batches CI takes one half; eight ranks take a minute.
        half = num * replicas < 8 and (stage + (mode == "recompute") + (replicas == 2)) % 2 == 0
        slow = half and accumulation == 2 and penalty != "none"
        marks = () if quick else pytest.mark.slow if slow else pytest.mark.nightly
        yield pytest.param(num, replicas, stage, accumulation, penalty, mode, marks=marks, id=name)


@pytest.mark.parametrize("num, replicas, stage, accumulation, penalty, mode", [*cells()])
def test_matrix(ranks, num, replicas, stage, accumulation, penalty, mode):
    options = [f"accumulation={accumulation}", f"pipeline.generator_phase={mode}", *PENALTIES[penalty]]
    check(ranks(num * replicas), [*options, *stages(num, num)], both(stage), TURNS)


LAYOUTS = {
    "G in stages, D sharded": (2, (2, 1), (1, 3)),
    "G sharded, D in stages": (2, (1, 2), (3, 1)),
    "G in 4 stages, D sharded": (4, (4, 1), (0, 1)),
    "G in 2 stages, D in 4": (4, (2, 4), (1, 0)),
    "G in 4 stages, D in 2": (4, (4, 2), (0, 1)),
    "G in 2 stages of 2 replicas, D sharded": (4, (2, 1), (0, 3)),  # ranks send images to one rank, and get another's
}


def layouts():
    for name in LAYOUTS:
        yield pytest.param(name, marks=pytest.mark.nightly if "replicas" in name else ())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", pytest.param("recompute", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [*layouts()])
def test_layouts_may_differ(ranks, name, mode):
    world_size, (g, d), (g_zero, d_zero) = LAYOUTS[name]
    options = ["accumulation=2", f"pipeline.generator_phase={mode}", *FINITE]
    ds = {"generator": zero(g_zero), "discriminator": zero(d_zero)}
    check(ranks(world_size), [*options, *stages(g, d)], ds, TURNS)


OPTIONS = {
    **OVERRIDES,
    "two_d_steps": [*OVERRIDES["two_d_steps"], "accumulation=2"],
    "two_d_steps_finite": ["objective.d_steps=2", "accumulation=2", *FINITE],
    "checkpointing": [
        *both_engines("activation_checkpointing=true"), *PENALTIES["exact"],
    ],
    "checkpointing_recompute": [
        *both_engines("activation_checkpointing=true"),
        "pipeline.generator_phase=recompute", "accumulation=2",
    ],
    "reused_fakes_recompute": [
        "objective={reuse_fakes: true, d_steps: 2}", "pipeline.generator_phase=recompute", "accumulation=2",
    ],
    "phases_one_by_one": ["pipeline.schedule=phases", "accumulation=2"],
    "uniform": both_engines("partition=uniform"),
    "one_micro_batch": PENALTIES["exact"],
    "one_micro_batch_finite": FINITE,
}  # fmt: skip


OPTIONS_IN_CI = (
    "relativistic", "reused_fakes", "ada", "own_accumulation", "two_d_steps", "checkpointing", "uniform",
    "weight_decay_on_matrices",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in OPTIONS_IN_CI else pytest.mark.nightly) for n in OPTIONS]
)
def test_options(ranks, name):
    check(ranks(2), [*OPTIONS[name], *stages(2, 2)], both(1))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    "name", ["relativistic", "own_accumulation", "two_d_steps", "reused_fakes", "reused_fakes_made_again"]
)
def test_options_where_layouts_differ(ranks, name, layout):
    check(ranks(2), [*OPTIONS[name], *stages(*layout)], both(1))


LOW = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, float32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16, float32 accumulation": {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


@pytest.mark.parametrize(
    "stage, name",
    [
        pytest.param(1, "bf16, float32 accumulation", marks=pytest.mark.slow),
        pytest.param(0, "bf16", marks=pytest.mark.nightly),
        *(pytest.param(1, n, marks=pytest.mark.nightly) for n in LOW if n != "bf16, float32 accumulation"),
    ],
)
def test_low_precision_agrees_with_one_stage(ranks, stage, name):
    """The same rounding with and without stages: the updates, not only the weights."""
    options = ["accumulation=2"]
    whole = moved(ranks(2), options, both(1, **LOW[name]))
    exact = moved(ranks(2), options, both(1))
    staged = moved(ranks(2), [*options, *stages(2, 2)], both(stage, **LOW[name]))
    assert (whole - exact).norm() / exact.norm() > 0.001  # it is rounded
    assert (staged - whole).norm() / whole.norm() < 0.05


@pytest.mark.slow
def test_stages_of_several_groups_of_parameters(ranks):
    """Of another number in each stage, as small and large layers are at different ends; with clipping."""
    options = ["accumulation=2", *(f"optimizer.{n}.clip_norm=0.05" for n in ("generator", "discriminator"))]
    ds = both(1, zero={"reduce_bucket_size": 300})
    whole = ranks(4).run(scenarios.norms, options, both(1), UPDATES)
    staged = ranks(4).run(scenarios.norms, [*options, *stages(2, 2)], ds, UPDATES)
    for (expected, _), (found, _) in zip(whole, staged, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    states = [scenarios.merge([state for _, state in results]) for results in (staged, whole)]
    assert reference.worst(*states)[0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_clipping_knows_the_norm_of_all_stages(ranks, stage):
    """The norm of each update and the result agree with an engine that has all layers on each rank."""
    options = [
        "accumulation=2", "optimizer.generator.clip_norm=0.05", "optimizer.discriminator.clip_norm=0.05"
    ]  # fmt: skip
    whole = ranks(2).run(scenarios.norms, options, both(1), UPDATES)
    staged = ranks(2).run(scenarios.norms, [*options, *stages(2, 2)], both(stage), UPDATES)
    for (expected, _), (found, _) in zip(whole, staged, strict=True):
        assert min(expected) > 0.05, "nothing was clipped"
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    states = [scenarios.merge([state for _, state in results]) for results in (staged, whole)]
    assert reference.worst(*states)[0] < 1e-5


# What watches an engine between two phases needs them one by one.
ONE_BY_ONE = "pipeline.schedule=phases"
FILES = [
    0,
    pytest.param("fp16", marks=pytest.mark.slow),
    *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (1, *LOW) if stage != "fp16"),
]


def files(stage):
    """DeepSpeed contents of a ZeRO stage in fp32, or of a low precision at ZeRO 1."""
    return both(1, **LOW[stage]) if stage in LOW else both(stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_adams_gradients_and_updates(ranks, stage):
    check_adam(ranks(2), [ONE_BY_ONE, "accumulation=2", *stages(2, 2)], both(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", FILES)
def test_generator_phase_leaves_the_discriminator_alone(ranks, stage):
    overrides = [*ADAM, ONE_BY_ONE, *stages(2, 2)]
    for touched in ranks(2).run(scenarios.generator_phase_touches, overrides, files(stage)):
        assert len(touched) == 8
        assert not any(touched.values()), touched


@pytest.mark.slow
@pytest.mark.parametrize("stage", FILES)
def test_ema_is_swapped_in_and_out(ranks, stage, tmp_path):
    by_rank = ranks(2).run(scenarios.ema_swap, [*ADAM, *stages(2, 2)], files(stage))
    assert all(rank["restored"] for rank in by_rank)
    merged = scenarios.merge([rank["state"] for rank in by_rank])["average"]
    network = build_network(tiny_recipe(tmp_path), "generator")
    network.load_state_dict({name: merged[name].view(t.shape) for name, t in network.state_dict().items()})
    low = {"fp16": torch.float16}.get(stage, torch.bfloat16 if stage in LOW else torch.float32)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(low).float()
    with torch.no_grad():
        images = network(*(torch.from_numpy(tensor) for tensor in by_rank[0]["inputs"])).numpy()
    for rank in by_rank:
        assert np.abs(rank["ema"] - images).max() < (0.1 if stage in LOW else 1e-5)
        assert np.abs(rank["ema"] - rank["live"]).max() > 1e-3


@pytest.mark.parametrize("stage", FILES)
def test_resume_is_the_same_run(ranks, stage, tmp_path):
    overrides = [*ADAM, "accumulation=2", *([] if stage in LOW else FINITE), *stages(2, 2)]
    whole = ranks(2).run(scenarios.uninterrupted, overrides, files(stage), 3)
    parts = ranks(2).run(scenarios.resume, overrides, files(stage), str(tmp_path), 1, 2)
    check_same_run(whole, parts, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_resume_of_other_layouts(ranks, layout, tmp_path):
    overrides = [*ADAM, "accumulation=2", *FINITE, *stages(*layout)]
    world_size = 4 if layout == (2, 2) else 2
    whole = ranks(world_size).run(scenarios.uninterrupted, overrides, both(1), 6)
    parts = ranks(world_size).run(scenarios.resume, overrides, both(1), str(tmp_path), 3, 3)
    check_same_run(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["generator", pytest.param("discriminator", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stage", FILES)
def test_non_finite_gradients_of_one_stage_skip_the_update_of_all(ranks, stage, network):
    overrides = [*ADAM, *stages(2, 2)]
    check_skipped(ranks(2).run(scenarios.poisoned, overrides, files(stage), network), network)
