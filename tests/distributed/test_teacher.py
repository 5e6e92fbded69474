"""A teacher's features, which D predicts, in every layout."""

import tempfile
from pathlib import Path

import pytest
import torch

from bigsgan.config import NETWORKS
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_compiling import needs_dual
from tests.distributed.test_equivalence import FEWER, SAME, SEED, check, expected
from tests.distributed.test_transformers import GAMES, PENALTIES
from tests.teachers import write_teacher
from tests.tiny import TINY_GAMES, stages, tiny_recipe, zero

FINITE = [*GAMES["gat"], *PENALTIES["finite_difference"]]
EXACT = [*TINY_GAMES["gat"], "objective.r1={weight: 0.1, every: 2}", "objective.r2={weight: 0.1, every: 2}"]
CAT_FINITE = [*GAMES["cat"], *PENALTIES["finite_difference"]]
CAT_EXACT = [*TINY_GAMES["cat"], "objective.r1={weight: 0.1, every: 2}", "objective.r2={weight: 0.1, every: 2}"]
CASES = ["accumulation=2"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "tiny.pt")


@pytest.mark.slow
@pytest.mark.parametrize("game, block", [pytest.param(FINITE, 2, id="gat"), pytest.param(CAT_FINITE, 1, id="cat")])
def test_a_teacher_moves_all_of_the_discriminator(teacher, game, block):
    """The comparisons below would see a game without it, and that a head's tensor stayed where it was.

    Of two blocks the first is layer ``block``.
    """
    options = [*game, *CASES, f"seed={SEED}"]
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *options, *teacher)
    start, end = reference.run_reference(recipe, 0), expected(*options, *teacher, updates=FEWER)
    without, compared = expected(*options, updates=FEWER)["discriminator"], 0
    del end["discriminator"][f"layers.{block + 2}.linear.bias"]  # of the logits, whose differences alone count
    for name, value in end["discriminator"].items():
        assert reference.distance(value, start["discriminator"][name]) > 10 * SAME, name
        if name in without and name.startswith(f"layers.{block}."):
            assert reference.distance(value, without[name]) > 10 * SAME, name
            compared += 1
    assert compared > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "game, stage, layout",
    [
        pytest.param(CAT_EXACT, 3, (1, 1), id="cat-zero3-exact"),
        pytest.param(CAT_FINITE, 1, (1, 2), id="cat-stages"),
        pytest.param(CAT_EXACT, 2, (1, 1), id="cat-zero2-exact"),
        pytest.param(FINITE, 3, (1, 1), id="zero3"),
        pytest.param(EXACT, 2, (1, 1), id="zero2-exact"),
        pytest.param(EXACT, 1, (1, 2), id="stages-exact"),
        pytest.param(FINITE, 0, (1, 1), marks=pytest.mark.nightly, id="zero0"),
        pytest.param(EXACT, 0, (1, 1), marks=pytest.mark.nightly, id="zero0-exact"),
        pytest.param(FINITE, 2, (1, 1), marks=pytest.mark.nightly, id="zero2"),
        pytest.param(EXACT, 3, (1, 1), marks=pytest.mark.nightly, id="zero3-exact"),
        pytest.param(FINITE, 1, (2, 2), marks=pytest.mark.nightly, id="stages"),
        pytest.param(EXACT, 1, (2, 2), marks=pytest.mark.nightly, id="stages-of-both-exact"),
        pytest.param(CAT_FINITE, 0, (1, 1), marks=pytest.mark.nightly, id="cat-zero0"),
        pytest.param(CAT_FINITE, 3, (1, 1), marks=pytest.mark.nightly, id="cat-zero3"),
        pytest.param(CAT_EXACT, 1, (2, 2), marks=pytest.mark.nightly, id="cat-stages-of-both-exact"),
    ],
)
def test_layouts_on_two_ranks(ranks, teacher, game, stage, layout):
    check(ranks(2), [*game, *teacher, *CASES, *stages(*layout)], {n: zero(stage) for n in NETWORKS})


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("game", [FINITE, EXACT], ids=["finite", "exact"])
def test_layouts_on_one_rank(ranks, teacher, game, stage):
    check(ranks(1), [*game, *teacher], {n: zero(stage) for n in NETWORKS})


SEPARATE = {  # ranks of G and of D, how they lie, DeepSpeed's stage
    "1 + 1": ((1, 1), [], 0),
    "1 + 1, ZeRO 3": ((1, 1), [], 3),
    "1 + 2": ((1, 2), [], 2),
    "1 + 2, D in stages": ((1, 2), stages(1, 2), 1),
}
OVERLAPPED = [
    *(option.replace("reuse_fakes: true", "schedule: overlapped, reuse_fakes: true") for option in TINY_GAMES["gat"]),
    *EXACT[len(TINY_GAMES["gat"]) :],
]


@pytest.mark.parametrize(
    "game, name",
    [
        pytest.param(EXACT, "1 + 1, ZeRO 3", marks=pytest.mark.slow, id="exact"),
        pytest.param(FINITE, "1 + 2, D in stages", marks=pytest.mark.slow, id="stages"),
        pytest.param(OVERLAPPED, "1 + 1", marks=pytest.mark.slow, id="overlapped"),
        *(pytest.param(FINITE, name, marks=pytest.mark.nightly, id=name) for name in SEPARATE),
        pytest.param(EXACT, "1 + 2, D in stages", marks=pytest.mark.nightly, id="stages-exact"),
        pytest.param(CAT_EXACT, "1 + 2, D in stages", marks=pytest.mark.slow, id="cat-stages-exact"),
        pytest.param(OVERLAPPED, "1 + 2, D in stages", marks=pytest.mark.nightly, id="stages-overlapped"),
    ],
)
def test_ranks_of_their_own(ranks, teacher, game, name):
    """D's ranks alone read the images that the teacher sees."""
    (g, d), layout, stage = SEPARATE[name]
    options = [*game, *teacher, *CASES, *layout, f"engines.generator.ranks={g}"]
    check(ranks(g + d), options, {n: zero(stage) for n in NETWORKS})


@needs_dual
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "game, unit, stage",
    [
        pytest.param(FINITE, "whole", 1, id="whole"),
        pytest.param(FINITE, "layers", 2, id="layers"),
        pytest.param(EXACT, "layers", 2, id="layers-exact"),
        pytest.param(EXACT, "whole", 1, id="whole-exact"),
        pytest.param(CAT_FINITE, "layers", 2, id="cat-layers"),
    ],
)
def test_compiled(ranks, teacher, game, unit, stage):
    """Passes with predictions are compiled, but where they carry tangents."""
    compiled = f"engines.discriminator.compile={unit}"
    check(ranks(2), [*game, *teacher, *CASES, compiled], {n: zero(stage) for n in NETWORKS}, 2)


@pytest.mark.parametrize(
    "stage, layout, precision",
    [
        pytest.param(2, (1, 1), "bf16", marks=pytest.mark.slow),
        pytest.param(3, (1, 1), "bf16", marks=pytest.mark.nightly),
        pytest.param(1, (1, 2), "bf16", marks=pytest.mark.nightly),
        pytest.param(2, (1, 1), "fp16", marks=pytest.mark.nightly),
    ],
)
def test_half_types(ranks, teacher, stage, layout, precision):
    """D's heads go where they go in plain PyTorch in float32, in the first update, before both games part.

    As near as rounding lets them: 0.12 in bf16 in all layouts, and 0.015 in fp16, whose numbers have three bits more.
    """
    options = [*FINITE, *teacher, *CASES, f"seed={SEED}"]
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *options)
    start, end = (reference.run_reference(recipe, num)["discriminator"] for num in (0, 1))
    low = {precision: {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})}
    ds = {n: zero(stage, **low) for n in NETWORKS}
    found = scenarios.merge(ranks(2).run(scenarios.train, [*options, *stages(*layout)], ds, 1))["discriminator"]
    names = [name for name in start if ".teacher." in name]
    assert len(names) == 6
    moved, expected_move = (
        torch.cat([(after[name].flatten() - start[name].flatten()).double() for name in names])
        for after in (found, end)
    )
    error = float((moved - expected_move).norm() / expected_move.norm())
    print(f"{precision}: {error:.1e}")
    assert 0 < error < {"bf16": 0.2, "fp16": 0.025}[precision]
