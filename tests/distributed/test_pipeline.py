"""A network in stages is the same network: pipelines against the plain PyTorch reference."""

from itertools import product

import numpy as np
import pytest

from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import OVERRIDES, PENALTIES, UPDATES, check, moved
from tests.tiny import zero

FINITE = PENALTIES["finite_difference"]


def stages(generator: int, discriminator: int) -> list[str]:
    return [f"engines.generator.pipeline_stages={generator}", f"engines.discriminator.pipeline_stages={discriminator}"]


def both(stage: int, **extra):
    return {"generator": zero(stage, **extra), "discriminator": zero(stage, **extra)}


def cells():
    """Every cell of the matrix; the quick tier takes those in which most parts meet."""
    for num, replicas, stage, accumulation, penalty, mode in product(
        (2, 4), (1, 2), (0, 1), (2, 4), ("none", "finite_difference"), ("keep", "recompute")
    ):
        if penalty == "none" and (accumulation == 4 or replicas == 2):
            continue  # less than the cell with a penalty
        quick = num * replicas == 2 and accumulation == 4 and (stage == 1 or mode == "keep")
        name = f"{num}stages-{replicas}replicas-zero{stage}-accumulation{accumulation}-{penalty}-{mode}"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(num, replicas, stage, accumulation, penalty, mode, marks=marks, id=name)


@pytest.mark.parametrize("num, replicas, stage, accumulation, penalty, mode", [*cells()])
def test_matrix(ranks, num, replicas, stage, accumulation, penalty, mode):
    options = [f"accumulation={accumulation}", f"pipeline.generator_phase={mode}", *PENALTIES[penalty]]
    check(ranks(num * replicas), [*options, *stages(num, num)], both(stage))


LAYOUTS = {
    "G in stages, D sharded": (2, (2, 1), (1, 3)),
    "G sharded, D in stages": (2, (1, 2), (3, 1)),
    "G in 4 stages, D sharded": (4, (4, 1), (0, 1)),
    "G in 2 stages, D in 4": (4, (2, 4), (1, 0)),
    "G in 4 stages, D in 2": (4, (4, 2), (0, 1)),
}


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_may_differ(ranks, name, mode, request):
    world_size, (g, d), (g_zero, d_zero) = LAYOUTS[name]
    options = ["accumulation=2", f"pipeline.generator_phase={mode}", *FINITE]
    check(ranks(world_size), [*options, *stages(g, d)], {"generator": zero(g_zero), "discriminator": zero(d_zero)})


OPTIONS = {
    **{name: o for name, o in OVERRIDES.items() if name not in ("r2", "two_d_steps")},
    "two_d_steps": ["objective.d_steps=2", "accumulation=2", *FINITE],
    "checkpointing": [f"engines.{n}.activation_checkpointing=true" for n in ("generator", "discriminator")] + FINITE,
    "checkpointing_recompute": [
        *(f"engines.{n}.activation_checkpointing=true" for n in ("generator", "discriminator")),
        "pipeline.generator_phase=recompute", "accumulation=2",
    ],
    "phases_one_by_one": ["pipeline.schedule=phases", "accumulation=2"],
    "uniform": [f"engines.{n}.partition=uniform" for n in ("generator", "discriminator")],
    "one_micro_batch": FINITE,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options(ranks, name):
    check(ranks(2), [*OPTIONS[name], *stages(2, 2)], both(1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["relativistic", "own_accumulation", "two_d_steps"])
def test_options_where_layouts_differ(ranks, name, layout):
    check(ranks(2), [*OPTIONS[name], *stages(*layout)], both(1))


LOW = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, float32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


@pytest.mark.slow
@pytest.mark.parametrize("stage, name", [(0, "bf16"), *((1, name) for name in LOW)])
def test_low_precision_agrees_with_one_stage(ranks, stage, name):
    """The same rounding with and without stages: the updates, not only the weights."""
    options = ["accumulation=2"]
    whole = moved(ranks(2), options, both(1, **LOW[name]))
    exact = moved(ranks(2), options, both(1))
    staged = moved(ranks(2), [*options, *stages(2, 2)], both(stage, **LOW[name]))
    assert (whole - exact).norm() / exact.norm() > 0.001  # it is rounded
    assert (staged - whole).norm() / whole.norm() < 0.05


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
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
