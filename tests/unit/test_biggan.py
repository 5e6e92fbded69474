"""BigGAN against the published sizes, a count of its own, and the rules that every flat layer list keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config.data import Data
from bigsgan.config.families.biggan import BigGANDiscriminator, BigGANGenerator
from bigsgan.images.size import Size
from bigsgan.models import network as network_module
from bigsgan.models import spectral
from bigsgan.models.biggan import discriminator_layers, generator_layers
from bigsgan.models.build import build_network
from bigsgan.models.layers import Kept, SelfAttention, moving_state
from bigsgan.models.network import LayerStack, initialize
from tests.networks import D_MAPS, D_WIDTHS, G_MAPS, G_WIDTHS, RESOLUTIONS, attention_numel, carried, numel
from tests.tiny import tiny_recipe

META = torch.device("meta")


def generator(resolution: int, num_classes: int = 10, image_channels: int = 3, **section: Any) -> LayerStack:
    chunks = len(G_WIDTHS[resolution])
    config = BigGANGenerator(**{"channels": 8, "latent_size": 3 * chunks, "embedding_size": 6, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(generator_layers(config, Size.of(resolution), image_channels, num_classes))


def discriminator(resolution: int, num_classes: int = 10, image_channels: int = 3, **section: Any) -> LayerStack:
    config = BigGANDiscriminator(**{"channels": 8, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(discriminator_layers(config, Size.of(resolution), image_channels, num_classes))


def conv(in_channels: int, out_channels: int, kernel: int) -> int:
    return in_channels * out_channels * kernel**2 + out_channels


def generator_numel(
    resolution: int, ch: int, z: int, embedding: int, classes: int, colours: int, attention: list[int]
) -> int:
    widths = [ch * m for m in G_WIDTHS[resolution]]
    chunk = z // len(widths)
    total = max(classes, 1) * embedding + (chunk + 1) * 16 * widths[0]
    for i, (before, after) in enumerate(pairwise(widths)):
        total += 2 * (embedding + chunk) * (before + after)
        total += conv(before, after, 3) + conv(after, after, 3) + conv(before, after, 1)
        total += attention_numel(after) * (4 << (i + 1) in attention)
    return total + 2 * widths[-1] + conv(widths[-1], colours, 3)


def discriminator_numel(resolution: int, ch: int, classes: int, colours: int, attention: list[int]) -> int:
    widths = [colours, *(ch * m for m in D_WIDTHS[resolution])]
    num_halvings = 2 if resolution <= 32 else len(widths) - 2
    total, size = 0, resolution
    for i, (before, after) in enumerate(pairwise(widths)):
        total += conv(before, after, 3) + conv(after, after, 3)
        if i < num_halvings:
            size //= 2
            total += attention_numel(after) * (size in attention)
        if i < num_halvings or before != after:
            total += conv(before, after, 1)
    return total + widths[-1] + 1 + classes * widths[-1]


@pytest.mark.parametrize("resolution, z, g_millions, d_millions", [(128, 120, 70.43, 87.98), (256, 140, 82.24, 99.23)])
def test_published_sizes(resolution, z, g_millions, d_millions):
    sizes: dict[str, Any] = {"channels": 96, "attention": [64]}
    with META:
        g = generator(resolution, 1000, latent_size=z, embedding_size=128, **sizes)
        d = discriminator(resolution, 1000, **sizes)
    assert round(numel(g) / 1e6, 2) == g_millions
    assert round(numel(d) / 1e6, 2) == d_millions


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("num_classes, colours", [(0, 1), (10, 3)])
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_parameter_counts(resolution, num_classes, colours, attend):
    g_maps, d_maps = (G_MAPS[resolution], D_MAPS[resolution]) if attend else ([], [])
    z = 5 * len(G_WIDTHS[resolution])
    with META:
        g = generator(resolution, num_classes, colours, channels=16, latent_size=z, embedding_size=9, attention=g_maps)
        d = discriminator(resolution, num_classes, colours, channels=16, attention=d_maps)
    assert numel(g) == generator_numel(resolution, 16, z, 9, num_classes, colours, g_maps)
    assert numel(d) == discriminator_numel(resolution, 16, num_classes, colours, d_maps)
    assert sum(isinstance(m, SelfAttention) for m in g.modules()) == len(g_maps)
    assert sum(isinstance(m, SelfAttention) for m in d.modules()) == len(d_maps)


@pytest.mark.parametrize("num_classes", [0, 10])
@pytest.mark.parametrize("resolution", [32, *(pytest.param(r, marks=pytest.mark.slow) for r in RESOLUTIONS if r != 32)])
def test_every_float_in_the_carry_has_a_gradient_and_a_use(resolution, num_classes):
    g_maps, d_maps = G_MAPS[resolution], D_MAPS[resolution]
    with META:
        g, d = (
            generator(resolution, num_classes, attention=g_maps),
            discriminator(resolution, num_classes, attention=d_maps),
        )
        labels = torch.zeros(2, dtype=torch.int64)
        latents = torch.zeros(2, 3 * len(G_WIDTHS[resolution]))
        images = torch.zeros(2, 3, resolution, resolution)
    for network, inputs, shape in ((g, (latents, labels), images.shape), (d, (images, labels), (2,))):
        output, sent = carried(network, *inputs)
        assert output.shape == shape
        output.sum().backward()
        assert all(entry.grad is not None for entry in sent)


def layer_of(network: LayerStack, index: int) -> Any:
    return network.layers[str(index)]


def carry_sizes(network: LayerStack, *carry: Tensor) -> list[int]:
    sizes = []
    for layer in network.layers.values():
        carry = layer(*carry)
        sizes.append(len(carry))
    return sizes


def test_the_carry_drops_what_was_used_last():
    with META:
        labels = torch.zeros(2, dtype=torch.int64)
        g, d = generator(16, attention=[8, 16]), discriminator(16, attention=[8])
        # input, block, attention, block (the condition's last use), attention, output
        assert carry_sizes(g, torch.zeros(2, 9), labels) == [2, 2, 2, 1, 1, 1]
        # block, attention, block, block, head (the labels' last use)
        assert carry_sizes(d, torch.zeros(2, 3, 16, 16), labels) == [2, 2, 2, 2, 1]


def networks(resolution: int = 16, num_classes: int = 10) -> tuple[LayerStack, LayerStack]:
    g = generator(resolution, num_classes, attention=[8])
    d = discriminator(resolution, num_classes, attention=[8])
    for seed, network in enumerate((g, d)):
        initialize(network, seed)
        for module in network.modules():
            if isinstance(module, SelfAttention):
                module.gamma.data.fill_(0.5)
    return g, d


def inputs_of(resolution: int = 16, num: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3 * len(G_WIDTHS[resolution])), torch.arange(num)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_without_classes_labels_are_ignored_or_one_vector(network):
    g, d = networks(num_classes=0)
    latents, labels = inputs_of()
    if network == "generator":
        assert layer_of(g, 0).embedding.weight.shape == (1, 6)
        assert g(latents, torch.zeros_like(labels)).shape == (6, 3, 16, 16)
    else:
        images = torch.randn(6, 3, 16, 16)
        assert torch.equal(d(images, labels), d(images, torch.zeros_like(labels)))
        assert not any("embedding" in name for name, _ in d.named_parameters())


def test_flat_latents_reach_the_first_layer_alone():
    g = generator(16, hierarchical=False, latent_size=10)  # which the number of blocks need not divide
    initialize(g, 0)
    latents, labels = torch.randn(6, 10), torch.arange(6)
    first, condition = layer_of(g, 0)(latents, labels)
    assert_close(condition, layer_of(g, 0).embedding(labels))
    assert_close(first.flatten(1), layer_of(g, 0).linear(latents))


def test_weights_start_orthogonal_with_their_singular_vectors():
    g, d = networks()
    for network in (g, d):
        for layer in network.spectral_layers():
            matrix = layer.weight.detach().flatten(1)
            gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
            assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)
            assert_close(matrix @ layer.v, layer.u, rtol=0, atol=1e-5)
            assert_close(matrix.T @ layer.u, layer.v, rtol=0, atol=1e-5)
            assert_close(layer.u.norm(), torch.tensor(1.0))
            assert layer.bias is None or not layer.bias.any()
    embedding = layer_of(g, 0).embedding.weight.detach()
    assert_close(embedding.T @ embedding, torch.eye(6), rtol=0, atol=1e-5)


def test_power_iteration_starts_converged_where_the_weight_is_not_orthogonal():
    layer = layer_of(generator(16), 1).conv1
    matrix = torch.diag(torch.tensor([3.0] + [1.0] * 31)) @ torch.linalg.qr(torch.randn(288, 32))[0].T
    u = torch.ones(32)
    for _ in range(layer.initial_iterations):
        u, v = spectral.iterated(matrix, u, layer.eps)
    assert torch.dot(u, matrix @ v) == pytest.approx(3, rel=1e-5)


def state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def test_initialization_depends_on_seed_and_name_alone():
    g = generator(16)
    initialize(g, 3)
    first = state(g)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())
    torch.manual_seed(99)
    initialize(discriminator(16), 3)
    other = generator(16, num_classes=7, attention=[8])  # another network with many layers of the same name
    initialize(other, 3)
    again = generator(16)
    initialize(again, 3)
    assert all(torch.equal(first[name], tensor) for name, tensor in again.state_dict().items())
    assert torch.equal(state(other)["layers.1.conv1.weight"], first["layers.1.conv1.weight"])
    initialize(again, 4)
    weights = [name for name in first if name.endswith("weight") and first[name].dim() > 1]
    assert not any(torch.equal(first[name], again.state_dict()[name]) for name in weights)
    assert first["layers.1.conv1.weight"].shape == first["layers.1.conv2.weight"].shape
    assert not torch.equal(first["layers.1.conv1.weight"], first["layers.1.conv2.weight"])
    assert not torch.equal(first["layers.1.conv1.weight"], first["layers.2.conv1.weight"])


def test_initialization_gathers_each_modules_own_parameters():
    g, gathered, is_whole = generator(16), [], []

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        gathered.extend(parameters)
        is_whole.append(True)
        yield
        is_whole.pop()

    for parameter in g.parameters():
        parameter.data.fill_(7)
    initialize(g, 0, gather, writes=False)
    assert {id(p) for p in gathered} == {id(p) for p in g.parameters()}
    assert len(gathered) == len(list(g.parameters()))
    assert all((parameter == 7).all() for parameter in g.parameters())
    initialize(g, 0, gather)
    plain = generator(16)
    initialize(plain, 0)
    assert all(torch.equal(a, b) for a, b in zip(g.state_dict().values(), plain.state_dict().values(), strict=True))
    assert not is_whole


def test_a_checkpointed_layer_that_raises_leaves_nothing_open(monkeypatch):
    """Though an older torch leaves its contexts only when the exception, which holds the frame, is dropped."""
    left = []

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            assert Kept.open is left[-1]
            raise MemoryError

    def checkpoint(run: Any, *carry: Tensor, context_fn: Any, **others: Any) -> Any:
        left.append(context_fn()[0])
        left[-1].__enter__()
        return run(*carry)

    monkeypatch.setattr(network_module, "checkpoint", checkpoint)
    stack = LayerStack([Raises()], checkpointing=True)
    with pytest.raises(MemoryError):
        stack(torch.ones(1))
    assert Kept.open is None
    with Kept([], is_full=False) as other:
        left[-1].__exit__()
        assert Kept.open is other
    assert Kept.open is None


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_checkpointing_changes_nothing(network):
    found = []
    for checkpointing in (False, True):
        stack = networks()[network == "discriminator"]
        stack.checkpointing = checkpointing
        torch.manual_seed(1)
        inputs = inputs_of() if network == "generator" else (torch.randn(6, 3, 16, 16), torch.arange(6))
        for layer in stack.spectral_layers():
            layer.weight.data.normal_()
        before = state(stack)
        with moving_state(stack.stateful_layers(), True):
            output = stack(*inputs)
        moved = state(stack)
        (output * torch.randn_like(output)).sum().backward()
        after = state(stack)
        assert all(torch.equal(after[name], moved[name]) for name in after)  # not again in the recomputation
        assert not any(
            torch.equal(before[name], after[name]) for name, _ in stack.named_buffers() if before[name].numel() > 1
        )
        found.append((output, {name: p.grad for name, p in stack.named_parameters()}, after))
    assert_close(found[1], found[0], rtol=0, atol=0)
    assert all(grad is not None and grad.any() for name, grad in found[0][1].items() if name.endswith("weight"))


def test_the_recipe_decides_checkpointing_and_regularization(tmp_path):
    recipe = tiny_recipe(
        tmp_path, "objective.orthogonal.generator=1e-4", "engines.discriminator.activation_checkpointing=true"
    )
    g, d = build_network(recipe, "generator"), build_network(recipe, "discriminator")
    assert (g.checkpointing, d.checkpointing) == (False, True)
    assert {layer.orthogonal for layer in g.spectral_layers()} == {1e-4}
    assert {layer.orthogonal for layer in d.spectral_layers()} == {0.0}
