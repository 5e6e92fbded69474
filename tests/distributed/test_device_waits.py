"""Updates come to their end, and to the same numbers, if each task first waits for all messages of its rank."""

import pytest

from tests.distributed import device_waits, scenarios
from tests.distributed.test_equivalence import PENALTIES
from tests.distributed.test_state import ADAM, check_same_run
from tests.tiny import both, stages

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
PHASES = "pipeline.schedule=phases"
SPLIT = "engines.generator.ranks=1"
# Name: number of ranks, ZeRO stage, overrides.
LAYOUTS = {
    "joint": (2, 1, stages(2, 2)),
    "phases": (2, 1, [*stages(2, 2), PHASES]),
    "ranks of their own": (2, 3, [SPLIT]),
    "G in stages": (2, 1, stages(2, 1)),
    "D in stages": (2, 1, stages(1, 2)),
    "joint, 4 stages": (4, 1, stages(4, 4)),
    "phases, 4 stages": (4, 1, [*stages(4, 4), PHASES]),
    "of 2 replicas": (4, 1, stages(2, 2)),
    "G in 2 stages, D in 4": (4, 1, stages(2, 4)),
    "ranks of their own, in stages": (4, 1, ["engines.generator.ranks=2", *stages(2, 2)]),
    "1 + 2": (3, 2, [SPLIT]),
}
GAMES = {
    "plain": [],
    "overlapped": ["objective.schedule=overlapped"],
    "exact": PENALTIES["exact"],
    "two D steps, recompute": ["objective.d_steps=2", "pipeline.generator_phase=recompute"],
}


def cells():
    for layout in LAYOUTS:
        for game in GAMES:
            two, plain = LAYOUTS[layout][0] == 2, game == "plain"
            quick = plain and layout == "joint"
            marks = () if quick else SLOW if two and (plain or layout == "ranks of their own") else NIGHTLY
            yield pytest.param(layout, game, marks=marks)


@pytest.mark.parametrize("layout, game", [*cells()])
def test_new_runs(ranks, layout, game):
    num, stage, overrides = LAYOUTS[layout]
    options = [*ADAM, "batch=12" if num == 3 else "batch=8", "accumulation=2", *GAMES[game], *overrides]
    expected = ranks(num).run(scenarios.uninterrupted, options, both(stage), 2)
    found = ranks(num).run(device_waits.train, options, both(stage), 2, timeout=device_waits.SECONDS)
    assert sum(num for _, num in found) > 0
    check_same_run([state for state, _ in found], expected, 2)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=SLOW if LAYOUTS[n][0] == 2 else NIGHTLY) for n in LAYOUTS])
def test_resumed_runs(ranks, layout, tmp_path):
    num, stage, overrides = LAYOUTS[layout]
    options = [*ADAM, "batch=12" if num == 3 else "batch=8", "accumulation=2", *overrides]
    expected = ranks(num).run(scenarios.uninterrupted, options, both(stage), 2)
    ranks(num).run(scenarios.begun, options, both(stage), str(tmp_path), 1)
    found = ranks(num).run(device_waits.resumed, options, both(stage), str(tmp_path), 1, timeout=device_waits.SECONDS)
    check_same_run(found, expected, 2)
