"""Division into stages against all divisions there are, and what travels against a real pass."""

import random
from itertools import combinations, pairwise

import pytest
import torch

from bigsgan.config import plan_run
from bigsgan.engines.pipeline.layout import (
    build_on_meta,
    divide_network,
    expected_bubble,
    measure_layers,
    samples_of,
    update_phases,
)
from bigsgan.engines.pipeline.partition import divide
from bigsgan.engines.pipeline.profile import LayerCost, weights
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from tests.tiny import tiny_plan, tiny_recipe, zero

NETWORKS = ("generator", "discriminator")


def worst(costs, bounds):
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


@pytest.mark.parametrize("seed", range(20))
def test_no_division_has_a_cheaper_costliest_stage(seed):
    draw = random.Random(seed)
    costs = [draw.choice([0.0, 1.0, draw.random(), 10 * draw.random()]) for _ in range(draw.randint(1, 8))]
    for stages in range(1, len(costs) + 1):
        bounds = divide(costs, stages)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), stages + 1)
        assert all(a < b for a, b in pairwise(bounds)), "a stage is empty"
        every = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), stages - 1))
        assert worst(costs, bounds) == pytest.approx(min(worst(costs, other) for other in every))


def staged_plan(directory, stages, *overrides, **extra):
    options = [f"engines.{n}.pipeline_stages={stages}" for n in NETWORKS]
    return tiny_plan(directory, stages, [*options, *overrides], {n: zero(1, **extra) for n in NETWORKS})


def real_inputs(plan, network, num):
    data = plan.recipe.data
    labels = torch.arange(num) % data.num_classes
    if network == "generator":
        return torch.randn(num, plan.recipe.generator.latent_size), labels
    return torch.randn(num, data.image_channels, data.resolution, data.resolution), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", NETWORKS)
def test_boundaries_are_those_of_a_real_pass(tmp_path, network, dtype):
    extra = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    plan = staged_plan(tmp_path, 2, **extra)
    division = divide_network(plan, network, None, [0, 2, 5])
    whole = build_network(plan.recipe, network)
    initialize(whole, 0)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    carry = real_inputs(plan, network, 3)
    for stage, (first, last) in enumerate([(0, 0), (0, 2), (2, 5)]):
        carry = whole.part(first, last).fold(*carry)
        specs = division.boundaries.at(stage, 3)
        assert [(s.shape, s.dtype) for s in specs] == [(t.shape, t.dtype) for t in carry]
        assert [s.num_bytes for s in specs] == [t.nbytes for t in carry]


def test_parts_make_the_whole(tmp_path):
    whole = build_network(tiny_recipe(tmp_path), "generator")
    initialize(whole, 0)
    inputs = torch.randn(4, 12), torch.arange(4)
    parts = [whole.part(0, 1), whole.part(1, 4), whole.part(4, 5)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    carry = inputs
    for part in parts:
        carry = part.fold(*carry)
    assert torch.equal(carry[0], whole(*inputs))


@pytest.mark.parametrize("network", NETWORKS)
def test_more_stages_than_layers_are_refused(tmp_path, network):
    recipe = tiny_recipe(tmp_path, f"engines.{network}.pipeline_stages=8")
    with pytest.raises(UserError) as caught:
        divide_network(plan_run(recipe, 8), network, None)
    assert caught.value.field == f"engines.{network}.pipeline_stages"
    assert "has layers (5), which would leave a stage without any" in caught.value.problem
    assert caught.value.remedy == f"set engines.{network}.pipeline_stages to 5 or less"


def test_partitions_share_what_their_names_say(tmp_path):
    costs = [LayerCost("A", 6, 1.0, 2.0), LayerCost("B", 1, 4.0, 8.0), LayerCost("C", 1, 2.0, 1.0)]
    assert weights(costs, "uniform") == [1.0, 1.0, 1.0]
    assert weights(costs, "parameters") == [6.0, 1.0, 1.0]
    assert weights(costs, "profile") == [3.0, 12.0, 3.0]
    plan = staged_plan(tmp_path, 2)
    numel = [sum(p.numel() for p in layer.parameters()) for layer in build_on_meta(plan, "generator").layers.values()]
    division = divide_network(plan, "generator", None)
    assert [layer.numel for layer in division.layers] == numel
    assert division.bounds == divide([float(n) for n in numel], 2)


def test_measured_layers_have_times_and_memory(tmp_path):
    plan = staged_plan(tmp_path, 2, *(f"engines.{n}.partition=profile" for n in NETWORKS))
    found = measure_layers(plan, "discriminator", torch.device("cpu"))
    assert all(cost.forward > 0 and cost.backward > 0 for cost in found)
    assert [cost.name for cost in found][-1] == "DiscriminatorHead"
    # The head keeps at least its input, a map of 4x4 pixels, for its ReLU: float32, once or a few times.
    channels = build_network(plan.recipe, "discriminator").layers["4"].linear.weight.shape[1]
    assert channels * 16 * 4 <= found[-1].saved_bytes <= 10 * channels * 16 * 4
    assert measure_layers(staged_plan(tmp_path, 2), "generator", torch.device("cpu")) is None
    division = divide_network(plan, "discriminator", found)
    text = division.table(samples_of(plan, "discriminator"))
    assert text.splitlines()[0] == "discriminator in 2 stages, micro-batches of 16:"
    assert text.count("ms") == 4
    assert expected_bubble(plan, {"generator": divide_network(plan, "generator", found), "discriminator": division}) > 0


def test_an_update_has_five_phases(tmp_path):
    plan = staged_plan(tmp_path, 2, "accumulation=4", "objective.d_steps=2")
    phases = update_phases(plan)
    assert [(p.network[0], p.num, p.num_samples) for p in phases] == [
        ("g", 4, 2), ("d", 4, 4), ("g", 4, 2), ("d", 4, 4), ("g", 4, 2), ("d", 4, 2), ("g", 4, 2)
    ]  # fmt: skip
    assert [(p.images_from, p.grads_from, p.graphs_from) for p in phases] == [
        (None, None, None), (0, None, None), (None, None, None), (2, None, None), (None, None, None),
        (4, None, None), (None, 5, 4),
    ]  # fmt: skip
