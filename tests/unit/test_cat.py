"""CAT: published numbers of parameters, the networks written out by hand, and what its levels know of one another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from bigsgan.adversarial.terms import FunctionTerm, image_gradient
from bigsgan.adversarial.terms.consistency import consistency
from bigsgan.config import load_recipe, objective
from bigsgan.config.data import Data
from bigsgan.config.families.cat import CATDiscriminator, CATGenerator
from bigsgan.config.families.gat import GATDiscriminator, GATGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import cat, dual, gat
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.monitor import Statistics
from tests import REPOSITORY
from tests.levels import built
from tests.networks import numel

TINY = {"depth": 4, "width": 16, "heads": 2}


generator = partial(built, cat.generator_layers, CATGenerator)
discriminator = partial(built, cat.discriminator_layers, CATDiscriminator)


def drawn(network: LayerStack, seed: int) -> LayerStack:
    """With parameters of which each has a say, in float64."""
    initialize(network, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("bias", "embedding.weight", "tokens", "levels")) or parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return network.double()


def by_hand(depth: int, width: int, heads: int, shift: bool) -> int:
    """Parameters of G at patch 2 on latents 4x32x32 of 1,000 classes, as the public code of GAT counts its own."""
    inside = int(8 / 3 * width)
    block = 4 * width**2 + 4 * width + 2 * width // heads + 3 * width * inside + 2 * inside + width
    said = width * (width + 1)  # a scale, gate or shift
    mapping = 1000 * 64 + (128 + 1) * width + (width + 1) * width
    fixed_positions, no_input = 16 * 16 * width, (4 * 2 * 2 + 1) * width
    heads_of_levels = 4 * ((1 + shift) * said + 16 * (width + 1))
    return mapping + depth * (block + (4 + 2 * shift) * said) + heads_of_levels + fixed_positions + no_input


@pytest.mark.parametrize("size, shape, published", [("M", (24, 768, 12), 261e6), ("H", (32, 1280, 16), 960e6)])
def test_published_sizes_of_the_generator(size, shape, published):
    """The two numbers that are published; without shifts a model is a tenth smaller."""
    counts = {}
    for shift in (True, False):
        with torch.device("meta"):
            counts[shift] = numel(generator(32, 4, 1000, size=size, shift=shift))
        assert counts[shift] + (16 * 16 + 17) * shape[1] == by_hand(*shape, shift)
    assert by_hand(*shape, True) == pytest.approx(published, abs=0.5e6)
    assert by_hand(*shape, False) < 0.9 * published


def test_size_of_the_discriminator():
    width, inside, size = 768, 2048, 2048
    with torch.device("meta"):
        counted = numel(discriminator(32, 4, 1000, size="B"))
    block = 4 * width**2 + 4 * width + 2 * 64 + 3 * width * inside + 2 * inside + width + 4 * width
    head = width + (width + 1) * size + 1000 * size + 2 * (size + 1) * size
    assert counted == (4 * 2 * 2 + 1) * width + 2 * 4 * width + 12 * block + head


def rms(x: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


MAPPING = 0.01
"""What the weights of mapping layers are multiplied with."""


def linear(state: dict[str, Tensor], name: str, x: Tensor, multiplier: float = 1.0) -> Tensor:
    return x @ (multiplier * state[f"{name}.weight"]).T + multiplier * state[f"{name}.bias"]


def as_float32(x: Tensor) -> Tensor:
    """As tables are kept."""
    return x.float().double()


def turned(x: Tensor, side: int) -> Tensor:
    """Pairs of features as complex numbers, turned by rows in the first half and by columns in the second."""
    num = x.shape[-1] // 4
    rows, columns = torch.arange(side * side) // side, torch.arange(side * side) % side
    rates = torch.tensor([10_000.0 ** (-k / num) for k in range(num)], dtype=torch.float64)
    angles = torch.cat([rows[:, None] * rates, columns[:, None] * rates], dim=1)
    factors = torch.complex(as_float32(angles.cos()), as_float32(angles.sin()))
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * factors).flatten(-2)


def positions(width: int, side: int) -> Tensor:
    num = width // 4
    found = torch.empty(side * side, width, dtype=torch.float64)
    for place in range(side * side):
        for k in range(num):
            for part, at in enumerate((place % side, place // side)):
                angle = torch.tensor(at * 10_000.0 ** (-k / num), dtype=torch.float64)
                found[place, 2 * part * num + k] = angle.sin()
                found[place, (2 * part + 1) * num + k] = angle.cos()
    return as_float32(found)


def attention(state: dict[str, Tensor], name: str, x: Tensor, heads: int, side: int) -> Tensor:
    """Among the tokens of one image, of which the first is not a patch where there is one more."""
    width = x.shape[2] // heads
    query, key, value = linear(state, f"{name}.qkv", x).chunk(3, dim=2)
    mixed, epsilon = [], torch.finfo(torch.float32).eps
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        q = rms(query[..., own], epsilon) * state[f"{name}.query_norm.weight"]
        k = rms(key[..., own], epsilon) * state[f"{name}.key_norm.weight"]
        first = x.shape[1] - side**2
        q, k = (torch.cat([each[:, :first], turned(each[:, first:], side)], dim=1) for each in (q, k))
        scores = torch.einsum("nie,nje->nij", q, k) / width**0.5
        mixed.append(torch.einsum("nij,nje->nie", scores.exp() / scores.exp().sum(-1, keepdim=True), value[..., own]))
    return linear(state, f"{name}.out", torch.cat(mixed, dim=2))


def perceptron(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, value = linear(state, f"{name}.expand", x).chunk(2, dim=-1)
    return linear(state, f"{name}.contract", gate * torch.sigmoid(gate) * value)


def generated(state: dict[str, Tensor], z: Tensor, y: Tensor, side: int, patch: int, heads: int) -> Tensor:
    """G written out: four levels after one block each, with shifts."""
    embedded = state["layers.0.embedding.weight"][y]
    w = torch.cat([rms(embedded, 1e-8), rms(z, 1e-8)], dim=1)
    w = F.silu(linear(state, "layers.0.layers.first", w, MAPPING))
    w = linear(state, "layers.0.layers.second", w, MAPPING)
    width, patches = w.shape[1], side // patch
    x, images = positions(width, patches).expand(len(z), -1, -1), []
    for level in range(4):
        block, head = f"layers.{1 + 2 * level}", f"layers.{2 + 2 * level}"
        said = linear(state, f"{block}.modulation.linear", F.silu(w)).view(len(z), 6, 1, width).unbind(1)
        h = rms(x, 1e-6) * (1 + said[0]) + said[4]
        x = x + said[1] * attention(state, f"{block}.attention", h, heads, patches)
        h = rms(x, 1e-6) * (1 + said[2]) + said[5]
        x = x + said[3] * perceptron(state, f"{block}.perceptron", h)
        scale, shift = linear(state, f"{head}.modulation.linear", F.silu(w))[:, None].chunk(2, dim=2)
        tokens = linear(state, f"{head}.linear", rms(x, 1e-6) * (1 + scale) + shift)
        squares = tokens.view(len(z), patches, patches, patch, patch, -1)
        added = torch.einsum("nijpqc->ncipjq", squares).reshape(len(z), -1, side, side)
        images.append(images[-1] + added if images else added)
    return torch.cat(images, dim=1)


def read(state: dict[str, Tensor], images: Tensor, patch: int, heads: int, depth: int) -> list[Tensor]:
    """D's tokens written out: each of four levels goes alone through all blocks, a class token before its patches."""
    found, side = [], images.shape[-1]
    for level, image in enumerate(images.chunk(4, dim=1)):
        size = side // 2 ** (3 - level)
        small = F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)
        weight = state["layers.0.linear.weight"].view(-1, images.shape[1] // 4, patch, patch)
        x = F.conv2d(small, weight, state["layers.0.linear.bias"], stride=patch).flatten(2).transpose(1, 2)
        x = x + positions(x.shape[2], size // patch)
        x = torch.cat([state["layers.0.tokens"][level].expand(len(x), 1, -1), x], dim=1)
        x = x + state["layers.0.levels"][level]
        for i in range(1, depth + 1):
            h = rms(x, 1e-6) * state[f"layers.{i}.norm1.weight"]
            h = attention(state, f"layers.{i}.attention", h, heads, size // patch)
            x = x + h * state[f"layers.{i}.scale1.weight"]
            h = perceptron(state, f"layers.{i}.perceptron", rms(x, 1e-6) * state[f"layers.{i}.norm2.weight"])
            x = x + h * state[f"layers.{i}.scale2.weight"]
        found.append(x)
    return found


def judged(state: dict[str, Tensor], images: Tensor, y: Tensor, patch: int, heads: int, depth: int) -> Tensor:
    """D written out."""
    head, logits = f"layers.{depth + 1}", []
    of_class = state[f"{head}.embedding.weight"][y]
    of_class = F.silu(linear(state, f"{head}.mapping.first", of_class, MAPPING))
    of_class = linear(state, f"{head}.mapping.second", of_class, MAPPING)
    for x in read(state, images, patch, heads, depth):
        features = linear(state, f"{head}.linear", rms(x[:, 0], 1e-6) * state[f"{head}.norm.weight"])
        logits.append((features * of_class).sum(1))
    return torch.stack(logits, dim=1)


def predicted(state: dict[str, Tensor], images: Tensor, patch: int, heads: int, depth: int) -> Tensor:
    """A teacher's features, written out: of the class token, then of the patches of the image at its full size."""
    tokens, teacher = read(state, images, patch, heads, depth)[-1], f"layers.{depth + 1}.teacher"
    for name in ("first", "second"):
        tokens = F.silu(linear(state, f"{teacher}.{name}", tokens))
    return linear(state, f"{teacher}.third", tokens)


def taught(side: int, channels: int, **section: Any) -> LayerStack:
    """A discriminator of three classes with heads for a teacher's features."""
    layers = list(discriminator(side, channels, 3, **section).layers.values())
    teacher = objective.Teacher(path="dinov2.pt2", width=6, hidden=10)
    layers[-1].teacher = gat.TeacherHead(CATDiscriminator.model_validate(section), teacher)
    return LayerStack(layers)


def samples(num: int, channels: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(9)
    z = torch.randn(num, 6, generator=draw, dtype=torch.float64)
    images = torch.randn(num, 4 * channels, side, side, generator=draw, dtype=torch.float64)
    return z, torch.tensor([0, 2, 1])[:num], images


@pytest.mark.parametrize("patch", [1, 2])
def test_the_generator_is_the_one_written_out(patch):
    z, y, _ = samples(3, 3, 8)
    network = drawn(generator(8, 3, 3, **TINY, patch=patch, latent_size=6, embedding_size=5), 1)
    expected = generated(network.state_dict(), z, y, 8, patch, heads=2)
    assert_close(network(z, y), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("side, patch", [(8, 1), (16, 2)])
def test_the_discriminator_is_the_one_written_out(side, patch, exact):
    _, y, images = samples(3, 2, side)
    network = drawn(discriminator(side, 2, 3, **TINY, patch=patch, embedding_size=5), 2)
    for module in network.modules():
        if isinstance(module, cat.ScaleWiseAttention):
            module.exact = exact
    found, expected = (x.clone().requires_grad_() for x in (images, images))
    logits, written_out = network(found, y), judged(network.state_dict(), expected, y, patch, 2, 4)
    assert_close(logits, written_out, rtol=1e-10, atol=1e-10)
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)
    (logits @ weights).sum().backward(), (written_out @ weights).sum().backward()
    assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("side, patch", [(8, 1), (16, 2)])
def test_features_of_a_teacher_are_predicted_from_the_full_image(side, patch):
    """Of the reals alone, which are the first of both segments; its logits stay as they are."""
    _, y, images = samples(2, 2, side)
    images, y = torch.cat([images, images.flip(3)]), y.repeat(2)
    network = drawn(taught(side, 2, **TINY, patch=patch, embedding_size=5), 2)
    assert network.predicts
    found, expected = (x.clone().requires_grad_() for x in (images, images))
    logits, features = network.with_predictions(found, y, num=2, segments=2)
    written_out = predicted(network.state_dict(), expected[:2], patch, 2, 4)
    assert features.shape == (2, 1 + (side // patch) ** 2, 6)
    assert_close(features, written_out, rtol=1e-10, atol=1e-10)
    assert_close(logits, judged(network.state_dict(), images, y, patch, 2, 4), rtol=1e-10, atol=1e-10)
    (features**2).sum().backward(), (written_out**2).sum().backward()
    assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)
    assert (found.grad.abs().amax(dim=(2, 3)) > 0).tolist() == [[i >= 6 for i in range(8)]] * 2 + [[False] * 8] * 2


def test_passes_with_tangents_predict_the_same():
    """And the tangents of logits are those of a double backward."""
    _, y, images = samples(2, 2, 8)
    network = drawn(taught(8, 2, **TINY, patch=1, embedding_size=5), 2)
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    dual.load_rules()
    both, features = network.with_predictions_dual(dual.begin((images, y), direction), 2)
    logits, tangents = dual.end(both)
    expected, of_whole = network.with_predictions(images.requires_grad_(), y, num=2)
    assert_close((logits, features), (expected, of_whole), rtol=1e-10, atol=1e-10)
    (slope,) = torch.autograd.grad(expected.sum(), images)
    assert_close(tangents.sum(), (slope * direction).sum(), rtol=1e-9, atol=1e-9)


def test_heads_for_a_teacher_are_those_of_a_gat():
    section = {**TINY, "patch": 1}
    with_heads, without = taught(8, 1, **section), discriminator(8, 1, 3, **section)
    more = {name: tuple(p.shape) for name, p in with_heads.named_parameters() if ".teacher." in name}
    assert {*more} == {name for name, _ in with_heads.named_parameters()} - {n for n, _ in without.named_parameters()}
    layers = gat.discriminator_layers(GATDiscriminator.model_validate(TINY), Size.of(8), 1, 3)
    teacher = objective.Teacher(path="x", width=6, hidden=10)
    layers[-1].teacher = gat.TeacherHead(GATDiscriminator.model_validate(TINY), teacher)
    theirs = LayerStack(layers).named_parameters()
    assert more == {n.replace("layers.6.", "layers.5."): tuple(p.shape) for n, p in theirs if ".teacher." in n}
    assert more["layers.5.teacher.third.weight"] == (6, 10)


def test_a_logit_is_of_one_level():
    """And of no other, which block-diagonal attention is for."""
    _, y, images = samples(2, 1, 8)
    network = drawn(discriminator(8, 1, 3, **TINY, patch=1), 3)
    images.requires_grad_()
    for level in range(4):
        (grad,) = torch.autograd.grad(network(images, y)[:, level].sum(), images)
        moves = grad.abs().amax(dim=(0, 2, 3)) > 0
        assert moves.tolist() == [i == level for i in range(4)]


def test_without_shifts_the_generator_is_that_of_gat():
    """Of which test_gat.py shows that it is the published one."""
    z, y, _ = samples(3, 1, 8)
    section = {**TINY, "latent_size": 6}
    ours = drawn(generator(8, 1, 3, **section, shift=False), 4)
    theirs = LayerStack(gat.generator_layers(GATGenerator.model_validate(section), Size.of(8), 1, 3)).double()
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(z, y), theirs(z, y))


def test_without_classes():
    g, d = generator(16, 3, 0, **TINY), discriminator(16, 3, 0, **TINY)
    initialize(g, 0), initialize(d, 1)
    z, y = torch.randn(2, 64), torch.zeros(2, dtype=torch.int64)
    images = g(z, y)
    assert images.shape == (2, 12, 16, 16)
    assert d(images, y).shape == (2, 4)


def test_consistency_is_the_gradient_of_weighted_distances_to_the_last_image():
    images = torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    statistics = Statistics(torch.device("cpu"))
    statistics.declare("loss/consistency")
    h0, h1, h2, h3 = images.chunk(4, dim=1)
    loss = (F.mse_loss(h0, h3) / 3 + F.mse_loss(h1, h3) / 2 + F.mse_loss(h2, h3)) / 3
    (expected,) = torch.autograd.grad(0.1 * loss, images)
    term = FunctionTerm("consistency", "generator", 0.1, ("images",), partial(consistency, 4))
    assert_close(image_gradient([term], {"images": images}, statistics), expected)
    assert statistics.reduce(lambda sums: sums)["loss/consistency"] == pytest.approx(loss.item())


def test_sections_that_do_not_fit():
    with pytest.raises(UserError) as caught:
        CATDiscriminator(levels=4, patch=2).check(Data(resolution=24))
    found = str(caught.value)
    assert found.startswith("discriminator.levels: must be fewer with discriminator.patch=2 and images of 24x24")
    assert "these must be a multiple of 16" in found
    CATDiscriminator(levels=3, patch=2, depth=3).check(Data(resolution=24))
    with pytest.raises(UserError, match=r"generator\.depth: must be 24 with generator\.size=M, got 12"):
        CATGenerator(size="M", depth=12)


@pytest.mark.parametrize("name, epochs, depth", [("cat_m_imagenet256", 40, 24), ("cat_h_imagenet256", 60, 32)])
def test_recipes(name, epochs, depth):
    recipe = load_recipe(REPOSITORY / f"launch/recipes/{name}.yaml", [])
    assert recipe.total_nimg == pytest.approx(epochs * 1_281_167, abs=10_000)
    assert (recipe.generator.depth, recipe.discriminator.depth, recipe.discriminator.width) == (depth, 12, 768)
    assert recipe.objective.consistency == objective.Consistency(weight=0.1)
    assert (recipe.objective.r1.weight, recipe.objective.r2.weight) == (1, 1)


def test_a_recipe_with_a_teacher():
    """As docs/how-to/latents.md names one."""
    options = ["objective.teacher.path=data/dinov2_vitb14.pt2"]
    recipe = load_recipe(REPOSITORY / "launch/recipes/cat_m_imagenet256.yaml", options)
    assert recipe.objective.teacher == objective.Teacher(path="data/dinov2_vitb14.pt2", weight=1, width=768)
    with torch.device("meta"):
        more = {n: p for n, p in build_network(recipe, "discriminator").named_parameters() if ".teacher." in n}
    assert sum(p.numel() for p in more.values()) == (768 + 1) * 2048 + (2048 + 1) * 2048 + (2048 + 1) * 768
    assert all(name.startswith("layers.13.") for name in more)
