"""A generator that learns alone, by flow matching or as an autoencoder, agrees with the reference in all layouts."""

import pytest

from bigsgan.doctor.games import FLOW
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_state import BF16, check_same_run
from tests.tiny import TINY_GAMES, stages, zero

_, CLASSES, AUTOENCODER, *_ = TINY_GAMES["autoencoder_vq"]
GAMES = {
    "flow": FLOW,
    "autoencoder": [
        *(CLASSES, AUTOENCODER, "discriminator={family: none}", "optimizer={generator: {kind: sgd, lr: 0.1}}"),
        "objective={l1: 3, codebook: {weight: 2, commitment: 0.5}}",
    ],
}
HALVES = "accumulation=2"
LAYOUTS = {
    "one rank, micro-batches": (1, [HALVES], zero(0)),
    "ZeRO 3": (2, [HALVES], zero(3)),
    "stages": (2, [HALVES, *stages(2, 1)[:1]], zero(1)),
    "ZeRO 2": (2, [], zero(2)),
    "ZeRO 3, layers recomputed": (2, [HALVES, "engines.generator.activation_checkpointing=true"], zero(3)),
    "stages, layers recomputed": (
        2,
        [*stages(2, 1)[:1], "engines.generator.activation_checkpointing=true"],
        zero(1),
    ),
    "compiled by layer": (2, [HALVES, "engines.generator.compile=layers"], zero(1)),
}
QUICK = [("flow", "one rank, micro-batches"), ("flow", "ZeRO 3")]
SLOW = [("flow", "stages"), ("autoencoder", "ZeRO 3"), ("autoencoder", "stages")]


def marked():
    for game in GAMES:
        for layout in LAYOUTS:
            case, mark = (game, layout), pytest.mark.nightly
            if case in QUICK or case in SLOW:
                mark = () if case in QUICK else pytest.mark.slow
            yield pytest.param(*case, marks=mark)


@pytest.mark.parametrize("game, layout", [*marked()])
def test_updates(ranks, game, layout):
    world_size, more, content = LAYOUTS[layout]
    check_updates(ranks(world_size), [*GAMES[game], *more], {"generator": content}, 3)


RESUMED = {
    "ZeRO 3 in bf16": ([], {**zero(3), **BF16}),
    "stages": (stages(2, 1)[:1], zero(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_is_the_same(ranks, layout, tmp_path):
    more, content = RESUMED[layout]
    overrides, ds = [*FLOW, HALVES, *more], {"generator": content}
    whole = ranks(2).run(scenarios.uninterrupted, overrides, ds, 4)
    check_same_run(whole, ranks(2).run(scenarios.resume, overrides, ds, str(tmp_path), 2, 2), 4)
