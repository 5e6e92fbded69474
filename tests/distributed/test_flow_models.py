"""Adversarial flow models: transport, centring and normalized gradients agree with the reference in all layouts."""

import numpy as np
import pytest

from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_image_games import LAYOUTS, STAGED, combined
from tests.distributed.test_state import BF16, FP32, LOW, OFFLOADED, check_same_run
from tests.tiny import TINY_GAMES, both, stages, zero

GAME = [
    *TINY_GAMES["dit"],
    "ema={half_life_nimg: 16, reset_nimg: 8, reset_from_nimg: 16}",
    "objective.r1={weight: 0.5, form: finite_difference, sigma: 0.1}",
    "seed=3",
]
IN_CI = ("one rank, micro-batches", "ranks of their own", "both in stages, recomputed")
OTHERS = [
    *("ZeRO 3", "D in stages", "compiled by layer", "layers recomputed", "G first", "whole batches"),
    *(layout for layout in STAGED if layout not in IN_CI),
]


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in IN_CI),
        *(pytest.param(layout, marks=pytest.mark.nightly) for layout in OTHERS),
    ],
)
def test_updates(ranks, layout):
    world_size, more, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), combined([*GAME, *more]), ds, 3)


RESUMED = {
    "ZeRO 0": ([], both(0)),
    "ZeRO 2 in fp16": ([], dict.fromkeys(("generator", "discriminator"), LOW[5])),
    "ZeRO 3 and offload": ([], dict.fromkeys(("generator", "discriminator"), OFFLOADED)),
    "G in stages in bf16": ([*stages(2, 1)], {"generator": zero(1, **BF16), "discriminator": FP32[2]}),
    "ranks of their own": (["engines.generator.ranks=1"], both(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_goes_on_from_the_average(ranks, layout, tmp_path):
    """G returns to its average before the checkpoint and after it. That of gradients' sizes is saved."""
    more, ds = RESUMED[layout]
    overrides = [*GAME, "accumulation=2", "pipeline.generator_phase=recompute", *more]
    whole = ranks(2).run(scenarios.uninterrupted, overrides, ds, 5)
    check_same_run(whole, ranks(2).run(scenarios.resume, overrides, ds, str(tmp_path), 3, 2), 5)
    for state in (rank["state"] for rank in whole):
        assert state["gradient_normalization.state.average"] > 0
        for key in (key for key in state if key.startswith("generator.shard.master.")):
            np.testing.assert_array_equal(state[key], state[key.replace("generator", "average", 1)])
