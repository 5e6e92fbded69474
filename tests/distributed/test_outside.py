"""Networks from outside, of plain torch: every update is the reference's in each layout."""

import pytest
import torch

from bigsgan.config import NETWORKS, both_engines
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.outside import LAYERED, WHOLE
from tests.reference import build_networks
from tests.tiny import both, stages, tiny_recipe

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


LAYOUTS = [*([[], both(stage)] for stage in range(4)), [stages(2, 2), both(1)]]


@pytest.mark.slow
def test_initial_weights_are_those_of_the_seed(ranks, tmp_path):
    """Torch's linear maps, convolutions, norms, embeddings and attention, the same bits in each layout."""
    networks = dict(zip(NETWORKS, build_networks(tiny_recipe(tmp_path, *LAYERED)), strict=True))
    for overrides, ds in LAYOUTS:
        found = scenarios.merge(ranks(2).run(scenarios.train, [*LAYERED, *overrides], ds, 0))
        for network, expected in networks.items():
            state = expected.state_dict()
            assert state.keys() == found[network].keys()
            different = [
                name for name, value in state.items() if not torch.equal(value, found[network][name].view(value.shape))
            ]
            assert not different, (overrides, different)
