"""`bigsgan plan` on networks with ranks of their own: their time by hand, what is shown and what is recommended."""

from __future__ import annotations

import json
import math

import pytest

from bigsgan import shipped
from bigsgan.cli import main
from bigsgan.config import load_recipe, plan_run
from bigsgan.planner import separate_ranks
from bigsgan.planner.activations import Traces
from bigsgan.planner.balance import one_of_each
from bigsgan.planner.layouts import USABLE, Resources, Surveyor
from bigsgan.planner.memory import predict
from bigsgan.planner.sides import count_update
from bigsgan.planner.traffic import Machine, Model, sent_bytes
from tests.tiny import both, tiny_plan

GIB = 2**30
MLP = [
    "generator={family: mlp, latent_size: 10, width: 20, depth: 2}", "data.num_classes=0", "batch=240",
    "discriminator={family: mlp, width: 30, depth: 1}",
]  # fmt: skip
NUMEL = {"generator": 10 * 20 + 20 * 20 + 20 * 256 + 296, "discriminator": 256 * 30 + 30 + 31}
G, D = 240 * 2 * (10 * 20 + 20 * 20 + 20 * 256), 240 * 2 * (256 * 30 + 30)
SLOW = Machine(operations=1e9, per_node=4, inside=1e6, between=1e5, latency=1e-3)
IMAGE = 4 * 256
"""Bytes of an image of 16x16."""


def model_of(directory, stage, *overrides, machine=SLOW):
    plan = tiny_plan(directory, 1, [*MLP, *overrides], both(stage))
    return Model(count_update(plan), count_update(one_of_each(plan.recipe, directory)), machine)


def once(network, ranks):
    """Seconds in which float32 parameters go once around a ring on the slow machine."""
    link = 1e6 if ranks <= 4 else 1e5
    return 4 * NUMEL[network] * (ranks - 1) / ranks / link + 2e-3 * math.ceil(math.log2(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_time_of_ranks_that_hold_both(ranks, tmp_path):
    """G goes forward twice and back once; D trains on two segments and judges one."""
    computes = (4 * G + 8 * D) / ranks / 1e9
    backward = {"generator": 2 * G / ranks / 1e9, "discriminator": 4 * D / ranks / 1e9}
    whole = {"generator": 4 * G / ranks / 1e9, "discriminator": 8 * D / ranks / 1e9}
    for stage, turns, hidden, after in ((0, 2, backward, 0), (2, 1, backward, 1), (3, 4, whole, 0)):
        found = model_of(tmp_path, stage).shared_seconds(ranks)
        waits = [max(0.0, turns * once(n, ranks) - hidden[n]) + after * once(n, ranks) for n in NUMEL]
        assert found == pytest.approx(computes + sum(waits))


def test_fast_links_leave_computing_alone(tmp_path):
    fast = Machine(operations=1e9, per_node=8, inside=1e30, between=1e30, latency=0.0)
    model = model_of(tmp_path, 1, "objective.d_steps=2", machine=fast)
    assert model.shared_seconds(8) == pytest.approx((5 * G + 14 * D) / 8e9)
    assert model.speed({"generator": 3, "discriminator": 5}).steps == dict.fromkeys(NUMEL, pytest.approx(0, abs=1e-20))


def test_speed_of_ranks_of_their_own(tmp_path):
    """Steps wait as long as gradients of fewer ranks do; images leave the side with fewer ranks at its links' speed."""
    speed = model_of(tmp_path, 2, "objective.d_steps=2").speed({"generator": 2, "discriminator": 6})
    waits = {"generator": once("generator", 2), "discriminator": once("discriminator", 6)}
    late = {"generator": 2 * G / 2 / 1e9, "discriminator": 2 * 4 * D / 6 / 1e9}
    assert speed.steps["generator"] == pytest.approx(
        max(0.0, waits["generator"] - late["generator"]) + waits["generator"]
    )
    twice = max(0.0, 2 * waits["discriminator"] - late["discriminator"]) + 2 * waits["discriminator"]
    assert speed.steps["discriminator"] == pytest.approx(twice / 2)
    assert speed.travel["generator"] == pytest.approx(240 * IMAGE / 2 / 1e5 + 1e-3)


@pytest.mark.parametrize("options, times", [([], 2), (["objective.d_steps=2"], 3), (["objective.reuse_fakes=true"], 1)])
def test_images_travel_once_for_each_of_ds_steps_and_for_gs(options, times, tmp_path):
    assert sent_bytes(model_of(tmp_path, 0, *options).separate) == {
        "generator": times * 240 * IMAGE,
        "discriminator": 240 * IMAGE,
    }


WIDE = [
    "batch=24",
    "generator={family: mlp, latent_size: 10, width: 500, depth: 4}",
    "discriminator={family: mlp, width: 500, depth: 4}",
]


def found_for(gpus, memory, *overrides, machine=None):
    resources = Resources(gpus, 1, int(memory), None)
    surveyor = Surveyor(shipped.recipe("digits"), [*WIDE, *overrides], resources)
    survey = surveyor.survey()
    comparison = separate_ranks.compare(surveyor, survey, machine or separate_ranks.machine_of(resources))
    return survey, comparison, separate_ranks.with_winner(survey, comparison)


@pytest.mark.slow
def test_overrides_to_paste_give_what_is_shown():
    _, comparison, _ = found_for(4, GIB)
    assert [each.layout.name.partition(",")[0] for each in comparison.layouts] == [
        "ZeRO 0",
        "ZeRO 1",
        "ZeRO 2",
        "ZeRO 3",
    ]
    for each in comparison.layouts:
        plan = plan_run(load_recipe(shipped.recipe("digits"), each.layout.overrides), 4)
        assert plan.is_split
        assert len(plan.placement("generator").ranks) == each.division.numbers["generator"]
        assert predict(plan, Traces()).peak == each.layout.prediction.peak
        assert 0 <= each.timings["overlapped"].idle < each.timings["exact"].idle < 1


@pytest.mark.slow
def test_they_are_recommended_where_they_win_by_much():
    slow = Machine(operations=1e12, per_node=4, inside=1e8, latency=0.0)
    survey, comparison, best = found_for(4, GIB, machine=slow)
    assert comparison.shared > comparison.winner.seconds / 0.9
    assert best.best.overrides == comparison.winner.layout.overrides != survey.best.overrides
    assert comparison.winner.seconds == min(each.seconds for each in comparison.layouts)
    fast = Machine(operations=1e6, per_node=4)
    survey, comparison, best = found_for(4, GIB, machine=fast)
    assert comparison.winner is None
    assert best.best is survey.best


@pytest.mark.slow
def test_they_are_recommended_where_they_alone_fit():
    survey, comparison, _ = found_for(2, GIB)
    least = min(each.layout.prediction.peak for each in comparison.layouts)
    others = min(layout.prediction.peak for layout in survey.layouts)
    assert least < others
    survey, comparison, best = found_for(2, (least + others) / 2 / USABLE)
    assert survey.best is None
    assert "which alone fits" in separate_ranks.advice(comparison)
    assert best.best.prediction.peak <= (least + others) / 2


@pytest.mark.slow
def test_a_game_that_cannot_overlap_is_not_shown_so():
    _, comparison, _ = found_for(2, GIB, "objective={fake_labels: data, reuse_fakes: true}")
    assert {name for each in comparison.layouts for name in each.timings} == {"exact"}


def test_a_batch_that_no_division_has_is_told():
    _, comparison, _ = found_for(5, GIB, "accumulation=24")
    assert not comparison.layouts
    assert all("finds no division of 5 ranks" in reason for reason in comparison.refused.values())


@pytest.mark.slow
def test_the_command_shows_them(capsys):
    arguments = ["plan", "--gpus", "2", "--gpu-memory", "1", *WIDE]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("ZeRO 1, 1 + 1 ranks")]
    assert line.endswith("fits")
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ranks_of_their_own"]
    assert shown["layouts"][0]["ranks"] == {"generator": 1, "discriminator": 1}
    assert set(shown["layouts"][0]["schedules"]) == {"exact", "overlapped"}
