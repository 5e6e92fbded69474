"""A teacher's features, which D predicts, in every layout."""

import tempfile
from pathlib import Path

import pytest

from bigsgan.config import NETWORKS
from tests import reference
from tests.distributed.test_equivalence import FEWER, SAME, SEED, check, expected
from tests.distributed.test_families import GAT_GAME
from tests.teachers import write_teacher
from tests.tiny import FAMILIES, stages, tiny_recipe, zero

FINITE = GAT_GAME
EXACT = [*FAMILIES["gat"], "objective.r1={weight: 0.1, every: 2}", "objective.r2={weight: 0.1, every: 2}"]
CASES = ["accumulation=2"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "tiny.pt")


@pytest.mark.slow
def test_a_teacher_moves_all_of_the_discriminator(teacher):
    """The comparisons below would see a game without it, and that a head's tensor stayed where it was."""
    options = [*FINITE, *CASES, f"seed={SEED}"]
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *options, *teacher)
    start, end = reference.run_reference(recipe, 0), expected(*options, *teacher, updates=FEWER)
    without, compared = expected(*options, updates=FEWER)["discriminator"], 0
    del end["discriminator"]["layers.4.linear.bias"]  # of the logits, whose differences alone count
    for name, value in end["discriminator"].items():
        assert reference.distance(value, start["discriminator"][name]) > 10 * SAME, name
        if name in without and name.startswith("layers.2."):
            assert reference.distance(value, without[name]) > 10 * SAME, name
            compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    "game, stage, layout",
    [
        pytest.param(FINITE, 3, (1, 1), marks=pytest.mark.slow, id="zero3"),
        pytest.param(EXACT, 2, (1, 1), marks=pytest.mark.slow, id="zero2-exact"),
        pytest.param(EXACT, 1, (1, 2), marks=pytest.mark.slow, id="stages-exact"),
        pytest.param(FINITE, 0, (1, 1), marks=pytest.mark.nightly, id="zero0"),
        pytest.param(EXACT, 0, (1, 1), marks=pytest.mark.nightly, id="zero0-exact"),
        pytest.param(FINITE, 2, (1, 1), marks=pytest.mark.nightly, id="zero2"),
        pytest.param(EXACT, 3, (1, 1), marks=pytest.mark.nightly, id="zero3-exact"),
        pytest.param(FINITE, 1, (2, 2), marks=pytest.mark.nightly, id="stages"),
        pytest.param(EXACT, 1, (2, 2), marks=pytest.mark.nightly, id="stages-of-both-exact"),
    ],
)
def test_layouts_on_two_ranks(ranks, teacher, game, stage, layout):
    check(ranks(2), [*game, *teacher, *CASES, *stages(*layout)], {n: zero(stage) for n in NETWORKS}, FEWER)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("game", [FINITE, EXACT], ids=["finite", "exact"])
def test_layouts_on_one_rank(ranks, teacher, game, stage):
    check(ranks(1), [*game, *teacher], {n: zero(stage) for n in NETWORKS}, FEWER)
