"""Ranks of their own: the work of each side, the time of an update, and the division that `auto` takes."""

from __future__ import annotations

import itertools

import pytest
import yaml

from bigsgan import shipped
from bigsgan.cli import main
from bigsgan.config import load_recipe, plan_run
from bigsgan.engines.tasks import in_turn
from bigsgan.errors import UserError
from bigsgan.planner import balance, sides
from bigsgan.planner.balance import divide, divisors, one_of_each, plan_balanced, possible
from bigsgan.planner.counting import count_network, count_work
from tests.tiny import TINY_GAMES, stages, tiny_recipe

NETWORKS = ("generator", "discriminator")
AUTO = "engines.generator.ranks=auto"


def recipe_of(directory, *overrides):
    return tiny_recipe(directory, "batch=240", *overrides)


def work_of(directory, *overrides):
    return sides.count_update(one_of_each(recipe_of(directory, *overrides), directory))


GAMES = {
    "plain": [],
    "two steps": ["objective.d_steps=2"],
    "reused fakes": ["objective.reuse_fakes=true"],
    "relativistic": ["objective.loss=relativistic"],
    "a teacher": [
        *TINY_GAMES["gat"],
        "objective.d_steps=2",
        "objective.r1={weight: 1, every: 4}",
        "objective.teacher={path: away.pt}",
    ],
    "r1 by a double backward": ["objective.r1={weight: 1, every: 4, method: double_backward}"],
    "r1 in forward mode": ["objective={d_steps: 2, r1: {weight: 1, every: 4, method: forward_mode}}"],
    "two penalties": ["objective={r1: {weight: 1, every: 4}, gradient_penalty: {weight: 1}}"],
    "finite differences": ["objective.r1={weight: 1, every: 3, form: finite_difference, antithetic: true}"],
    "path length by a double backward": TINY_GAMES["stylegan2_path_length"],
    "path length in forward mode": [
        *TINY_GAMES["stylegan2_path_length"][:2],
        "objective={loss: non_saturating, path_length: {weight: 0.1, every: 2, decay: 0.5, method: forward_mode}}",
    ],
}


def total(work, network):
    """Operations of a network in the mean update, for the whole batch."""
    return sum(
        kind.share * work.of_task(kind, task, stage)
        for kind in work.kinds
        for number, phase in enumerate(kind.phases)
        if phase.network == network
        for task in in_turn(number, phase)
        for stage in range(len(work.stages[network]))
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("a teacher", "path length in forward mode") else name
        for name in GAMES
    ],
)
def test_the_tasks_of_both_sides_are_the_operations_of_an_update(name, tmp_path):
    work = work_of(tmp_path, *GAMES[name])
    counted = count_work(work.plan)
    expected = sum(counted[key] for key in ("update_flop", "penalties_flop", "path_length_flop"))
    found = {network: total(work, network) / work.plan.recipe.batch for network in NETWORKS}
    assert sum(found.values()) == pytest.approx(expected, rel=1e-6)  # where count_work divides, it rounds
    assert found["discriminator"] % 1 == pytest.approx(0, abs=1e-6)
    assert sum(kind.share for kind in work.kinds) == pytest.approx(1)


@pytest.mark.slow
def test_what_is_computed_again_counts(tmp_path):
    """By activation checkpointing, and where several micro-batches travel: G's images once more for its own update."""
    plain, several = work_of(tmp_path), work_of(tmp_path, "accumulation=2")
    again = work_of(tmp_path, "engines.discriminator.activation_checkpointing=true")
    g, d = (240 * count_network(plain.plan, network)[1] for network in NETWORKS)
    assert total(several, "generator") - total(plain, "generator") == pytest.approx(g)
    assert total(again, "discriminator") - total(plain, "discriminator") == pytest.approx(3 * d)


def by_hand(work, ranks, num, d_steps):
    """When an update ends, written down as recurrences: of networks without stages, penalties, or costs of travel."""
    g, d = (240 * count_network(work.plan, n)[1] / ranks[n] / num for n in NETWORKS)
    t_g = t_d = 0.0
    for _ in range(d_steps):
        images = [t_g := t_g + g for _ in range(num)]
        for image in images:
            t_d = max(t_d, image) + 6 * d
    own = [t_g := t_g + g for _ in range(num)]
    judged = [t_d := max(t_d, image) + 2 * d for image in own]
    for slope in judged:
        t_g += g if num > 1 else 0
        t_g = max(t_g, slope) + 2 * g
    return max(t_g, t_d)


@pytest.mark.slow
@pytest.mark.parametrize("num, d_steps", [*itertools.product((1, 2, 4), (1, 2))])
def test_auto_takes_the_best_of_all_divisions(num, d_steps, tmp_path):
    """Those of 8 ranks that divide the batch, by a simulation that shares nothing with the planner's."""
    options = [f"accumulation={num}", f"objective.d_steps={d_steps}", "generator.channels=6"]
    recipe, work = recipe_of(tmp_path, AUTO, *options), work_of(tmp_path, *options)
    times = {}
    for g in range(1, 8):
        if 240 % (num * g) == 0 and 240 % (num * (8 - g)) == 0:
            times[g] = by_hand(work, dict(zip(NETWORKS, (g, 8 - g), strict=True)), num, d_steps)
    assert len(times) >= 4
    found = divide(recipe, 8, tmp_path)
    assert found.timing.seconds == pytest.approx(min(times.values()))
    assert times[found.numbers["generator"]] == pytest.approx(min(times.values()))


@pytest.mark.slow
def test_stages_wait_as_pipelines_do(tmp_path):
    """G in 2 stages with as many micro-batches as do not fit at once: no update is shorter than its busiest device."""
    work = work_of(tmp_path, *stages(2, 1), "accumulation=4")
    assert [len(work.stages[network]) for network in NETWORKS] == [2, 1]
    timing = sides.time_update(work, dict.fromkeys(NETWORKS, 1))
    assert timing.seconds > max(*timing.busy.values(), total(work, "discriminator"))
    assert timing.seconds < total(work, "generator") + total(work, "discriminator")
    assert timing.idle == pytest.approx(
        1 - (total(work, "generator") + total(work, "discriminator")) / (3 * timing.seconds)
    )
    found = divide(recipe_of(tmp_path, AUTO, *stages(2, 1), "accumulation=4"), 7, tmp_path)
    assert found.numbers["generator"] % 2 == 0


@pytest.mark.slow
def test_the_choice_is_said_and_recorded_as_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    recipe = shipped.recipe("digits")
    command = ["train", "--config", str(recipe), "--dry-run", f"out={tmp_path / 'run'}", "batch=240"]
    assert main([*command, AUTO, "engines.discriminator.ranks=auto"]) == 0
    said = capsys.readouterr()
    saved = yaml.safe_load(said.out)["engines"]
    numbers = {network: saved[network]["ranks"] for network in NETWORKS}
    assert sum(numbers.values()) == 8
    expected = divide(load_recipe(recipe, ["batch=240", AUTO]), 8, recipe.parent)
    assert numbers == expected.numbers
    assert f"auto takes {numbers['generator']} + {numbers['discriminator']} ranks for G and D" in said.err
    (tmp_path / "again.yaml").write_text(said.out)
    plan = plan_run(load_recipe(tmp_path / "again.yaml", []), 8)
    assert {network: len(plan.placement(network).ranks) for network in NETWORKS} == numbers


def test_beside_a_number_auto_is_the_rest(tmp_path):
    plan = plan_run(recipe_of(tmp_path, AUTO, "engines.discriminator.ranks=5"), 8)
    assert [len(plan.placement(network).ranks) for network in NETWORKS] == [3, 5]
    assert plan.recipe.engine("generator").ranks is None


@pytest.mark.parametrize(
    "world_size, overrides, text",
    [
        (1, [AUTO], "engines.generator.ranks: must be null on one rank, got 'auto'; "),
        pytest.param(
            7,
            ["engines.discriminator.ranks=auto", "batch=8"],
            "engines.discriminator.ranks: 'auto' finds no division of 7 ranks ",
            marks=pytest.mark.slow,
        ),
        (2, [AUTO, *stages(2, 1)], "engines.generator.ranks: 'auto' finds no division of 2 ranks "),
    ],
)
def test_ranks_that_cannot_be_divided(world_size, overrides, text, tmp_path):
    with pytest.raises(UserError) as caught:
        plan_balanced(tiny_recipe(tmp_path, *overrides), world_size, tmp_path)
    assert str(caught.value).startswith(text)
    if world_size == 7:  # the batch that is named has one
        batch = str(caught.value).partition("set ")[2].partition(",")[0]
        plan, _ = plan_balanced(tiny_recipe(tmp_path, overrides[0], batch), 7, tmp_path)
        assert plan.is_split


@pytest.mark.slow
def test_a_better_batch_is_named(tmp_path):
    """128 images can be divided by 4 + 4 ranks alone; 120 by others too."""
    _, text = plan_balanced(tiny_recipe(tmp_path, AUTO, "batch=128", "discriminator.channels=32"), 8, tmp_path)
    assert "auto takes 4 + 4 ranks for G and D, which compute " in text
    batch = text.partition("with batch=")[2].partition(",")[0]
    other, _ = plan_balanced(tiny_recipe(tmp_path, AUTO, f"batch={batch}", "discriminator.channels=32"), 8, tmp_path)
    assert len(other.placement("generator").ranks) < 4


@pytest.mark.parametrize("number", [1, 2, 12, 49, 240, 720_720, 2**20])
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("of_g, of_d, accumulation", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 3)])
def test_all_divisions_that_the_batch_allows_are_found(of_g, of_d, accumulation, tmp_path):
    recipe = recipe_of(tmp_path, *stages(of_g, of_d), f"accumulation={accumulation}")
    for world_size in (2, 6, 12, 31):
        expected = [
            {"generator": g, "discriminator": world_size - g}
            for g in range(of_g, world_size, of_g)
            if (world_size - g) % of_d == 0
            and recipe.batch % (accumulation * g // of_g) == 0
            and recipe.batch % (accumulation * (world_size - g) // of_d) == 0
        ]
        assert list(possible(recipe, world_size, tmp_path)) == expected


def test_a_million_ranks_are_planned_in_bounded_time(tmp_path, monkeypatch):
    """Divisions are as many as the batch has divisors, and not as the job has ranks."""
    tried = []
    monkeypatch.setattr(balance, "plan_run", lambda recipe, *others: tried.append(recipe))
    recipe, ranks = tiny_recipe(tmp_path, f"batch={2**20}"), 2**20
    found = list(possible(recipe, ranks, tmp_path))
    assert found == [{"generator": ranks // 2, "discriminator": ranks // 2}]
    assert len(tried) == 1
