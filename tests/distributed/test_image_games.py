"""Games between images with networks from outside the package: every update is the reference's, in any layout."""

from unittest import mock

import pytest

from bigsgan import plugins
from bigsgan.doctor import agreement
from bigsgan.doctor.reference import Reference
from tests.distributed.agreement import check_updates
from tests.image_games import AUTOENCODER, NAMES, PAIRS, AutoencoderReference
from tests.tiny import both, stages, zero

SLOW = pytest.mark.slow
LAYOUTS = {
    "one rank, micro-batches": (1, ["accumulation=2"], both(0)),
    "ZeRO 3": (2, [], both(3)),
    "ranks of their own": (2, ["engines.generator.ranks=1", "accumulation=2"], both(1)),
    "G in stages": (2, stages(2, 1), {"generator": zero(1), "discriminator": zero(2)}),
    "G in stages, recomputed": (2, [*stages(2, 1), "pipeline.generator_phase=recompute", "accumulation=2"], both(1)),
    "G first": (2, ["objective.schedule=generator_first", "accumulation=2"], both(2)),
}
QUICK = {("autoencoder", "G in stages"), ("pairs", "ZeRO 3")}
GAMES = {"autoencoder": (AUTOENCODER, AutoencoderReference), "pairs": (PAIRS, Reference)}
CELLS = [
    pytest.param(game, layout, marks=() if (game, layout) in QUICK else SLOW, id=f"{game}, {layout}")
    for game in GAMES
    for layout in (LAYOUTS if game == "autoencoder" else ("ZeRO 3", "ranks of their own"))
]


@pytest.mark.parametrize("game, layout", CELLS)
def test_updates(ranks, game, layout):
    (overrides, reference), (world_size, more, ds) = GAMES[game], LAYOUTS[layout]
    names = [f"tests.image_games:{name}" for name in NAMES]
    ranks(world_size).run(plugins.give, names)
    with mock.patch.object(agreement, "Reference", reference):
        check_updates(ranks(world_size), [*overrides, *more], ds, 3)
