"""Without what bigsgan installs in DeepSpeed, the update is the same: `engines.stock_deepspeed`.

The whole matrix is in test_equivalence.py.
"""

from __future__ import annotations

import pytest

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.distributed.test_equivalence import PENALTIES, STOCK, check
from tests.tiny import both, stages, zero


def replaced(overrides, ds):
    """What of G's DeepSpeed engine is bigsgan's, beside the network; whether bigsgan reduces and records passes.

    Last, whether DeepSpeed times its throughput.
    """
    run = scenarios.build(overrides, ds)
    engine = run.step.generator
    places = {**vars(engine._engine), **vars(engine._engine.optimizer)}
    functions = {name: getattr(value, "func", value) for name, value in places.items()}
    ours = {name for name, value in functions.items() if "bigsgan.engines" in str(getattr(value, "__module__", ""))}
    times = engine._engine.tput_timer.config.enabled
    scenarios.destroy(run)
    found = ours - {"module", "basic_optimizer"}
    records = getattr(engine, "_prefetching", None)  # of passes; a pipeline's engine has neither
    return found, getattr(engine, "_averaged", None) is not None, bool(records and records._offload), times


BF16 = {"bf16": {"enabled": True}}
HOST = {"offload_optimizer": {"device": "cpu"}}
BY_GROUP = {
    *("reduce_gradients", "overlapping_partition_gradients_reduce_epilogue", "scaled_global_norm", "check_overflow"),
    "_update_model_bit16_weights",
}
ONE_NORM = {"update_offload_overflow_tracker", "complete_grad_norm_calculation_for_cpu_offload", "check_overflow"}
LAYOUTS = {
    "ZeRO 0": ([], zero(0), {"zero_grad", "clip_fp32_gradients"}),
    "ZeRO 0, bf16": ([], zero(0, **BF16), {"step"}),
    "ZeRO 1": ([], zero(1), BY_GROUP),
    "ZeRO 1, optimizer on the host": ([], zero(1, zero=HOST), {"allreduce_and_copy_with_multiple_ranks", *ONE_NORM}),
    "ZeRO 2": ([], zero(2), BY_GROUP),
    "ZeRO 3": ([], zero(3), {"get_grad_norm_direct"}),
    "ZeRO 3, optimizer on the host": ([], zero(3, zero=HOST), set()),
    "stages, ZeRO 0": (stages(2, 2), zero(0), {"zero_grad", "clip_fp32_gradients"}),
    "stages, ZeRO 1": (stages(2, 2), zero(1), BY_GROUP),
}
"""Overrides, DeepSpeed's file, and what bigsgan installs beside what it installs everywhere."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_replaced(ranks, layout):
    overrides, ds, ours = LAYOUTS[layout]
    stock, usual = (
        ranks(2).run(replaced, [*overrides, *options], dict.fromkeys(NETWORKS, ds))[0] for options in (STOCK, [])
    )
    # In float32 at ZeRO 0 DeepSpeed would apply gradients that are not finite.
    assert stock == (ours & {"clip_fp32_gradients"}, False, False, True)
    averages = layout.startswith("ZeRO 0")
    assert usual == (ours | {"buffered_allreduce_fallback"}, averages, layout.startswith("ZeRO 3"), False)


@pytest.mark.parametrize("stage", [pytest.param(n, marks=pytest.mark.slow) for n in range(4)])
def test_the_update_is_the_reference(ranks, stage):
    check(ranks(2), [*STOCK, "accumulation=2", *PENALTIES["exact"]], both(stage))


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_one_network_alone(ranks, network):
    check(ranks(2), [f"engines.stock_deepspeed={network}", "accumulation=2"], both(1))


@pytest.mark.slow
def test_stages_of_a_pipeline_too(ranks):
    check(ranks(2), [*STOCK, *stages(2, 2), "accumulation=2"], both(1))
