"""Codebooks that follow averages, and entropies: every update is that of a plain loop, in any layout."""

from unittest import mock

import pytest

from bigsgan.doctor import agreement
from tests.codebooks import AVERAGED, LEARNED, MEANS, OBJECTIVE, SIGNS, WithCodes, game
from tests.distributed.agreement import check_updates
from tests.tiny import both, stages

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
LAYOUTS = {
    "one rank": (1, [], both(0)),
    "ZeRO 3": (2, ["accumulation=2"], both(3)),
    "stages, recomputed": (2, [*stages(2, 1), "pipeline.generator_phase=recompute", "accumulation=2"], both(1)),
    "ranks of their own": (2, ["engines.generator.ranks=1", "accumulation=2"], both(1)),
}
ADAPTIVE = "adversarial: {adaptive: {parameter: conv_out.weight}}"


@pytest.mark.parametrize(
    "bottleneck, layout",
    [
        *(pytest.param(AVERAGED, layout, marks=SLOW) for layout in ("ZeRO 3", "stages, recomputed")),
        pytest.param(AVERAGED, "one rank", marks=NIGHTLY),
        pytest.param(LEARNED, "ranks of their own", marks=SLOW),
        *(pytest.param(each, "ZeRO 3", marks=SLOW) for each in (MEANS, LEARNED)),
        pytest.param(MEANS, "ranks of their own", marks=SLOW),
        *(pytest.param(MEANS, layout, marks=NIGHTLY) for layout in ("one rank", "stages, recomputed")),
        *(
            pytest.param(LEARNED, each, marks=NIGHTLY)
            for each in LAYOUTS
            if each not in ("ZeRO 3", "ranks of their own")
        ),
        pytest.param(SIGNS, "one rank", marks=SLOW),
        pytest.param(SIGNS, "ZeRO 3", marks=NIGHTLY),
        pytest.param(AVERAGED, "ranks of their own", marks=NIGHTLY),
    ],
)
def test_updates(ranks, bottleneck, layout):
    world_size, more, ds = LAYOUTS[layout]
    options = [*game(bottleneck), *more]
    if layout == "stages, recomputed":  # passes are repeated
        options[3] = f"{OBJECTIVE[:-1]}, {ADAPTIVE}}}"
    with mock.patch.object(agreement, "Reference", WithCodes):
        check_updates(ranks(world_size), options, ds, 3)
