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
