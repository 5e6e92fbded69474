"""Costs of layers: sizes and memory against counts by hand, times against a clock that layers move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigsgan.config import NETWORKS, both_engines
from bigsgan.engines.pipeline.layout import build_on_meta, divide_network, measure_layers
from bigsgan.engines.pipeline.partition import Boundaries
from bigsgan.engines.pipeline.profile import LayerCost, count, measure, weights
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack
from tests.tiny import tiny_plan

CPU = torch.device("cpu")
PROFILE = both_engines("partition=profile")


class Dense(nn.Module):
    """tanh(x W): the backward pass needs x and the output."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))

    def initialize(self, generators) -> None:
        nn.init.normal_(self.weight, generator=generators("weight"))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(x @ self.weight),)


class Clock:
    """A clock that stands still but for the layers that move it."""

    now = 0.0

    def take(self, seconds: list[float]) -> None:
        """Let the first of ``seconds`` pass."""
        self.now += seconds.pop(0)


class Slow(nn.Module):
    """Identity that takes given times, one after the other, forward and backward."""

    def __init__(self, clock: Clock, forward: list[float], backward: list[float]) -> None:
        super().__init__()
        self.take = lambda: clock.take(forward)
        self.take_backward = lambda: clock.take(backward)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (_Slow.apply(x, self),)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if not x.is_meta:
            layer.take()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.take_backward()
        return grad, None


def measured(layers: list[nn.Module], num_features: int, num_samples: int) -> list[LayerCost]:
    network = LayerStack(layers).to("meta")
    inputs = lambda num: (torch.empty(num, num_features, device="meta"),)  # noqa: E731
    return measure(network, Boundaries(network, range(len(layers) + 1), inputs), num_samples, CPU, seed=0)


def test_memory_and_parameters_of_known_layers():
    idle = Slow(Clock(), [0.0] * 9, [0.0] * 9)
    found = measured([Dense(6, 10), idle, Dense(10, 3)], 6, num_samples=16)
    assert [cost.name for cost in found] == ["Dense", "Slow", "Dense"]
    assert [cost.numel for cost in found] == [60, 0, 30]
    assert [cost.saved_bytes for cost in found] == [4 * (6 + 10), 0, 4 * (10 + 3)]


def test_times_are_the_best_of_three_for_one_sample(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("bigsgan.engines.pipeline.profile.time.perf_counter", lambda: clock.now)
    layers = [Slow(clock, [5.0, 2.0, 3.0], [7.0, 8.0, 6.0]), Dense(6, 6), Slow(clock, [1.0] * 3, [0.5] * 3)]
    found = measured(layers, 6, num_samples=4)
    assert [(cost.forward, cost.backward) for cost in found] == [(2 / 4, 6 / 4), (0, 0), (1 / 4, 0.5 / 4)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_biggan(tmp_path, network, precision):
    content = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    plan = tiny_plan(tmp_path, 1, PROFILE, dict.fromkeys(NETWORKS, content))
    found = measure_layers(plan, network, CPU)
    assert found is not None
    layers = build_network(plan.recipe, network).layers.values()
    counted = [(type(layer).__name__, sum(p.numel() for p in layer.parameters())) for layer in layers]
    assert [(cost.name, cost.numel) for cost in found] == counted
    assert count(build_on_meta(plan, network)) == [LayerCost(*layer) for layer in counted]
    assert all(cost.forward > 0 and cost.backward > 0 and cost.saved_bytes > 0 for cost in found)


def test_memory_of_a_block(tmp_path):
    """D's first block, of C = 8 features: what each operation has to keep of an image of 16 x 16."""
    plan = tiny_plan(tmp_path, 1, [*PROFILE, "batch=32"], {})
    found = measure_layers(plan, "discriminator", CPU)
    assert found is not None
    pixels, channels = 16 * 16, 8
    image, hidden, after, pooled = pixels, channels * pixels, channels * pixels, pixels // 4
    # conv1 keeps the image, relu its output, which conv2 keeps too, pooling what conv2 gave, the shortcut its input.
    per_sample = 4 * (image + hidden + after + pooled)
    normalized = 4 * 2 * (9 * channels + 9 * channels**2 + channels)  # weights: in float32, and divided by sigma
    assert per_sample <= found[0].saved_bytes <= per_sample + normalized
    assert normalized < per_sample


def test_a_checkpointed_layer_keeps_its_inputs(tmp_path):
    options = [*PROFILE, "engines.discriminator.activation_checkpointing=true"]
    plan = tiny_plan(tmp_path, 1, options, {})
    found = measure_layers(plan, "discriminator", CPU)
    assert found is not None
    num_layers = len(found)
    boundaries = divide_network(plan, "discriminator", found, list(range(num_layers + 1))).boundaries
    entering = [sum(spec.num_bytes for spec in boundaries.at(i, 1)) for i in range(num_layers)]
    assert [cost.saved_bytes for cost in found] == entering


def test_measured_only_where_the_recipe_asks_for_it(tmp_path):
    plan = tiny_plan(tmp_path, 1, PROFILE[:1], {})
    assert measure_layers(plan, "generator", CPU) is not None
    assert measure_layers(plan, "discriminator", CPU) is None


def test_weights():
    costs = [LayerCost("A", 100, 0.25, 0.5, 7), LayerCost("B", 0, 1.0, 3.0, 9), LayerCost("C", 5, 0.0, 0.0, 0)]
    assert weights(costs, "parameters") == [100.0, 0.0, 5.0]
    assert weights(costs, "uniform") == [1.0, 1.0, 1.0]
    assert weights(costs, "profile") == [0.75, 4.0, 0.0]
