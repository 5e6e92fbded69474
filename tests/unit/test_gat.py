"""GAT: published sizes, what the public code computed from the same weights, and parts against their formulas."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan.config import load_recipe
from bigsgan.config.data import Data
from bigsgan.config.families.gat import GATDiscriminator, GATGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import gat, transformer
from bigsgan.models.network import LayerStack, initialize
from bigsgan.weights import gat as weights
from tests import REPOSITORY
from tests.levels import built
from tests.networks import numel, part
from tests.records import wide

RECORDS = Path(__file__).resolve().parents[1] / "data"
"""Weights, inputs, outputs and gradients of the networks of github.com/hse1032/GAT at widths of 8, 12 and 64.

``python -m tests.records.gat`` writes them, and those of test_gat_update.py and test_teacher.py.
"""


generator = partial(built, gat.generator_layers, GATGenerator)
discriminator = partial(built, gat.discriminator_layers, GATDiscriminator)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, width, published",
    [
        ("S", 384, (29_361_344, 32_654_464)),
        ("B", 768, (116_754_752, 97_331_968)),
        ("L", 1024, (408_748_576, 315_166_688)),
        ("XL", 1152, (602_251_136, 459_547_456)),
    ],
)
def test_published_sizes(size, width, published):
    """Of the public classes without a teacher's heads; they count fixed positions, and G's embedding of no input."""
    positions, no_input = 16 * 16 * width, (4 * 2 * 2 + 1) * width
    with torch.device("meta"):
        g, d = (make(32, 4, 1000, size=size) for make in (generator, discriminator))
    assert numel(g) + positions + no_input == published[0]
    assert numel(d) + positions == published[1]


def filled(network: LayerStack, state: dict[str, Tensor]) -> LayerStack:
    """With the recorded parameters, and our own tables."""
    initialize(network, 0)
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected
    assert {name.rpartition(".")[2] for name in missing} <= {"rotation", "table"}
    return network


def compare_gradients(network: LayerStack, expected: dict[str, Tensor]) -> None:
    """To 1e-5 of each one's norm, over the numbers that the record has."""
    found = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        kept = ~grad.isnan()
        assert grad[kept].norm() > 0, name
        assert (found[name] - grad)[kept].norm() <= 1e-5 * grad[kept].norm(), name


PATCHES = [("patch1", 1), ("patch2", 3), ("patch4", 1), ("patch8", 1)]


@pytest.mark.parametrize("name, channels", PATCHES)
def test_the_generator_is_the_published_one(name, channels):
    record = wide.read(RECORDS / f"gat_{name}.safetensors")
    section, data = weights.generator_section(part(record, "G.")), weights.data_section(part(record, "G."))
    assert (section["levels"], data["codec"]["channels"], data["num_classes"]) == (4, channels, 3)
    network = filled(
        generator(data["resolution"] // 8, channels, 3, **section), weights.generator_state(part(record, "G."))
    )
    made = network(record["z"], record["y"])
    assert_close(made, record["made"], rtol=1e-5, atol=1e-5)
    (made * record["direction"]).sum().backward()
    compare_gradients(network, weights.generator_state(part(record, "G_grad.")))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name, channels", PATCHES)
def test_the_discriminator_is_the_published_one(name, channels, exact):
    record = wide.read(RECORDS / f"gat_{name}.safetensors")
    section, images = weights.discriminator_section(part(record, "D.")), record["images"].requires_grad_()
    network = discriminator(images.shape[-1], channels, 3, **section)
    filled(network, weights.discriminator_state(part(record, "D.")))
    for module in network.modules():
        if isinstance(module, transformer.Attention):
            module.exact = exact
    logits = network.part(1, len(network.layers))(images, record["y"])  # behind the noise
    assert_close(logits, record["logits"], rtol=1e-5, atol=1e-4)
    logits.sum().backward()
    assert (images.grad - record["slope"]).norm() <= 1e-5 * record["slope"].norm()
    compare_gradients(network, weights.discriminator_state(part(record, "D_grad.")))


def test_weights_that_are_not_understood_are_refused():
    record = load_file(RECORDS / "gat_patch4.safetensors")
    state = part(record, "D.")
    heads = {f"proj.{i}.{kind}": torch.zeros(1) for i in (0, 2, 4) for kind in ("weight", "bias")}
    more = weights.discriminator_state({**state, **heads}).keys() - weights.discriminator_state(state).keys()
    assert {name.partition(".teacher.")[2] for name in more} == {
        f"{name}.{kind}" for name in ("first", "second", "third") for kind in ("weight", "bias")
    }
    with pytest.raises(UserError, match=r"GAT discriminator: proj\.scale is unknown"):
        weights.discriminator_state({**state, "proj.scale": torch.zeros(1)})
    with pytest.raises(UserError, match=r"GAT generator: final_layers\.0\.shift\.weight is unknown"):
        weights.generator_state({**part(record, "G."), "final_layers.0.shift.weight": torch.zeros(1)})
    with pytest.raises(UserError, match="it lacks blocks from 0 on"):
        weights.generator_state({n: v for n, v in part(record, "G.").items() if not n.startswith("blocks.0.")})


def test_noise_of_the_levels():
    """Level i keeps 1 - t_i of its image; noise has the standard deviation t_i, and that of i + 1 is a part of it."""
    config = GATDiscriminator(depth=4, width=16, heads=2)
    layer, num, shares = gat.LevelNoise(config), 40_000, [0.885, 0.76, 0.51, 0.01]
    for ours, published in zip(layer.shares, shares, strict=True):
        assert ours == pytest.approx(published, abs=1e-9)
    images, seeds = torch.zeros(num, 4, 2, 1), torch.arange(num)
    noise = layer(images, seeds, seeds)[0].flatten(2).transpose(0, 1).flatten(1)  # (levels, numbers)
    covariance = torch.cov(noise.double())
    for i, j in itertools.combinations_with_replacement(range(4), 2):  # j is as fine or finer
        expected = (1 - shares[i]) / (1 - shares[j]) * shares[j] ** 2
        spread = shares[i] * shares[j] * (2 / noise.shape[1]) ** 0.5
        assert covariance[i, j].item() == pytest.approx(expected, abs=5 * spread)
    constant = (
        layer(torch.ones(1, 8, 1, 1), seeds[:1], seeds[:1])[0] - layer(torch.zeros(1, 8, 1, 1), *[seeds[:1]] * 2)[0]
    )
    assert_close(constant.flatten(), torch.tensor([1 - t for t in shares for _ in range(2)]), rtol=1e-5, atol=1e-6)
    assert torch.equal(layer(images[5:9], seeds[5:9], seeds[5:9])[0], layer(images, seeds, seeds)[0][5:9])


def test_truncation_and_guidance():
    network = generator(8, 1, 5, depth=4, width=16, heads=2, patch=4, latent_size=6)
    initialize(network, 3)
    mapping: Any = network.layers["0"]
    z, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 3, 1])
    (w,) = mapping(z, y)
    mapping.truncation_psi = 0.0
    (means,) = mapping(z, y)
    assert torch.equal(means[1], means[2])  # of one class, whatever the latent
    others = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(1))
    mapping.truncation_psi = 1.0
    (drawn,) = mapping(others, torch.full((20_000,), 3))
    assert_close(means[1], drawn.mean(dim=0), rtol=0, atol=5 * drawn.std().item() / 256**0.5)
    mapping.truncation_psi = 0.7
    assert_close(mapping(z, y)[0], means + 0.7 * (w - means))
    mapping.truncation_psi, mapping.guidance = 1.0, 1.8
    of_classes = torch.stack([mapping._of(z, torch.full((4,), label)) for label in range(5)]).mean(dim=0)
    assert_close(mapping(z, y)[0], of_classes + 1.8 * (w - of_classes), rtol=1e-4, atol=1e-5)


def test_means_are_computed_once_and_in_parts(monkeypatch):
    """Truncation costs a class 256 rows however many samples it has, guidance no more rows at a time than a limit."""
    network, rows = generator(8, 1, 5, depth=4, width=16, heads=2, patch=4, latent_size=6), []
    initialize(network, 3)
    mapping: Any = network.layers["0"]
    z, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([3] * 38 + [1, 1])
    expected = {}
    for name in ("truncation_psi", "guidance"):
        setattr(mapping, name, 0.6)
        expected[name] = torch.cat([mapping(z[i : i + 1], y[i : i + 1])[0] for i in range(40)])
        setattr(mapping, name, 1.0)
    of = mapping._of
    monkeypatch.setattr(mapping, "_of", lambda latents, labels: rows.append(len(latents)) or of(latents, labels))
    for name, most, found in (("truncation_psi", 256, [40, 256, 256]), ("guidance", 60, [40, 60, 60, 60, 20])):
        monkeypatch.setattr(gat, "_MOST_ROWS", most)
        setattr(mapping, name, 0.6)
        assert_close(mapping(z, y)[0], expected[name], rtol=1e-4, atol=1e-5)
        assert rows == found
        setattr(mapping, name, 1.0)
        rows.clear()


def test_without_classes():
    g, d = generator(8, 3, 0, depth=4, width=16, heads=2), discriminator(8, 3, 0, depth=4, width=16, heads=2)
    initialize(g, 0), initialize(d, 1)
    z, y = torch.randn(2, 64), torch.zeros(2, dtype=torch.int64)
    images = g(z, y)
    assert images.shape == (2, 12, 8, 8)
    assert d(images, y, torch.arange(2)).shape == (2,)


def test_parts_of_a_network_give_what_the_whole_gives():
    g, z, y = generator(8, 1, 3, depth=8, width=16, heads=2), torch.randn(2, 64), torch.tensor([0, 2])
    initialize(g, 0)
    for cut in range(1, len(g.layers)):
        carry = g.part(0, cut).fold(z, y)
        assert all(entry.is_floating_point() and entry.requires_grad for entry in carry)
        assert torch.equal(g.part(cut, len(g.layers))(*carry), g(z, y))


def test_bf16_products_on_float32_weights():
    """Sums over blocks and logits stay float32; what products round is seen, and small."""
    y, seeds = torch.tensor([0, 2]), torch.arange(2)
    images, made = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), {}
    for bf16 in (False, True):
        network = discriminator(8, 1, 3, depth=4, width=32, heads=2, bf16=bf16)
        initialize(network, 0)
        x, _ = network.part(0, 4).fold(images, y, seeds)
        assert x.dtype == torch.float32
        made[bf16] = network(images, y, seeds), x
        assert made[bf16][0].dtype == torch.float32
    for rounded, exact in zip(made[True], made[False], strict=True):
        difference = (rounded - exact).norm() / exact.norm()
        assert 1e-4 < difference < 2e-2


@pytest.mark.parametrize("dtype, same", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_fused_attention_is_the_one_that_is_written_out(dtype, same):
    layer = transformer.Attention(32, 4, [Size(4, 4)], bf16=False)
    initialize(layer, 0)
    layer.to(dtype)
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = {}
    for layer.exact in (False, True):
        at = x.clone().requires_grad_()
        out = layer(at)
        (grad,) = torch.autograd.grad(out.float().square().sum(), at)
        found[layer.exact] = torch.cat([out.flatten(), grad.flatten()]).float()
    assert ((found[True] - found[False]).norm() / found[True].norm()).item() < same


BAD = {
    "patch": ({"patch": 8, "depth": 4}, Data(resolution=20), "generator.patch: must divide the sides of 20x20"),
    "width": ({"width": 100}, Data(), "generator.width: must be a multiple of 4 for each of the 12 heads, got 100"),
    "depth": ({"depth": 6}, Data(), r"generator.depth: must be a multiple of generator.levels \(4\), got 6"),
}


@pytest.mark.parametrize("name", BAD)
def test_sections_that_do_not_fit(name):
    section, data, message = BAD[name]
    with pytest.raises(UserError, match=message):
        GATGenerator.model_validate(section).check(data)


@pytest.mark.parametrize("noise", [{"min_info": 0.0}, {"min_info": 0.1, "noise_floor": 0.3}])
def test_levels_of_more_than_all_noise_are_refused(noise):
    with pytest.raises(UserError, match=r"discriminator.min_info: must be greater than 0, and at least noise_floor"):
        GATDiscriminator.model_validate(noise).check(Data())


def test_a_size_gives_what_is_not_given():
    section = GATGenerator(size="L")
    assert (section.depth, section.width, section.heads) == (24, 1024, 16)
    assert GATGenerator.model_validate(section.model_dump()) == section
    with pytest.raises(UserError, match=r"^generator\.depth: .*; set generator\.depth=24 generator\.heads=16, or"):
        GATGenerator(size="L", depth=12, width=1024, heads=32)


@pytest.mark.parametrize("size, problem", [({"S": 1}, "a single value"), ("M", "'S'")])
def test_a_size_that_is_none(size, problem):
    with pytest.raises(UserError, match=rf"generator\.size: must be {problem}"):
        load_recipe(REPOSITORY / "launch/recipes/gat_8b.yaml", [f"generator.size={json.dumps(size)}"])


def test_a_size_over_another():
    """What is said of a recipe with sizes of its own can be done on the command line."""
    path, asked = REPOSITORY / "launch/recipes/gat_8b.yaml", ["generator.size=XL", "discriminator.size=XL"]
    for network in ("generator", "discriminator"):
        with pytest.raises(UserError) as caught:
            load_recipe(path, asked)
        remedy = str(caught.value).partition("; set ")[2].partition(", or")[0].split()
        assert all(setting.startswith(f"{network}.") for setting in remedy)
        asked += remedy
    recipe = load_recipe(path, asked)
    assert (recipe.discriminator.depth, recipe.generator.width, recipe.generator.heads) == (28, 1152, 16)
