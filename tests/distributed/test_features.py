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
        ("ZeRO 3", ".pt", {}),
        pytest.param("one rank", ".pt2", {"norm": "batch"}, marks=SLOW),
        *(pytest.param(name, ".pt", {"norm": "batch"}, marks=SLOW) for name in ("ZeRO 1", "stages")),
        pytest.param("compiled", ".pt2", {}, marks=SLOW),
        *(
            pytest.param(name, suffix, {}, marks=pytest.mark.nightly)
            for name, suffix in (("ZeRO 2", ".pt2"), ("ZeRO 3, recomputed", ".pt2"), ("ranks of their own", ".pt"))
        ),
    ],
)
def test_updates_with_judged_maps(ranks, tmp_path, layout, suffix, more):
    world_size, options, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), [*judged(tmp_path, suffix, **more), *options], ds, 2)


@pytest.mark.parametrize("layout", ["one rank", "ZeRO 3", "stages", "compiled"])
def test_updates_of_a_decoder(ranks, tmp_path, layout):
    world_size, options, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), [*decoded(tmp_path), *options], ds, 2)
