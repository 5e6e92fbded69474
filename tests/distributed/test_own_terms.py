"""A loss and terms from outside the package: every update is the reference's, in any layout."""

from unittest import mock

import pytest

from bigsgan import plugins
from bigsgan.doctor import agreement
from tests.distributed.agreement import check_updates
from tests.own_losses import OWN, OwnReference
from tests.tiny import stages, zero

LAYOUTS = {
    "one rank, accumulation": (1, ["accumulation=2"], {}),
    "ZeRO 3": (2, ["accumulation=2"], {"generator": zero(3), "discriminator": zero(3)}),
    "two ranks": (2, [], {}),
    "D on two ranks of three": (3, ["engines.generator.ranks=1"], {}),
    "stages": (2, [*stages(2, 2), "accumulation=2"], {}),
    "ranks of their own, overlapped": (2, ["engines.generator.ranks=1", "objective.schedule=overlapped"], {}),
}

USED = ("PairedMargins", "Wing", "Features", "bounded", "Slopes", "Diversity", "Balance")
QUICK = ("two ranks", "stages")


@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_updates(ranks, layout):
    world_size, overrides, ds = LAYOUTS[layout]
    ranks(world_size).run(plugins.give, [f"tests.own_losses:{name}" for name in USED])
    with mock.patch.object(agreement, "Reference", OwnReference):
        check_updates(ranks(world_size), [*OWN, *overrides], ds, 3)
