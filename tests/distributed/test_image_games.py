"""Games between images with networks from outside the package: every update is the reference's, in any layout."""

from unittest import mock

import pytest

from bigsgan import plugins
from bigsgan.config import RunPlan, both_engines
from bigsgan.doctor import agreement
from bigsgan.doctor.reference import Reference
from tests import distillation
from tests.distillation import DISTILLATION, DistillationReference
from tests.distributed import scenarios
from tests.distributed.agreement import SAME, check_updates
from tests.image_games import (
    ADAPTIVE,
    AUTOENCODER,
    BY_PART,
    FIXED,
    LAZY,
    NAMES,
    PAINTER,
    PAIRS,
    STARTS,
    AutoencoderReference,
    PainterReference,
)
from tests.perceptual import write_program
from tests.reference import worst
from tests.tiny import both, stages, zero

SLOW = pytest.mark.slow
OUTSIDE = [
    *(f"tests.image_games:{name}" for name in NAMES),
    *(f"tests.distillation:{name}" for name in distillation.NAMES),
]
AGAIN = ["pipeline.generator_phase=recompute", "accumulation=4"]
LAYOUTS = {
    "one rank, micro-batches": (1, ["accumulation=2"], both(0)),
    "ZeRO 3": (2, [], both(3)),
    "ranks of their own": (2, ["engines.generator.ranks=1", "accumulation=2"], both(1)),
    "G in stages": (2, stages(2, 1), {"generator": zero(1), "discriminator": zero(2)}),
    "D in stages": (2, [*stages(1, 2), "accumulation=2"], {"generator": zero(3), "discriminator": zero(1)}),
    "both in stages": (2, [*stages(2, 2), "accumulation=2"], both(1)),
    "compiled by layer": (2, ["engines.generator.compile=layers", "accumulation=2"], both(2)),
    "layers recomputed": (2, ["engines.generator.activation_checkpointing=true", "accumulation=2"], both(3)),
    "compiled": (1, ["engines.generator.compile=whole"], both(1)),
    "compiled stages": (2, [*stages(2, 2), *AGAIN, *both_engines("compile=layers")], both(1)),
    "G in stages, recomputed": (2, [*stages(2, 1), "pipeline.generator_phase=recompute", "accumulation=2"], both(1)),
    "both in stages, recomputed": (2, [*stages(2, 2), *AGAIN], both(1)),
    "both in stages, phase by phase": (2, [*stages(2, 2), *AGAIN, "pipeline.schedule=phases"], both(1)),
    "stages of their own": (4, [*stages(2, 2), *AGAIN, "engines.generator.ranks=2"], both(1)),
    "G first": (2, ["objective.schedule=generator_first", "accumulation=2"], both(2)),
    "whole batches": (2, [], both(0)),
    "whole batches, ZeRO 2": (2, ["objective.schedule=generator_first"], both(2)),
}
QUICK = {("lazy", "G in stages"), ("pairs", "ZeRO 3"), ("distillation", "ranks of their own")}
GAMES = {
    "autoencoder": (AUTOENCODER, AutoencoderReference),
    "labelled": (AUTOENCODER[1:], AutoencoderReference),
    "lazy": (LAZY, AutoencoderReference),
    "classes": (PAINTER, PainterReference),
    "pairs": (PAIRS, Reference),
    "adaptive": (ADAPTIVE, AutoencoderReference),
    "starts": (STARTS, AutoencoderReference),
    "by part": (BY_PART, AutoencoderReference),
    "fixed": (FIXED, AutoencoderReference),
    "distillation": (DISTILLATION, DistillationReference),
}
STAGED = (
    "G in stages, recomputed",
    "both in stages, recomputed",
    "both in stages, phase by phase",
    "stages of their own",
)
WHOLE = (
    "one rank, micro-batches",
    "ZeRO 3",
    "ranks of their own",
    "D in stages",
    "compiled by layer",
    "layers recomputed",
    "G first",
)
KEEPING = ("whole batches", "whole batches, ZeRO 2")  # with an adaptive weight too, as G has one micro-batch
OTHERS = ("ZeRO 3", "ranks of their own", "G in stages")
LAZILY = ("one rank, micro-batches", "G in stages", "ranks of their own", "G first")
BY_GAME = {
    "autoencoder": [each for each in LAYOUTS if each not in KEEPING],
    "labelled": (*OTHERS, "both in stages, recomputed"),
    "lazy": LAZILY,
    "pairs": OTHERS[:2],
    "adaptive": (*WHOLE, *KEEPING, "compiled", "compiled stages", *STAGED),
    "starts": (*WHOLE[:3], *KEEPING),
    "by part": WHOLE[:1],
    "fixed": ["both in stages"],
    "distillation": (*WHOLE[:4], "both in stages, recomputed", "stages of their own"),
}
CELLS = [
    pytest.param(game, layout, marks=() if (game, layout) in QUICK else SLOW, id=f"{game}, {layout}")
    for game in GAMES
    for layout in BY_GAME.get(game, OTHERS)
]


@pytest.mark.parametrize("game, layout", CELLS)
def test_updates(ranks, game, layout):
    (overrides, reference), (world_size, more, ds) = GAMES[game], LAYOUTS[layout]
    ranks(world_size).run(plugins.give, OUTSIDE)
    with mock.patch.object(agreement, "Reference", reference):
        check_updates(ranks(world_size), combined([*overrides, *more]), ds, 3)


def combined(overrides):
    """The overrides with what is given below ``objective`` in it, as no key may be given twice."""
    (whole,) = (each for each in overrides if each.startswith("objective="))
    parts = [each for each in overrides if each.startswith("objective.")]
    inside = "".join(f", {key}: {value}" for key, _, value in (part[10:].partition("=") for part in parts))
    return [f"{whole[:-1]}{inside}}}" if each == whole else each for each in overrides if each not in parts]


def repeated(*arguments):
    """The state of a run that keeps no graphs of G."""
    with mock.patch.object(RunPlan, "keeps_generator_graphs", False):
        return scenarios.train(*arguments)


@pytest.mark.parametrize(
    "game, options, ds",
    [
        (ADAPTIVE, [], both(0)),
        pytest.param(ADAPTIVE, ["objective.schedule=generator_first"], both(2), marks=SLOW),
        pytest.param(STARTS, [], both(1, fp16={"enabled": True}), marks=SLOW),
        pytest.param(BY_PART, [], both(2, bf16={"enabled": True}), marks=SLOW),
        pytest.param(ADAPTIVE, ["engines.generator.ranks=1"], both(1), marks=SLOW),
    ],
)
def test_graphs_that_are_weighed_are_kept(ranks, game, options, ds):
    """Where G weighs by the graphs that it pulls back through, numbers are those of two passes, bit for bit."""
    ranks(2).run(plugins.give, OUTSIDE)
    kept, again = (
        scenarios.merge(ranks(2).run(train, combined([*game, *options]), ds, 3))
        for train in (scenarios.train, repeated)
    )
    assert worst(kept, again)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["both in stages", "ranks of their own", "ZeRO 3"])
def test_a_pool_and_several_steps_of_d(ranks, layout):
    """D sees the same images of earlier updates as on one rank; lazy R2 and its check read these too."""
    more = "d_steps: 2, pool: 3, schedule: generator_first, "
    more += "r2: {weight: 0.1, form: finite_difference, every: 2, check_every: 1}"
    game, names = [each.replace("d_steps: 2", more) for each in LAZY], [f"tests.image_games:{name}" for name in NAMES]
    found = []
    for num, overrides, ds in (LAYOUTS["one rank, micro-batches"], LAYOUTS[layout]):
        ranks(num).run(plugins.give, names)
        options = [*game, *(each for each in overrides if "accumulation" not in each), "accumulation=2"]
        found.append(scenarios.merge(ranks(num).run(scenarios.train, options, ds, 4)))
    far, where = worst(*found)
    assert far <= 10 * SAME, where


def test_a_parameter_of_another_stage(ranks):
    ranks(2).run(plugins.give, OUTSIDE)
    game = [each.replace("1.module.second", "0.module.second") for each in ADAPTIVE]
    with pytest.raises(RuntimeError, match="is of no parameter of G's last stage"):
        ranks(2).run(scenarios.train, [*game, *stages(2, 1), *AGAIN], both(1), 1)


@pytest.mark.parametrize(
    "layout",
    [
        "D in stages",
        *(pytest.param(name, marks=SLOW) for name in ("one rank, micro-batches", "ZeRO 3", "ranks of their own")),
    ],
)
def test_distances(ranks, tmp_path, layout):
    """Of grey images, by a program that only ranks with D's first layers load, and by pixels."""
    world_size, more, ds = LAYOUTS[layout]
    ranks(world_size).run(plugins.give, [f"tests.image_games:{name}" for name in NAMES])
    distances = f"l2: 2, huber: {{weight: 3, delta: 0.4}}, perceptual: {{path: {write_program(tmp_path / 'p.pt')}}}"
    game = [each.replace("l1: 3", distances) for each in AUTOENCODER]
    with mock.patch.object(agreement, "Reference", AutoencoderReference):
        check_updates(ranks(world_size), combined([*game, *more]), ds, 2)
