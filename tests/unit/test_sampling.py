"""Standing statistics are the mean over the batches, and nothing of what was there before."""

import numpy as np
import pytest
import torch

from bigsgan.draws import Draws
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack
from bigsgan.training.sampling import sample, stand_statistics, standing_batches
from tests.tiny import tiny_recipe


class Normalize(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.statistics = BatchStatistics(3)
        self.statistics.initialize(lambda name: torch.Generator())

    def forward(self, x):
        return (self.statistics(x),)


def make():
    network = LayerStack([Normalize()])

    def infer(inputs, moving):
        with torch.no_grad(), moving_state(network.stateful_layers(), moving):
            return network(*inputs)

    return network, network.layers["0"].statistics, infer


def test_statistics_are_those_of_the_batches():
    network, norm, infer = make()
    generator = torch.Generator().manual_seed(0)
    batches = [(2 * torch.randn(5, 3, 4, 4, generator=generator) + i,) for i in range(7)]
    for start in (0.0, 1e3):
        norm.running_mean.fill_(start)
        norm.running_var.fill_(start)
        stand_statistics(network, infer, batches)
        means = torch.stack([x.mean(dim=(0, 2, 3)) for (x,) in batches])
        variances = torch.stack([x.var(dim=(0, 2, 3)) for (x,) in batches])
        torch.testing.assert_close(norm.running_mean, means.mean(dim=0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(norm.running_var, variances.mean(dim=0), atol=1e-3, rtol=1e-4)
        assert norm.momentum == 0.1


@pytest.fixture
def few_standing_images():
    """As many as users get, in this file."""


@pytest.mark.parametrize("batch, num_batches", [(100, 16), (64, 25), (400, 16)])
def test_standing_batches_are_1600_images_or_more(tmp_path, batch, num_batches):
    recipe = tiny_recipe(tmp_path)
    batches, draws = standing_batches(recipe, range(10), None, batch, torch.device("cpu")), Draws(recipe.seed)
    assert [tuple(map(len, pair)) for pair in batches] == [(batch, batch)] * num_batches
    # The same images, however many at a time.
    latents, labels = (torch.cat(part)[:1600].numpy() for part in zip(*batches, strict=True))
    assert np.array_equal(latents, draws.normal("standing", (0,), 0, 1600, 12))
    assert np.array_equal(labels, draws.integers("standing/label", (0,), 0, 1600, 10))


def test_truncated_batches_stay_below_the_threshold(tmp_path):
    batches = standing_batches(tiny_recipe(tmp_path), range(10), 0.5, 100, torch.device("cpu"))
    latents = torch.cat([latents for latents, _ in batches])
    assert 0.49 < latents.abs().max() <= 0.5


def test_samples_come_from_the_running_statistics_in_chunks():
    network, norm, infer = make()
    norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    norm.running_var.fill_(4.0)
    x = torch.randn(10, 3, 4, 4)
    expected = (x - torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)) / (4.0 + norm.eps) ** 0.5
    torch.testing.assert_close(sample(network, infer, (x,), chunk=3), expected)
    pieces = [(p - p.mean((0, 2, 3), keepdim=True)) / (p.var((0, 2, 3), False, keepdim=True) + norm.eps) ** 0.5
              for p in x.split(5)]  # fmt: skip
    torch.testing.assert_close(sample(network, infer, (x,), 5, "batch"), torch.cat(pieces), atol=1e-5, rtol=1e-5)
    assert network.training
    assert norm.running_mean.tolist() == [1.0, 2.0, 3.0]
