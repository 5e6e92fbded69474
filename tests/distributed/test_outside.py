"""Networks from outside, of plain torch: every update is the reference's in each layout."""

import pytest

from bigsgan.config import both_engines
from tests.distributed.agreement import check_updates
from tests.outside import LAYERED, WHOLE
from tests.tiny import both, stages

PENALTY = ["objective.r1={weight: 0.2, every: 2}"]
BOTH = {1: pytest.mark.nightly, 2: pytest.mark.slow}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [pytest.param(num, marks=mark) for num, mark in BOTH.items()])
def test_modules(ranks, num_ranks, stage):
    check_updates(ranks(num_ranks), [*WHOLE, *PENALTY, "accumulation=2"], both(stage), 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "stages", "checkpointing"])
def test_layers(ranks, layout):
    """In stages, with and without recomputation, and shared out layer by layer."""
    stepped = ["objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}"]
    more = {
        "zero3": PENALTY,
        "stages": [*stepped, *stages(2, 2)],
        "checkpointing": [*PENALTY, *both_engines("activation_checkpointing=true")],
    }
    overrides = [*LAYERED, "accumulation=2", *more[layout]]
    check_updates(ranks(2), overrides, both(3 if layout == "zero3" else 1), 4)
