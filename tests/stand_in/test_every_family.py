"""Every family in every layout "on CUDA" without a GPU: it waits where docs/explanation/performance.md says."""

import pytest

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.stand_in import build, cells, matrix
from tests.tiny import both

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

UPDATES = 2
"""That are looked at."""

GATHERS = "partition_parameters.py:wait"
"""What ZeRO 3 waits for, as often as its gathers demand."""

SWAPS = "stage3.py:_reassign_or_swap_out_partitioned_parameters"
"""Where ZeRO 3 copies weights from the host for which a page of pinned memory was not free: at most once a network."""


def expected(layout: str) -> dict[str, int]:
    """How often DeepSpeed asks in an update of one network, by the place."""
    stage, precision, offload = layout.split("-")
    found = {}
    if stage == "3":
        if offload != "device":
            found |= {"stage3.py:independent_gradient_partition_epilogue": 1}
            found |= {"stage3.py:complete_grad_norm_calculation_for_cpu_offload": 3}
            found |= {"utils.py:mask_nan_or_inf_with_val_inplace": 2}
        if precision == "fp16":
            found["stage3.py:has_overflow"] = 1 if offload == "device" else 2
            if offload == "device":
                found["utils.py:is_invalid_grad_norm"] = 1
    elif offload == "optimizer":
        found["offloaded_norm.py:norm"] = 1
        found["stage_1_and_2.py:_wait_for_offload_copies"] = 1  # the event of its gradients
    elif precision == "fp16":
        found["utils.py:is_invalid_grad_norm"] = 1
    return found


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=pytest.mark.slow if n in matrix.IN_CI else pytest.mark.nightly) for n in matrix.RUNS],
)
def test_an_update_waits_where_the_docs_say(on_ranks, layout):
    games = matrix.cells(layout)
    found = on_ranks(1, cells.walk, games, layout in matrix.SHOWN)
    assert found.keys() == games.keys()
    for name, each in found.items():
        waits = dict(each["waits"])
        assert bool(waits.pop(GATHERS, 0)) == (layout[0] == "3"), name
        swaps = waits.pop(SWAPS, 0)
        assert swaps <= (UPDATES * len(NETWORKS) if layout[0] == "3" and layout.endswith("optimizer") else 0), name
        assert waits == {place: UPDATES * len(NETWORKS) * n for place, n in expected(layout).items()}, name
        assert each["launches"] > 100, name


@pytest.mark.slow
def test_a_run_on_gpus_differentiates_forward_though_planned_for_cpus(on_ranks):
    labels = on_ranks(1, scenarios.labels_of_phases, [matrix.R1], both(1), False)
    assert "D differentiates" in labels
    assert "D differentiates" not in on_ranks(1, scenarios.labels_of_phases, [matrix.TWICE], both(1), False)


@pytest.mark.slow
def test_planted_waits_are_seen(on_ranks):
    """For the device and for an event, of which torch does not warn, as for a stream and for a number."""
    found = on_ranks(1, cells.walk_with_waits, {"mlp": matrix.cells("0-bf16-device")["mlp"]})["mlp"]["waits"]
    assert found == {f"cells.py:{wait.__name__}": UPDATES for wait in cells.PLANTED}


@pytest.mark.slow
def test_what_the_product_refuses(on_ranks):
    asked = {f"{name} {layout}": cell for layout in matrix.LAYOUTS for name, cell in matrix.cells(layout).items()}
    wanted = {f"{name} {layout}": field for layout, field in matrix.REFUSED.items() for name in matrix.GAMES}
    assert on_ranks(1, cells.refusals, asked) == wanted


@pytest.mark.slow
def test_every_family_has_deterministic_kernels(on_ranks):
    """torch raises at an operation that has none."""
    diffaugment = (["deterministic=true", "augmentation={kind: diffaugment}", *matrix.ADAM], matrix.zero(0))
    games = {**matrix.cells("0-fp32-device", "deterministic=true"), "diffaugment": diffaugment}
    assert on_ranks(1, cells.walk, games, True, True).keys() == games.keys()


@pytest.mark.slow
def test_triton_compiles_what_draws_numbers(on_ranks):
    """Arithmetic of 64-bit words, which torch's compiler must not write as arithmetic on indices."""
    found = on_ranks(1, cells.compile_draws, 52)
    assert found == {f"{kind} {num}": (3, num, 52) for kind in ("uniform", "normal") for num in (1, 4)}
