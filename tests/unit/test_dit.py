"""DiT against torch's own attention, norm and perceptron, and the terms of adversarial flow models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.adversarial.terms import GradientNormalization, Termed, build_terms, image_gradient
from bigsgan.adversarial.terms.own import Own
from bigsgan.adversarial.terms.term import images_read
from bigsgan.config.adversarial_weight import Normalize
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.monitor import Statistics
from tests.tiny import TINY_GAMES, awake, tiny_recipe

CPU = torch.device("cpu")
WIDTH, HEADS, PATCH, CHANNELS, HEIGHT, SIDE = 16, 2, 2, 3, 8, 12


def total(vector):
    """Of one rank."""
    return vector


def table(height, width):
    """Positions by the paper's formula: sines and cosines of each patch's column, and then of its row."""
    rows = []
    for row in range(height):
        for column in range(width):
            angles = [[place / 10_000 ** (i / 4) for i in range(4)] for place in (column, row)]
            parts = [torch.tensor(each) for each in angles]
            rows.append(torch.cat([part for each in parts for part in (each.sin(), each.cos())]))
    return torch.stack(rows)


def blocks_of(x, c, layers):
    """Blocks of torch's modules, with the weights of ours."""
    for layer in layers:
        norm = nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        with torch.no_grad():
            attention.in_proj_weight.copy_(layer.attention.qkv.weight)
            attention.in_proj_bias.copy_(layer.attention.qkv.bias)
            attention.out_proj.weight.copy_(layer.attention.out.weight)
            attention.out_proj.bias.copy_(layer.attention.out.bias)
        linear = layer.modulation.linear
        given = (F.linear(c * c.sigmoid(), linear.weight, linear.bias))[:, None].split(WIDTH, dim=2)
        h = norm(x) * (1 + given[1]) + given[0]
        x = x + given[2] * attention(h, h, h)[0]
        h = norm(x) * (1 + given[4]) + given[3]
        expand, contract = layer.perceptron.expand, layer.perceptron.contract
        h = nn.GELU("tanh")(F.linear(h, expand.weight, expand.bias))
        x = x + given[5] * F.linear(h, contract.weight, contract.bias)
    return x


def tokens_of(images, layer):
    """A convolution of patches, and positions."""
    kernel = layer.linear.weight.view(WIDTH, CHANNELS, PATCH, PATCH)
    found = F.conv2d(images, kernel, layer.linear.bias, stride=PATCH)
    return found.flatten(2).mT + table(HEIGHT // PATCH, SIDE // PATCH)


def built(tmp_path, network):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["dit"])
    with awake():
        made = build_network(recipe, network)
        initialize(made, 0)
    return made


def test_generator(tmp_path):
    network, z, labels = built(tmp_path, "generator"), torch.randn(5, 288), torch.tensor([0, 1, 2, 1, 0])
    first, *middle, last = network.layers.values()
    c = first.embedding.weight[labels]
    x = blocks_of(tokens_of(z.view(5, CHANNELS, HEIGHT, SIDE), first), c, middle)
    shift, scale = F.linear(c * c.sigmoid(), last.modulation.linear.weight, last.modulation.linear.bias).split(WIDTH, 1)
    x = F.linear(F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None], last.linear.weight)
    x = (x + last.linear.bias).view(5, HEIGHT // PATCH, SIDE // PATCH, PATCH, PATCH, CHANNELS)
    expected = torch.einsum("nhwpqc->nchpwq", x).reshape(5, CHANNELS, HEIGHT, SIDE)
    torch.testing.assert_close(network(z, labels), expected, rtol=1e-4, atol=1e-4)


def test_discriminator(tmp_path):
    network, images = built(tmp_path, "discriminator"), torch.randn(4, CHANNELS, HEIGHT, SIDE)
    labels = torch.tensor([2, 1, 0, 1])
    first, *middle, last = network.layers.values()
    x = torch.cat([first.token.expand(4, 1, WIDTH), tokens_of(images, first)], dim=1)
    x = blocks_of(x, first.embedding.weight[labels], middle)[:, 0]
    expected = (F.layer_norm(x, (WIDTH,), eps=1e-6) @ last.linear.weight[0],)
    torch.testing.assert_close((network(images, labels),), expected, rtol=1e-4, atol=1e-4)


def test_published_beginning(tmp_path):
    """Blocks begin as the identity, and images as 0; positions and patches do not."""
    network = build_network(tiny_recipe(tmp_path, *TINY_GAMES["dit"]), "generator")
    initialize(network, 0)
    assert not network(torch.randn(2, 288), torch.tensor([0, 1])).any()
    x, c = network.layers["0"](torch.randn(2, 288), torch.tensor([0, 1]))
    torch.testing.assert_close(network.layers["1"](x, c)[0], x)
    assert x.std() > 0.5


def test_transport(tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["dit"])
    statistics = Statistics(CPU)
    found = build_terms(recipe, recipe.objective, Termed(statistics, CPU, total), Own.of(recipe, CPU))
    (term,) = (each for each in found if each.name == "transport")
    images, latents = torch.randn(2, 3, 8, 12), torch.randn(2, 288)
    statistics.declare("loss/transport")
    read = images_read(images, (torch.zeros(2),), None, latents)
    for weights, weight in (({}, 0.2), ({"transport": 0.05}, 0.05)):
        term.begin_update(weights)
        expected = weight * 2 * (images - latents.view(2, 3, 8, 12)) / (2 * 288)
        torch.testing.assert_close(image_gradient([term], read, statistics), expected)


def test_an_adaptive_weight_may_compare_with_the_transport_cost(tmp_path):
    weight = "{adaptive: {parameter: 3.linear.weight}}"
    objective = f"objective={{loss: relativistic, transport: {{weight: 1}}, adversarial: {weight}}}"
    game = [*TINY_GAMES["dit"][:3], "statistics=every_update"]
    Own.of(tiny_recipe(tmp_path, *game, objective), CPU)
    with pytest.raises(UserError, match="needs a term of G's images in every update"):
        Own.of(tiny_recipe(tmp_path, *game, objective.replace("transport: {weight: 1}, ", "")), CPU)


def test_gradients_are_divided_by_their_moving_size():
    """Over two updates, each of two micro-batches of three samples, whose losses are means."""
    term = GradientNormalization(Normalize(decay=0.75), Statistics(CPU), CPU, total, total)
    average = 0.0
    for update in range(2):
        term.begin_update({"normalization": 0.5})
        parts = [torch.randn(3, 4, 5, 6), 10 * torch.randn(3, 4, 5, 6)]
        for index, grads in enumerate(parts):
            term.weigh(index, [grads / 3, torch.zeros(())])
        average = 0.75 * average + 0.25 * 120 * torch.cat(parts).square().sum() / 6
        for index, grads in enumerate(parts):
            rest = torch.randn(3, 4, 5, 6)
            found = term.weighted(index, torch.cat([grads / 3, rest], dim=1))
            torch.testing.assert_close(found, 0.5 * grads / 3 / average.sqrt() + rest)
        term.finish_update(update, True)
        torch.testing.assert_close(term.state()["average"], average.view(1))
    term.begin_update({"normalization": 1.0})
    term.weigh(0, [torch.full((1, 1, 1, 1), torch.inf), torch.zeros(())])
    term.finish_update(2, False)
    torch.testing.assert_close(term.state()["average"], average.view(1))


def test_an_overflow_of_their_size_skips_the_update():
    """Finite gradients with an infinite size would be divided by it, applied as 0, and so in all later updates."""
    term = GradientNormalization(Normalize(), Statistics(CPU), CPU, total, total)
    term.begin_update({"normalization": 1.0})
    grads = torch.full((2, 1, 4, 4), 1e25)
    term.weigh(0, [grads, torch.zeros(())])
    assert term.weighted(0, torch.cat([grads, grads], dim=1)).isnan().all()
    term.finish_update(0, False)
    assert term.state()["average"] == 0


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([*TINY_GAMES["dit"], "generator.latent_size=12"], "generator.latent_size: must be 288, the numbers of an"),
        (["objective.transport={weight: 1}"], "objective.transport: .* needs latents of 256 numbers"),
        ([*TINY_GAMES["dit"][:3], "objective={transport: {decay_nimg: 8}}"], "objective.transport.decay_nimg"),
        (["objective.adversarial={normalize: {}, adaptive: {parameter: x}}"], "objective.adversarial.normalize"),
        (["objective.adversarial.normalize.decay=0.5", "statistics=every_pass"], "statistics: must be every_update"),
        ([*TINY_GAMES["gat"][:2], "objective.transport={weight: 1}"], "objective.transport: must be null"),
    ],
)
def test_refusals(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        tiny_recipe(tmp_path, *overrides)
