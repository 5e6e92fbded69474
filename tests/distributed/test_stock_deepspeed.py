"""Without what bigsgan installs in DeepSpeed, the update is the same: `engines.stock_deepspeed`.

The whole matrix is in test_equivalence.py.
"""

from __future__ import annotations

import pytest

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.distributed.test_equivalence import FEWER, PENALTIES, STOCK, check
from tests.tiny import both, stages


def replaced(overrides, ds):
    """What of G's DeepSpeed engine is bigsgan's, beside the network; whether bigsgan reduces and records passes.

    Last, whether DeepSpeed times its throughput.
    """
    run = scenarios.build(overrides, ds)
    engine = run.step.generator
    places = {**vars(engine._engine), **vars(engine._engine.optimizer)}
    ours = {name for name, value in places.items() if "bigsgan.engines" in str(getattr(value, "__module__", ""))}
    times = engine._engine.tput_timer.config.enabled
    scenarios.destroy(run)
    found = ours - {"module", "basic_optimizer"}
    return found, engine._averaged is not None, engine._prefetching._offload is not None, times


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_replaced(ranks, stage):
    ds = both(stage)
    stock, usual = (ranks(2).run(replaced, options, ds)[0] for options in (STOCK, []))
    # At ZeRO 0 in float32 DeepSpeed would apply gradients that are not finite.
    assert stock == ({"clip_fp32_gradients"} if stage == 0 else set(), False, False, True)
    assert usual[:3] != stock[:3]
    assert not usual[3]


@pytest.mark.parametrize("stage", [pytest.param(n, marks=pytest.mark.slow) for n in range(4)])
def test_the_update_is_the_reference(ranks, stage):
    check(ranks(2), [*STOCK, "accumulation=2", *PENALTIES["exact"]], both(stage), FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_one_network_alone(ranks, network):
    check(ranks(2), [f"engines.stock_deepspeed={network}", "accumulation=2"], both(1), FEWER)


@pytest.mark.slow
def test_stages_of_a_pipeline_too(ranks):
    check(ranks(2), [*STOCK, *stages(2, 2), "accumulation=2"], both(1), FEWER)
