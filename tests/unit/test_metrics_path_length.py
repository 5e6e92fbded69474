"""Path length of a tiny StyleGAN2 against a loop written out, and of the command."""

import pytest
import torch

from bigsgan.draws import Draws
from bigsgan.metrics.features import Features, Seen
from bigsgan.metrics.path_length import EPSILON, path_length, trimmed_mean
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.runtime import comm
from bigsgan.training.sampling import generator_inputs, sampling_mode
from tests.tiny import TINY_GAMES, tiny_recipe


def look(images):
    return Seen(images.float().flatten(1)[:, ::3] / 100, None)


def test_path_length_is_its_definition(tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["stylegan2"])
    network = build_network(recipe, "generator").double()
    initialize(network, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    features = Features("thirds", "none", "0", torch.nn.Identity(), look)
    num, told = 30, []

    def inputs(first, n):
        labels = torch.arange(first, first + n) % max(recipe.data.num_classes, 1)
        latents, *rest = generator_inputs(recipe, Draws(3), "path", first, labels, None, torch.device("cpu"))
        return latents.double(), *rest

    with sampling_mode(network, "running"):
        found = path_length(network, torch.sin, inputs, features, num, 8, told.append)
        distances = []
        mapping, synthesis = network.layers["0"], network.part(1, len(network.layers))
        for first in range(0, num, 4):
            n = min(4, num - first)
            z, labels, seeds = inputs(2 * first, 2 * n)
            for i in range(n):
                ends = []
                with torch.no_grad():
                    for j in (i, n + i):
                        styles, *_ = mapping(z[j : j + 1], labels[i : i + 1], seeds[i : i + 1])
                        ends.append(styles)
                    near = ends[0] + (ends[1] - ends[0]) * EPSILON
                    a, b = (synthesis(w, seeds[i : i + 1]).sin() for w in (ends[0], near))
                pixels = [((image.float() + 1) * 127.5).flatten()[::3] / 100 for image in (a, b)]
                distances.append(float((pixels[0] - pixels[1]).square().sum()) / EPSILON**2)
    assert comm.world_size() == 1
    assert found > 0
    assert found == pytest.approx(trimmed_mean(torch.tensor(distances, dtype=torch.float64)), rel=1e-2)
    assert told[0] == f"path 0 of {num}"
