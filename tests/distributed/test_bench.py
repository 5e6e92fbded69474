"""`bigsgan bench` on ranks: who measures when, that variants play the same game, and that nothing of one is left."""

import tempfile
import time
from pathlib import Path

import pytest
import torch

from bigsgan import comm
from bigsgan.bench import train
from bigsgan.bench.measure import Settings, take_turns
from bigsgan.bench.variants import VARIANTS, plan_variants
from bigsgan.engines.deepspeed_private import process_groups
from tests.tiny import tiny_recipe

SAME = 1e-5


class Sleeper:
    """A loop whose update takes a known time, of which it waits for data half."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log, self.waited_seconds = name, seconds, log, 0.0
        log.append(f"build {name}")

    def __call__(self):
        self.log.append(self.name)
        time.sleep(self.seconds)
        self.waited_seconds += self.seconds / 2

    def means(self):
        return {"updates": self.log.count(self.name)}

    def close(self):
        self.log.append(f"close {self.name}")


def sleepers():
    log = []
    builders = [
        lambda: Sleeper("a", 0.01, log) if comm.rank() == 0 else None,
        lambda: Sleeper("b", 0.03, log),
    ]
    return take_turns(builders, Settings(rounds=2, warmup=2, steps=3), lambda turn, i: None), log


def test_variants_take_turns(ranks):
    (first, log), ((second, _), log_of_idle) = ranks(2).run(sleepers)
    turn = lambda name: [f"build {name}", *[name] * 5, f"close {name}"]  # noqa: E731
    assert log == [*turn("a"), *turn("b"), *turn("b"), *turn("a")]
    assert log_of_idle == [*turn("b"), *turn("b")]
    (a, b), failed = first
    assert failed == {}
    assert [[len(visits) for visits in rounds] for rounds in (a, b)] == [[1, 1], [2, 2]]
    for rounds, seconds in ((a, 0.01), (b, 0.03)):
        for visit in (visit for visits in rounds for visit in visits):
            assert seconds <= visit.seconds < seconds + 0.02
            assert visit.data_seconds == pytest.approx(seconds / 2)
            assert visit.busy < 0.5
    assert [visits[0].first_losses["updates"] for visits in a] == [1, 6]  # after one update of each round
    assert second == [[], []]


def measured(overrides):
    """Records of all variants, and whether the process is as it was."""
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *overrides)
    groups, linear = process_groups(), torch.nn.functional.linear
    planned = plan_variants(recipe, list(VARIANTS.values()), comm.world_size())
    results = train._measure([train._on_machine(each) for each in planned], Settings(1, 1, 1))
    clean = process_groups() == groups and torch.nn.functional.linear is linear
    return [train.record(result, results, 100) for result in results] if comm.rank() == 0 else None, clean


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_variants_play_the_same_game(ranks, world_size, capsys):
    found = ranks(world_size).run(measured, ["objective.r1={weight: 0.2, form: finite_difference, sigma: 0.5}"])
    assert all(clean for _, clean in found)
    records = {record["variant"]: record for record in found[0][0]}
    assert list(records)[:2] == ["baseline", "control"]
    assert set(records) == {*VARIANTS, "control"}
    assert {name for name, each in records.items() if "reason" in each} == ({"pipeline"} if world_size == 1 else set())
    for name, each in records.items():
        if "reason" in each:
            continue
        if name == "accumulation":
            assert each["d_loss_difference"] is None
            continue
        rounding = 0.05 if name in ("mixed_precision", "offload") else SAME
        assert each["d_loss_difference"] <= rounding, name
        assert each["g_loss_difference"] <= rounding, name
        assert each["host_peak_bytes"] > 100 * 2**20
