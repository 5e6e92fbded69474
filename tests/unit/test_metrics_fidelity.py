"""PSNR and SSIM against torchmetrics, and from generators that make images from images."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from bigsgan import plugins
from bigsgan.config import Recipe
from bigsgan.config.metrics import parse_metric
from bigsgan.data import build_dataset, readable_samples
from bigsgan.errors import UserError
from bigsgan.metrics import Evaluation, Replica
from bigsgan.metrics.features import no_features
from bigsgan.metrics.fidelity import psnr, ssim
from bigsgan.metrics.reals import each_real, order_of_images
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.models.quantizers import Quantizer
from bigsgan.training.measuring import each_once, open_lpips, records, samples_of
from bigsgan.training.sampling import translation_grid
from tests.cyclegan import game
from tests.image_games import AUTOENCODER, NAMES, PAIRS
from tests.perceptual import TinyFeatures, write_program
from tests.tiny import TINY_GAMES, tiny_recipe
from tests.unit.test_metrics_evaluation import values_of

CPU = torch.device("cpu")
GAMES = {"pairs": PAIRS, "autoencoder": AUTOENCODER}


@pytest.fixture(autouse=True)
def given(monkeypatch):
    names = {f"tests.image_games:{name}" for name in NAMES}
    monkeypatch.setattr(plugins, "_given", names)


def theirs(images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of each image, by torchmetrics. Its mean of the similarity is also over reflected borders."""
    images, targets = images.double(), targets.double()
    ratio = peak_signal_noise_ratio(images, targets, data_range=255.0, reduction="none", dim=(1, 2, 3))
    _, similarity = structural_similarity_index_measure(images, targets, data_range=255.0, return_full_image=True)
    return ratio, similarity[..., 5:-5, 5:-5].mean((1, 2, 3))


@pytest.mark.parametrize("shape", [(5, 1, 11, 11), (3, 3, 32, 32), (2, 3, 16, 40)])
def test_values_are_torchmetrics(shape):
    draws = torch.Generator().manual_seed(0)
    targets = (torch.rand(shape, generator=draws).cumsum(-1) * 12).to(torch.uint8)
    noise = torch.randn(shape, generator=draws) * torch.tensor([0.6, 4, 20, 60, 300])[: shape[0], None, None, None]
    images = (targets + noise).round().clamp(0, 255).to(torch.uint8)
    ratio, similarity = theirs(images, targets)
    assert ratio.max() - ratio.min() > 10
    torch.testing.assert_close(psnr(images, targets), ratio, rtol=1e-6, atol=0)
    torch.testing.assert_close(ssim(images, targets), similarity, rtol=1e-9, atol=1e-9)


def test_equal_images_have_the_ratio_of_the_nearest_others():
    targets = torch.randint(256, (2, 3, 12, 12), dtype=torch.uint8)
    images = targets.clone()
    images[0, 1, 2, 3] ^= 1
    near, equal = psnr(images, targets).tolist()
    assert near == equal == pytest.approx(10 * math.log10(255**2 * 3 * 12 * 12))
    assert ssim(images, targets)[0] < ssim(images, targets)[1] == 1


def measured(recipe: Recipe, names: list[str]) -> list:
    """What is measured of a generator that halves its input's contrast."""
    dataset, features = build_dataset(recipe.data), no_features()
    source = samples_of(recipe, nn.Identity(), lambda inputs, _: inputs[0] / 2, dataset, CPU, 0)
    asked = each_once([parse_metric(name, "--metrics") for name in names], recipe, dataset)
    features.lpips = open_lpips(asked, recipe)
    made = Evaluation(asked, features, dataset, recipe.data, 20, Path("unused"))
    return made.measure(source, Replica(0, 1))


@pytest.mark.parametrize("game", GAMES)
def test_images_meet_their_targets(tmp_path, game):
    """As bytes, and without a look at the real images' features, whose cache is no directory."""
    recipe = tiny_recipe(tmp_path, *GAMES[game])
    dataset = build_dataset(recipe.data)
    num = min(len(dataset), 70)
    samples = torch.stack([dataset[int(i)][0] for i in order_of_images(len(dataset))[:num]])
    images = ((samples[:, :3] / 127.5 - 1) / 2 * 127.5 + 127.5).round().to(torch.uint8)
    expected = [theirs(images[:each], samples[:each, -images.shape[1] :]) for each in (50, num)]
    found = measured(recipe, ["psnr70", "psnr50", "ssim70"])
    values = values_of(found)
    assert values["psnr50"] == pytest.approx(float(expected[0][0].mean()), rel=1e-6)
    assert values["psnr70"] == pytest.approx(float(expected[1][0].mean()), rel=1e-6)
    assert values["ssim70"] == pytest.approx(float(expected[1][1].mean()), rel=1e-9)
    assert [(each.num_real, each.num_fake) for each in found] == [(num, num), (50, 50), (num, num)]
    assert not {"features", "use"} & records(found, no_features(), {})[0].keys()


def test_a_generator_reads_the_labels_of_its_images(tmp_path):
    """In metrics, and in sample grids."""
    recipe = tiny_recipe(tmp_path, *AUTOENCODER[1:])
    dataset, labels = build_dataset(recipe.data), []
    indices = order_of_images(len(dataset))[:20]
    source = samples_of(recipe, nn.Identity(), lambda inputs, _: labels.append(inputs[1]) or inputs[0], dataset, CPU, 0)
    source(0, torch.zeros(20, dtype=torch.int64))
    assert labels[0].tolist() == [dataset[int(index)][1] for index in indices]
    images, shown = readable_samples(dataset, recipe.data, 5)
    grid = translation_grid(recipe, images, shown, CPU)
    assert grid.inputs[1].tolist() == [dataset[index * len(dataset) // 5][1] for index in range(5)]


def test_a_reconstruction_is_compared_with_all_real_images(tmp_path):
    """FID of more samples than the data has: every image is made again once, as for the published rFID."""
    recipe = tiny_recipe(tmp_path, *AUTOENCODER)
    dataset = build_dataset(recipe.data)
    (asked,) = each_once([parse_metric("fid50k", "--metrics")], recipe, dataset)
    assert (asked.name, asked.num) == ("fid50k", len(dataset))
    latents = tiny_recipe(tmp_path)
    assert each_once([parse_metric("fid50k", "--metrics")], latents, dataset)[0].num == 50_000


@pytest.mark.parametrize(
    "overrides, name, text",
    [
        ([], "psnr1k", r"'psnr1k' needs pairs of images, or generator.reads=images \(samples from latents"),
        (game("x", "y"), "ssim1k", r"'ssim1k' needs pairs .* \(unpaired images have no targets\); remove it"),
        ([*AUTOENCODER, "data.resolution=8"], "ssim1k", r"'ssim1k' needs images of at least 11 .* 8x8\); use psnr"),
    ],
    ids=["latents", "domains", "small"],
)
def test_what_has_no_targets(tmp_path, overrides, name, text):
    tiny_recipe(tmp_path, *overrides)
    with pytest.raises(UserError, match=f"^metrics.names: {text}"):
        tiny_recipe(tmp_path, *overrides, f"metrics={{names: [{name}], every_nimg: 64}}")


def test_perceptual_distances_of_images(tmp_path):
    """Of a program's features: the mean over images of the sum over layers, by hand."""
    program = write_program(tmp_path / "features.pt")
    recipe = tiny_recipe(tmp_path, *AUTOENCODER, f"objective.perceptual={{path: {program}}}")
    dataset = build_dataset(recipe.data)
    targets = torch.stack([dataset[int(i)][0] for i in order_of_images(len(dataset))[:70]]) / 127.5 - 1
    images = ((targets / 2 * 127.5 + 127.5).round() - 127.5) / 127.5
    expected = torch.zeros(70)
    for ours, theirs in zip(*(TinyFeatures()(each.expand(-1, 3, -1, -1)) for each in (images, targets)), strict=True):
        expected += (1 - F.cosine_similarity(ours, theirs)).mean((1, 2)) * 2  # of unit features
    found = {each.metric.name: each for each in measured(recipe, ["lpips70", "lpips50", "psnr70"])}
    assert found["lpips70"].values["lpips70"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert found["lpips50"].values["lpips50"] == pytest.approx(float(expected[:50].mean()), rel=1e-3)
    record, *_, other = records([found["lpips70"], found["psnr70"]], no_features(), {})
    assert record["lpips"] == str(program)
    assert record["lpips_sha256"] == hashlib.sha256(_digested(program)).hexdigest()[:16]
    assert "lpips" not in other


def _digested(path: Path) -> bytes:
    return path.stat().st_size.to_bytes(8, "little") + path.read_bytes()


@pytest.mark.parametrize("bottleneck", ["{kind: vq, num_codes: 16}", "{kind: fsq, levels: [2, 3]}"])
def test_the_use_of_codes(tmp_path, bottleneck):
    """Each image counts once, although the last batch goes beyond them; numbers are those of the quantized latents."""
    objective = "objective={l1: 3, reuse_fakes: true" + (", codebook: {}}" if "vq" in bottleneck else "}")
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["autoencoder"][:3], objective, f"generator.bottleneck={bottleneck}")
    network, dataset = build_network(recipe, "generator"), build_dataset(recipe.data)
    initialize(network, 0)
    (quantizer,) = (layer for layer in network.layers.values() if isinstance(layer, Quantizer))
    number = next(n for n, layer in network.layers.items() if layer is quantizer)
    reals = torch.stack([dataset[int(i)][0] for i in order_of_images(len(dataset))[:50]]) / 127.5 - 1
    quantized = network.part(0, int(number) + 1).fold(reals, torch.zeros(50))[0].detach()
    vectors, counts = quantized.mT.movedim(1, 3).flatten(0, 2).round(decimals=4).unique(dim=0, return_counts=True)

    source = samples_of(recipe, network, lambda inputs, _: network(*inputs).detach(), dataset, CPU, 0)
    asked = [parse_metric("codebook50", "--metrics")]
    found = Evaluation(asked, no_features(), dataset, recipe.data, 20, Path("unused")).measure(source, Replica(0, 1))
    values, num_codes = values_of(found), 16 if "vq" in bottleneck else 6
    assert 1 < len(vectors) <= num_codes
    assert values["codebook50_use"] == pytest.approx(len(vectors) / num_codes)
    expected = float(torch.distributions.Categorical(counts / counts.sum()).perplexity())
    assert values["codebook50_perplexity"] == pytest.approx(expected)
    assert quantizer.numbers is None


def test_metrics_that_need_more(tmp_path):
    for name, text in (
        ("lpips1k", r"'lpips1k' needs the network whose features it compares; give metrics.lpips.path"),
        ("codebook1k", r"'codebook1k' needs an autoencoder with codes \(.*\); remove it"),
    ):
        with pytest.raises(UserError, match=f"^metrics.names: {text}"):
            tiny_recipe(tmp_path, *AUTOENCODER, f"metrics={{names: [{name}], every_nimg: 64}}")


def test_the_first_images_are_made_from_the_first_real_ones(tmp_path):
    """So that metrics of fewer images than the data has compare images of the same kinds."""
    recipe = tiny_recipe(tmp_path, *AUTOENCODER)
    dataset = build_dataset(recipe.data)
    source = samples_of(recipe, nn.Identity(), lambda inputs, _: inputs[0], dataset, CPU, 0)
    ((reals, *_),) = each_real(dataset, recipe.data, 7, 7, lambda _: None, lambda: False)
    made = source(0, torch.zeros(7))
    assert torch.equal(made.images, reals / 127.5 - 1)
    assert torch.equal(made.targets, reals)
    assert not torch.equal(reals[0], dataset[0][0])
