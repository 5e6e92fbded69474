"""Networks that read a frozen program's feature maps: every update is the reference's, in any layout."""

import pytest

from tests.distributed.agreement import check_updates
from tests.features import decoded, judged
from tests.tiny import both, stages

SLOW = pytest.mark.slow
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
AGAIN = ["pipeline.generator_phase=recompute", "accumulation=2"]
LAYOUTS = {
    "one rank": (1, ["accumulation=2"], both(0)),
    "ZeRO 1": (2, [], both(1)),
    "ZeRO 2": (2, [], both(2)),
    "ZeRO 3": (2, ["accumulation=2"], both(3)),
    "ZeRO 3, recomputed": (2, ["engines.discriminator.activation_checkpointing=true"], both(3)),
    "stages": (2, [*stages(2, 2), *AGAIN], both(1)),
    "ranks of their own": (2, ["engines.generator.ranks=1"], both(1)),
    "compiled": (1, ["engines.discriminator.compile=layers"], both(1)),
}


@pytest.mark.parametrize(
    "layout, suffix, more",
    [
        ("ZeRO 2", ".pt2", {}),
        pytest.param("ZeRO 3", ".pt", {}, marks=SLOW),
        pytest.param("stages", ".pt2", {"norm": "batch"}, marks=SLOW),
        *(pytest.param(name, ".pt2", {"norm": "batch"}, marks=pytest.mark.nightly) for name in ("one rank", "ZeRO 1")),
        *(
            pytest.param(name, ".pt2", {}, marks=pytest.mark.nightly)
            for name in ("ZeRO 3, recomputed", "ranks of their own", "compiled")
        ),
    ],
)
def test_updates_with_judged_maps(ranks, tmp_path, layout, suffix, more):
    world_size, options, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), [*judged(tmp_path, suffix, **more), *options], ds, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_a_penalty_goes_back_twice_through_a_program(ranks, tmp_path, suffix):
    game = [each.replace("{l1: 3,", "{l1: 3, r1: {weight: 1},") for each in judged(tmp_path, suffix)]
    assert game != judged(tmp_path, suffix)
    check_updates(ranks(2), game, both(1), 2)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ZeRO 3", marks=SLOW),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("one rank", "stages", "compiled")),
    ],
)
def test_updates_of_a_decoder(ranks, tmp_path, layout):
    world_size, options, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), [*decoded(tmp_path), *options], ds, 2)
