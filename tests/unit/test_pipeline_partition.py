"""Divisions of networks against brute force, real forward passes and counts of their own."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bigsgan.adversarial.latents import LatentSource, SampleDraws
from bigsgan.adversarial.step import AdversarialStep, Scheduled, Sources
from bigsgan.adversarial.terms import Own, Termed, build_terms
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.data import LabelledImages, Slice
from bigsgan.draws import Draws
from bigsgan.engines.base import Rates
from bigsgan.engines.executor import Executor
from bigsgan.engines.phases import Phase, Segments, Trains, update_phases
from bigsgan.engines.pipeline.layout import (
    StageDivision,
    describe_bubble,
    divide_network,
    expected_bubble,
    samples_of,
    usual_phases,
)
from bigsgan.engines.pipeline.partition import TensorSpec, divide
from bigsgan.engines.pipeline.profile import LayerCost
from bigsgan.engines.pipeline.schedule import Cost
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.monitor import Statistics
from tests.tiny import TINY_GAMES, stages, tiny_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {"generator": (12,), "discriminator": (1, 16, 16)}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def real_network(plan: RunPlan, network: str, dtype: torch.dtype = torch.float32) -> LayerStack:
    stack = build_network(plan.recipe, network)
    initialize(stack, 0)
    for parameter in stack.parameters():
        parameter.data = parameter.data.to(dtype)
    return stack


def real_carries(stack: LayerStack, inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """What enters each layer of a network with memory, and what leaves the last one."""
    carries: list[tuple[Tensor, ...]] = [(inputs, torch.arange(len(inputs)) % 10)]
    with torch.no_grad():
        for layer in stack.layers.values():
            carries.append(layer(*carries[-1]))
    return carries


@pytest.mark.parametrize("seed", range(40))
def test_no_division_has_a_cheaper_costliest_stage(seed):
    rng = random.Random(seed)
    num = rng.randint(1, 9)
    costs = [rng.choice([0.0, rng.random(), 10 * rng.random(), float(rng.randint(1, 3))]) for _ in range(num)]
    costs = [0.0] * num if seed == 0 else costs
    for num_stages in range(1, num + 1):
        bounds = divide(costs, num_stages)
        assert len(bounds) == num_stages + 1
        assert (bounds[0], bounds[-1]) == (0, num)
        assert all(start < stop for start, stop in pairwise(bounds)), "a stage is empty"
        costliest = [
            max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, num]))
            for cuts in combinations(range(1, num), num_stages - 1)
        ]
        assert max(sum(costs[a:b]) for a, b in pairwise(bounds)) == pytest.approx(min(costliest), rel=1e-12)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_boundaries_are_what_a_real_pass_carries(tmp_path, network, precision):
    plan = tiny_plan(tmp_path, 2, stages(2, 2), dict.fromkeys(NETWORKS, PRECISIONS[precision]))
    stack = real_network(plan, network, DTYPES[precision])
    num_layers = len(stack.layers)
    boundaries = divide_network(plan, network, None, list(range(num_layers + 1))).boundaries
    coarse = divide_network(plan, network, None, [0, 2, num_layers]).boundaries
    for num_samples in (3, 2):
        carries = real_carries(stack, torch.randn(num_samples, *SHAPES[network]))
        expected = [[TensorSpec(tensor.shape, tensor.dtype) for tensor in carry] for carry in carries]
        assert [boundaries.at(stage, num_samples) for stage in range(num_layers + 1)] == expected
        assert [coarse.at(stage, num_samples) for stage in range(3)] == [expected[i] for i in (0, 2, num_layers)]
    # Inside, features travel in the parameters' type.
    assert carries[2][0].dtype == DTYPES[precision]


ROW = re.compile(r"stage (\d+)  layers (\d+)-(\d+)  ([\d,]+) parameters(.*)  sends ([\d.]+) MiB")


def rows(division: StageDivision, num_samples: int) -> list[tuple[int, int, int, int, str, float]]:
    title, *lines = division.table(num_samples).splitlines()
    assert title == f"{division.network} in {len(lines)} stages, micro-batches of {num_samples}:"
    found = []
    for line in lines:
        match = ROW.fullmatch(line.strip())
        assert match, line
        stage, first, last, parameters, measured, sent = match.groups()
        found.append((int(stage), int(first), int(last), int(parameters.replace(",", "")), measured, float(sent)))
    return found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("partition", ["parameters", "uniform"])
def test_the_table_has_every_layer_and_parameter_once(tmp_path, network, partition):
    plan = tiny_plan(tmp_path, 4, [*stages(4, 4), f"engines.{network}.partition={partition}"], {})
    stack = real_network(plan, network)
    found = rows(divide_network(plan, network, None), num_samples=65536)
    assert [row[0] for row in found] == [0, 1, 2, 3]
    assert [layer for row in found for layer in range(row[1], row[2] + 1)] == list(range(len(stack.layers)))
    counts = [sum(p.numel() for p in layer.parameters()) for layer in stack.layers.values()]
    assert [row[3] for row in found] == [sum(counts[first : last + 1]) for _, first, last, *_ in found]
    assert sum(row[3] for row in found) == sum(p.numel() for p in stack.parameters())
    if partition == "parameters":
        assert max(row[3] for row in found) == max(sum(counts[a:b]) for a, b in pairwise(divide(counts, 4)))
    else:
        assert max(row[2] - row[1] + 1 for row in found) == -(-len(counts) // 4)
    carries = real_carries(stack, torch.randn(2, *SHAPES[network]))
    for _, _, last, _, _, sent in found:
        num_bytes = 65536 / 2 * sum(tensor.numel() * tensor.element_size() for tensor in carries[last + 1])
        assert sent == pytest.approx(num_bytes / 2**20, abs=0.005)


def test_the_table_of_measured_layers(tmp_path):
    plan = tiny_plan(tmp_path, 2, [*stages(2, 2), "engines.discriminator.partition=profile"], {})
    num_layers = len(build_network(plan.recipe, "discriminator").layers)
    costs = [LayerCost("Layer", 10, 0.001 * i, 0.002 * i, i * 2**20) for i in range(1, num_layers + 1)]
    division = divide_network(plan, "discriminator", costs)
    assert division.bounds == divide(list(range(1, num_layers + 1)), 2)
    cut = division.bounds[1]
    sums = [sum(range(1, cut + 1)), sum(range(cut + 1, num_layers + 1))]
    assert division.costs() == [pytest.approx(Cost(0.001 * s, 0.002 * s)) for s in sums]
    assert [row[4] for row in rows(division, 8)] == [
        f"  forward {8 * s:.2f} ms  backward {16 * s:.2f} ms  activations {8 * s:.1f} MiB" for s in sums
    ]


@pytest.mark.parametrize("network", NETWORKS)
def test_more_stages_than_layers_are_refused(tmp_path, network):
    field = f"engines.{network}.pipeline_stages"
    plan = tiny_plan(tmp_path, 8, [f"{field}=8"], {})
    with pytest.raises(UserError) as caught:
        divide_network(plan, network, None)
    assert (caught.value.field, caught.value.value) == (field, 8)
    assert "must be at most 5, the number of layers of the " in caught.value.problem
    assert caught.value.remedy == f"set {field}=5 or less"


class NoReals:
    def next_phase(self) -> list[LabelledImages]:
        raise AssertionError("nothing is computed")


class Recording:
    """An executor that computes nothing."""

    def __init__(self, engines, found: list[Phase]) -> None:
        self.engines, self.found = engines, found

    def __call__(self, works) -> None:
        self.found += [work.phase for work in works]


def asked_phases(plan: RunPlan) -> list[Phase]:
    """Phases of an update with the samples that AdversarialStep gives them."""
    recipe, found = plan.recipe, list[Phase]()
    slices = {
        phase: {
            network: Slice(recipe.batch, recipe.accumulation_of(phase), 0, plan.placement(network).num_replicas)
            for network in NETWORKS
        }
        for phase in NETWORKS
    }
    cpu = torch.device("cpu")
    draws = SampleDraws(Draws(0), cpu)
    sources = Sources(NoReals(), LatentSource(draws, 12, range(10)), draws, slices)
    executor = Executor({network: SimpleNamespace() for network in NETWORKS}, list)
    statistics = Statistics(cpu)
    ours = Termed(statistics, cpu, lambda tensor: tensor)
    terms = build_terms(recipe, plan.objective, ours, Own.of(recipe, cpu))
    step = AdversarialStep(executor, plan, sources, statistics, terms)
    for engine in executor.engines.values():
        engine.outcomes = SimpleNamespace(last=True)
    step.executor = Recording(executor.engines, found)
    step(0, Scheduled(Rates(0.1), Rates(0.1), {}))
    return found


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize(
    "options",
    [
        ["accumulation=4"],
        ["accumulation=2", "objective.d_steps=2"],
        ["engines.generator.accumulation=2", "engines.discriminator.accumulation=4"],
        ["accumulation=4", "objective={d_steps: 2, reuse_fakes: true}"],
        ["accumulation=2", "objective={d_steps: 2, r1: {weight: 1, every: 2}}"],
        [*TINY_GAMES["stylegan2"][:2], "objective={path_length: {}, d_steps: 2}"],
        [*TINY_GAMES["stylegan2"][:2], "objective={path_length: {}, d_steps: 2, reuse_fakes: true}"],
    ],
)
def test_the_planned_phases_are_those_that_the_step_asks_for(tmp_path, mode, options):
    plan = tiny_plan(tmp_path, 4, [*stages(2, 2), *options, f"pipeline.generator_phase={mode}"], {})
    objective = plan.recipe.objective
    first = Segments(differentiated=int(objective.r1 is not None))
    planned = update_phases(plan, [first], objective.path_length is not None)
    assert planned == asked_phases(plan)


R1 = "r1: {weight: 1}"


@pytest.mark.parametrize(
    "penalties, segments, trained",
    [
        (R1, 1, 2),
        ("r2: {weight: 1}", 2, 2),
        (f"{R1}, r2: {{weight: 1}}", 2, 2),
        ("gradient_penalty: {weight: 1}", 3, 3),
    ],
)
def test_with_r1_alone_d_differentiates_at_real_images_and_waits_for_no_others(tmp_path, penalties, segments, trained):
    plan = tiny_plan(tmp_path, 4, [*stages(2, 2), "accumulation=4", f"objective={{{penalties}}}"], {})
    _, differentiates, trains, *_ = found = usual_phases(plan)
    assert (differentiates.num_samples, trains.num_samples) == (segments, trained)
    assert (differentiates.images_from, trains.images_from) == (None if segments == 1 else 0, 0)
    assert asked_phases(plan) == found


@pytest.mark.parametrize("more, segments", [("every: 1", 3), ("antithetic: true", 4), ("every: 2", 2)])
def test_the_usual_phases_have_the_segments_of_penalties_that_every_update_has(tmp_path, more, segments):
    r1 = f"objective={{r1: {{weight: 1, form: finite_difference, check_every: 0, {more}}}}}"
    found = usual_phases(tiny_plan(tmp_path, 4, [*stages(2, 2), r1], {}))
    assert [phase.segments for phase in found if isinstance(phase, Trains)] == [segments]


def test_a_finite_difference_is_checked_on_one_micro_batch(tmp_path):
    r1 = "{weight: 1, every: 2, form: finite_difference, antithetic: true}"
    plan = tiny_plan(tmp_path, 4, [*stages(2, 2), "accumulation=4", f"objective={{d_steps: 2, r1: {r1}}}"], {})
    found = asked_phases(plan)
    of_d = [(phase.label, phase.num, phase.num_samples) for phase in found if phase.network == "discriminator"]
    assert of_d == [("D checks", 1, 4), ("D trains", 4, 4), ("D trains", 4, 2), ("D judges", 4, 1)]
    assert [phase.num_moving for phase in found[1:3]] == [0, 1]
    assert found[1].images_from == found[2].images_from == 0
    assert update_phases(plan, [Segments(trains=4, checks=True)]) == found


@pytest.mark.parametrize("num_stages, num", [(2, 4), (2, 8), (4, 8)])
@pytest.mark.parametrize("schedule", ["joint", "phases"])
def test_expected_bubble(tmp_path, num_stages, num, schedule):
    """One fill and drain for D's and G's micro-batches together, or one for each phase."""
    options = [*stages(num_stages, num_stages), f"accumulation={num}", f"pipeline.schedule={schedule}"]
    plan = tiny_plan(tmp_path, num_stages, options, {})
    divisions = {network: divide_network(plan, network, None) for network in NETWORKS}
    micro_batches = 2 * num if schedule == "joint" else num
    expected = (num_stages - 1) / (micro_batches + num_stages - 1)
    assert expected_bubble(plan, divisions) == pytest.approx(expected, rel=1e-9)
    text = f"bubble of an update: {100 * expected:.1f} %, were all stages equally fast"
    assert text in describe_bubble(plan, divisions)
    # A measured network beside one that was not: its unit is another, its bubble the same.
    bounds, layers = divisions["generator"].bounds, divisions["generator"].layers
    divisions["generator"].layers = [
        layer._replace(forward=3.0 * (i in bounds), backward=6.0 * (i in bounds)) for i, layer in enumerate(layers)
    ]
    assert expected_bubble(plan, divisions) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("more, work, wait", [("", 20, 30), (", r2: {weight: 1}", 22, 32)])
def test_expected_bubble_with_exact_penalties(tmp_path, more, work, wait):
    """In forward passes of one sample: G makes images (1), D differentiates (1 + 1 an image with a penalty) and trains
    (3 an image, and 3 with its tangent), G makes images (1), D judges (1 + 1), G pulls back (2).

    How long a stage waits beside that is what the planner found when docs/explanation/penalties.md was written.
    """
    found = []
    for schedule in ("joint", "phases"):
        options = [*stages(4, 4), "accumulation=8", f"pipeline.schedule={schedule}"]
        plan = tiny_plan(tmp_path, 4, [*options, f"objective={{r1: {{weight: 1}}{more}}}"], {})
        found.append(expected_bubble(plan, {network: divide_network(plan, network, None) for network in NETWORKS}))
    assert found == pytest.approx([wait / (8 * work + wait), 3 / 11], rel=1e-9)


def test_a_slow_stage_makes_the_others_wait(tmp_path):
    """Two stages of which one takes three times as long, phase by phase, worked out by hand."""
    plan = tiny_plan(tmp_path, 2, [*stages(2, 2), "accumulation=2", "pipeline.schedule=phases"], {})
    divisions = {network: divide_network(plan, network, None) for network in NETWORKS}
    for division in divisions.values():
        slow = {0: 3.0, division.bounds[1]: 1.0}
        division.layers = [
            layer._replace(forward=slow.get(i, 0.0), backward=slow.get(i, 0.0))
            for i, layer in enumerate(division.layers)
        ]
    # A sample forward or backward takes 3 in the first stage and 1 in the second; there are 4 in a micro-batch of a
    # phase, 8 where D trains, and frozen backward passes cost half.
    forward = 4 * (3 + 3 + 1)
    train = 8 * (3 + 3 + 3 + 3)  # the first stage never waits for the second
    judge = 4 * (3 + 3 + 1.5 + 1.5)
    backward = 4 * (1 + 3 + 3)
    whole = forward + train + judge + forward + backward
    busy = 2 * 4 * 4 * (1 + 2 * 2 + 1 + 1.5 + 1)
    assert expected_bubble(plan, divisions) == pytest.approx(1 - busy / (2 * whole), rel=1e-9)


def test_no_bubble_is_expected_where_pipelines_do_not_meet(tmp_path):
    for layout in [(2, 1), (2, 4)]:
        plan = tiny_plan(tmp_path, 4, stages(*layout), {})
        divisions = {n: divide_network(plan, n, None) for n in NETWORKS if plan.placement(n).num_stages > 1}
        assert expected_bubble(plan, divisions) is None
        assert describe_bubble(plan, divisions) is None


def test_samples_of_a_micro_batch(tmp_path):
    plan = tiny_plan(tmp_path, 4, [*stages(4, 2), "accumulation=2"], {})
    assert samples_of(plan, "generator") == 4
    assert samples_of(plan, "discriminator") == 4  # of 2 replicas, each 2 real and 2 fake images
