"""The published games of a GAT and of a CAT in every layout.

Both are relativistic, with images of one class in pairs, both penalties, and the fakes of D's update in G's. A CAT's D
has a logit of each level, paired by level, and its G is held to consistency.
"""

from itertools import product

import pytest

from bigsgan.config import NETWORKS, both_engines
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import SAME, SEED, check, expected, moved
from tests.distributed.test_state import ADAM, check_same_run
from tests.tiny import TINY_GAMES, stages, zero

GAMES = {family: [*TINY_GAMES[family], "objective.fake_labels=data"] for family in ("gat", "cat")}
PENALTIES = {
    "exact": [f"objective.{name}={{weight: 0.2}}" for name in ("r1", "r2")],
    "finite_difference": [
        f"objective.{name}={{weight: 0.2, form: finite_difference, sigma: 0.5}}" for name in ("r1", "r2")
    ],
}


def cells(slow, *axes):
    """All cells, of which some are for CI and the others for a night."""
    for cell in product(*axes):
        yield pytest.param(*cell, marks=pytest.mark.slow if cell in slow else pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize("family", GAMES)
def test_each_part_of_the_game_counts(family):
    """Without it, the comparisons below would see it."""
    options = [*GAMES[family], *PENALTIES["exact"], f"seed={SEED}"]
    parts = ["objective.r1", "objective.r2", "objective.fake_labels"]
    others = {part: [option for option in options if not option.startswith(part)] for part in parts}
    if family == "cat":
        others["consistency"] = [*options, "objective.consistency=null"]
    found = expected(*options, updates=2)
    for name, other in others.items():
        distance, _ = reference.worst(found, expected(*other, updates=2))
        assert distance > 100 * SAME, name


RECOMPUTED = both_engines("activation_checkpointing=true")


@pytest.mark.parametrize(
    "method",
    [pytest.param("auto", marks=pytest.mark.slow), pytest.param("double_backward", marks=pytest.mark.nightly)],
)
def test_recomputed_below_stage_3(ranks, method):
    """Where ``auto`` is forward mode, and a double backward keeps what would be recomputed."""
    methods = [f"objective.{name}.method={method}" for name in ("r1", "r2")]
    options = [*GAMES["gat"], *PENALTIES["exact"], *RECOMPUTED, *methods]
    check(ranks(2), options, {name: zero(1) for name in NETWORKS})


ZERO = [
    ("gat", 3, 2, 2, "exact"),
    ("cat", 3, 2, 2, "exact"),
    ("cat", 2, 1, 2, "finite_difference"),
]


@pytest.mark.parametrize(
    "family, stage, num_ranks, accumulation, penalty", [*cells(ZERO, GAMES, range(4), (1, 2), (1, 2), PENALTIES)]
)
def test_zero(ranks, family, stage, num_ranks, accumulation, penalty):
    options = [*GAMES[family], f"accumulation={accumulation}", *PENALTIES[penalty]]
    check(ranks(num_ranks), options, {name: zero(stage) for name in NETWORKS})


MIXED = [("gat", (3, 1), "finite_difference"), ("cat", (1, 3), "exact")]


@pytest.mark.parametrize("family, stages_of, penalty", [*cells(MIXED, GAMES, [(3, 1), (1, 3), (0, 2)], PENALTIES)])
def test_networks_at_different_stages_of_zero(ranks, family, stages_of, penalty):
    ds = {name: zero(stage) for name, stage in zip(NETWORKS, stages_of, strict=True)}
    check(ranks(2), [*GAMES[family], "accumulation=2", *PENALTIES[penalty]], ds)


TWO = [("gat", (2, 2), 2, "finite_difference"), ("cat", (2, 2), 2, "finite_difference")]


@pytest.mark.parametrize(
    "family, layout, accumulation, penalty", [*cells(TWO, GAMES, [(2, 2), (2, 1), (1, 2)], (1, 2), PENALTIES)]
)
def test_two_stages(ranks, family, layout, accumulation, penalty):
    options = [*GAMES[family], f"accumulation={accumulation}", *PENALTIES[penalty], *stages(*layout)]
    check(ranks(2), options, {name: zero(1) for name in NETWORKS})


@pytest.mark.parametrize("family, penalty", [*cells([("gat", "exact")], GAMES, PENALTIES)])
def test_four_stages(ranks, family, penalty):
    options = [*GAMES[family], "accumulation=2", *PENALTIES[penalty], *stages(4, 4)]
    check(ranks(4), options, {name: zero(1) for name in NETWORKS})


@pytest.mark.nightly
@pytest.mark.parametrize("family", GAMES)
@pytest.mark.parametrize("layout", [(2, 2), (2, 1), (1, 2), (4, 4)])
def test_stages_without_sharding(ranks, family, layout):
    options = [*GAMES[family], "accumulation=2", *PENALTIES["exact"], *stages(*layout)]
    check(ranks(max(layout)), options, {name: zero(0) for name in NETWORKS})


IN_BF16 = {
    "ZeRO 1": (2, [], zero(1)),
    "ZeRO 2": (2, [], zero(2)),
    "ZeRO 3": (2, [], zero(3)),
    "stages": (2, stages(2, 2), zero(1)),
}


@pytest.mark.parametrize("family, name, penalty", [*cells([("gat", "ZeRO 3", "exact")], GAMES, IN_BF16, PENALTIES)])
def test_bf16_goes_where_plain_bf16_goes(ranks, family, name, penalty):
    """In six updates: no farther from float32, by half, than ZeRO 0 in bf16 on one rank."""
    options, low = [*GAMES[family], "accumulation=2", *PENALTIES[penalty]], {"bf16": {"enabled": True}}
    num, more, file = IN_BF16[name]
    exact = moved(ranks(1), options, dict.fromkeys(NETWORKS, zero(0)))
    plain = moved(ranks(1), options, dict.fromkeys(NETWORKS, zero(0) | low))
    found = moved(ranks(num), [*options, *more], dict.fromkeys(NETWORKS, file | low))
    far, usual = (float((each - exact).norm() / exact.norm()) for each in (found, plain))
    print(f"{family} in bf16, {name}, {penalty}: {far:.1e} from float32, ZeRO 0 {usual:.1e}")
    assert 0 < usual < 0.3
    assert far <= 1.5 * usual


@pytest.mark.parametrize(
    "family", [pytest.param("gat", marks=pytest.mark.slow), pytest.param("cat", marks=pytest.mark.nightly)]
)
def test_checkpointing(ranks, family):
    options = [*GAMES[family], "accumulation=2", *PENALTIES["exact"], *RECOMPUTED]
    check(ranks(2), options, {name: zero(3) for name in NETWORKS})


@pytest.mark.parametrize(
    "family, stage, layout",
    [*cells((), GAMES, range(4), [(1, 1)]), *cells([("cat", 1, (2, 2))], GAMES, (1,), [(2, 2)])],
)
def test_a_resumed_run_is_the_same_run(ranks, family, stage, layout, tmp_path):
    options = [*ADAM, *GAMES[family], *PENALTIES["exact"], *stages(*layout)]
    files = {name: zero(stage) for name in NETWORKS}
    whole = ranks(2).run(scenarios.uninterrupted, options, files, 6)
    check_same_run(whole, ranks(2).run(scenarios.resume, options, files, str(tmp_path), 3, 3))
