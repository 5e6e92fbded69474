"""Launches and bytes of the published recipes' updates stay below what tests/stand_in/counts.py writes down.

Of those without kernels that take workspaces of their own, such as cuDNN's, the planner foretells the memory.
"""

import pytest

from bigsgan.config import load_recipe, plan_run
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each
from tests.stand_in import build, counts, roofline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
]

CLOSE = 0.9
"""Of a bound, below which a count should have lowered it."""


@pytest.mark.parametrize("name", counts.CASES)
def test_an_update_keeps_within_its_bounds(on_ranks, name):
    case, found = counts.CASES[name], on_ranks(1, counts.count, name)
    counts.show(name, found)
    print(roofline.table(found["phases"]))  # shown where a bound is exceeded
    for key in ("launches", "products", "rest"):
        bound = getattr(case, key)
        assert CLOSE * bound <= found[key] <= bound, f"{key}: {found[key]:,.1f}; see tests/stand_in/counts.py"
    if case.precise:
        recipe = counts.RECIPES / case.recipe
        plan = plan_run(load_recipe(recipe, case.overrides), 1, recipe.parent, on_gpus=True)
        (planned,) = predict_each(plan, Traces())
        print(f"  planned   {planned.updating / 2**20:10,.0f} MiB")
        assert planned.updating == pytest.approx(found["peak"], rel=0.05)
    launches, _, _, num_bytes = map(sum, zip(*found["phases"].values(), strict=True))
    # While a mode looks at its operations, torch makes tangents of fewer.
    assert launches == pytest.approx(found["launches"], rel=0.03 if "exact" in name else 0.001)
    assert num_bytes / 1e9 == pytest.approx(found["products"] + found["rest"])
    if name.startswith("BigGAN"):
        # Two convolutions of 3 x 3 in each of G's blocks; shortcuts, attention and the image are some 5 % more.
        blocks = [(1536, 1536, 8), (1536, 768, 16), (768, 384, 32), (384, 192, 64), (192, 96, 128)]
        expected = 256 * 2 * sum(9 * (a * b + b * b) * size**2 for a, b, size in blocks)
        forward, inference = (found["phases"][f"G makes images{kind}"][1] for kind in (", graphs kept", ""))
        assert expected < forward < 1.08 * expected
        assert inference == pytest.approx(2 * forward)  # for two steps of D


def test_how_bytes_are_counted(on_ranks):
    """Of 6 numbers in float32: 24 bytes."""
    assert on_ranks(1, counts.known) == {"add": 72, "add_": 48, "expand": 0, "mul of a row": 24 + 12 + 24, "view": 0}
