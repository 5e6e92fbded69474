"""Same seed, same model, however the work is split: every layout against the plain PyTorch reference."""

from functools import lru_cache
from pathlib import Path

import pytest

from tests import reference
from tests.distributed import scenarios
from tests.tiny import tiny_recipe, zero

UPDATES = 6
SAME = 1e-5

PENALTIES = {
    "none": [],
    "exact": ["objective.r1={weight: 0.2, every: 2}"],
    "finite_difference": ["objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}"],
}


@lru_cache
def expected(*overrides: str):
    import tempfile

    return reference.run_reference(tiny_recipe(Path(tempfile.mkdtemp()), *overrides), UPDATES)


def check(pool, overrides, ds, tolerance=SAME):
    states = pool.run(scenarios.train, overrides, ds, UPDATES)
    distance, where = reference.worst(scenarios.merge(states), expected(*overrides))
    print(f"worst {distance:.2e} {where}")
    assert distance <= tolerance, f"{where} differs by {distance:.2e}"


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_matrix(ranks, stage, world_size, accumulation, penalty):
    overrides = [f"accumulation={accumulation}", *PENALTIES[penalty]]
    check(ranks(world_size), overrides, {"generator": zero(stage), "discriminator": zero(stage)})


BOTH = [0, 1, 2, 3]
OVERRIDES = {
    "r2": ["objective.r1={weight: 0.2, every: 2}", "objective.r2={weight: 0.1, every: 2}"],
    "r2_finite_difference": [
        "objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}",
        "objective.r2={weight: 0.1, every: 2, form: finite_difference, sigma: 0.5}",
    ],
    "two_d_steps": ["objective.d_steps=2"],
    "orthogonal": ["objective.orthogonal={generator: 1e-2, discriminator: 1e-2}", "accumulation=2"],
    "unconditional": ["data.num_classes=0"],
    "own_accumulation": ["engines.discriminator.accumulation=2"],
}


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_options(ranks, stage, name):
    check(ranks(2), OVERRIDES[name], {"generator": zero(stage), "discriminator": zero(stage)})


@pytest.mark.parametrize("stages", [(0, 3), (3, 1), (2, 0), (3, 2)])
def test_networks_may_differ_in_stage(ranks, stages):
    ds = {"generator": zero(stages[0]), "discriminator": zero(stages[1])}
    check(ranks(2), PENALTIES["exact"], ds)


@pytest.mark.parametrize("stage", BOTH)
def test_checkpointing_changes_nothing(ranks, stage):
    checkpointing = [f"engines.{n}.activation_checkpointing=true" for n in ("generator", "discriminator")]
    check(ranks(2), [*PENALTIES["exact"], *checkpointing], {"generator": zero(stage), "discriminator": zero(stage)})


def test_stage_3_with_persistent_parameters(ranks):
    keep = zero(3, zero={"stage3_param_persistence_threshold": 10_000})
    check(ranks(2), PENALTIES["exact"], {"generator": keep, "discriminator": keep})


@pytest.mark.parametrize(
    "stage, section",
    [
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_offload_changes_nothing(ranks, stage, section):
    offloaded = zero(stage, zero=section)
    check(ranks(2), ["accumulation=2"], {"generator": offloaded, "discriminator": offloaded})


def test_penalties_matter():
    """The matrix would prove nothing about penalties that are too weak to see."""
    plain = expected()
    for overrides in (PENALTIES["exact"], PENALTIES["finite_difference"]):
        distance, _ = reference.worst(expected(*overrides), plain)
        assert distance > 100 * SAME
