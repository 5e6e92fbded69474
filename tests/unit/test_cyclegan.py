"""CycleGAN: both networks, cycle and identity terms, grids, both directions of samples and metrics, and the digits.

Shapes: n samples, A and B channels of the images of each domain.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bigsgan.adversarial.terms.cycle import cycle_terms
from bigsgan.cli import main
from bigsgan.config import Recipe, plan_run
from bigsgan.config.metrics import parse_metric
from bigsgan.data import build_dataset, build_training_dataset
from bigsgan.errors import UserError
from bigsgan.images.codec import decode, encode
from bigsgan.metrics import Replica
from bigsgan.metrics.reference import Reference
from bigsgan.models.build import build_network, network_on_meta
from bigsgan.models.network import initialize
from bigsgan.training.measuring import evaluations, measured, records, samples_of
from bigsgan.training.sampling import shown, translation_grid
from tests.runs import make_run
from tests.tiny import TINY_GAMES, tiny_recipe
from tests.unit.test_metrics_evaluation import random_features

CPU = torch.device("cpu")
COLOURED = [
    TINY_GAMES["cyclegan"][0].replace("image_channels: 1", "image_channels: 3"),
    *TINY_GAMES["cyclegan"][1:],
    "objective.identity=0",
]
"""The tiny game from grey to colour, where a generator cannot read images of its target domain."""


def built(recipe: Recipe, network: str, seed: int = 0) -> nn.Module:
    stack = build_network(recipe, network)
    initialize(stack, seed)
    return stack


def test_the_networks_have_the_papers_parameters():
    """The numbers that the public project prints: 11.378 M and 2.765 M in each network of horse2zebra."""
    recipe = Recipe.read("cyclegan_horse2zebra")
    for network, each in (("generator", 11_378_179), ("discriminator", 2_764_737)):
        assert sum(p.numel() for p in network_on_meta(recipe, network).parameters()) == 2 * each


@pytest.mark.parametrize("architecture", ["resnet", "unet"])
def test_images_go_there_and_back(tmp_path, architecture):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["cyclegan"], f"generator.architecture={architecture}")
    g = built(recipe, "generator")
    both, labels = torch.randn(2, 2, 16, 16), torch.zeros(2, dtype=torch.int64)
    to_a, to_b = g.layers["0"].to_a, g.layers["0"].to_b
    a, b = both.split(1, dim=1)
    expected = [[to_a(b), to_b(a)], [to_a(to_b(a)), to_b(to_a(b))], [to_a(a), to_b(b)]]
    for found, parts in zip(g.fold(both, labels), expected, strict=True):
        torch.testing.assert_close(found, torch.cat(parts, dim=1))
    assert not torch.allclose(to_a(a), to_b(a))
    g.eval()
    (alone,) = g.fold(both, labels)
    torch.testing.assert_close(alone, torch.cat(expected[0], dim=1))


def test_what_no_term_reads_is_not_made(tmp_path):
    recipe = tiny_recipe(tmp_path, *COLOURED)
    assert recipe.outputs == ["again"]
    images, again = built(recipe, "generator").fold(torch.randn(2, 4, 16, 16), torch.zeros(2, dtype=torch.int64))
    assert images.shape == again.shape == (2, 4, 16, 16)


def test_each_pass_drops_other_features(tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["cyclegan"], "generator.dropout=true")
    g, same = built(recipe, "generator"), torch.randn(1, 1, 16, 16)
    g.layers["0"].to_a = g.layers["0"].to_b
    images, _, again = g.fold(torch.cat([same, same], 1), torch.zeros(1, dtype=torch.int64), torch.tensor([7]))
    made = [*images.unbind(1), *again.unbind(1)]
    assert min((made[i] - made[j]).abs().max() for i in range(4) for j in range(i)) > 1e-3


def test_each_discriminator_sees_its_domain(tmp_path):
    recipe = tiny_recipe(tmp_path, *COLOURED)
    d, images = built(recipe, "discriminator"), torch.randn(2, 4, 16, 16, requires_grad=True)
    logits = d(images, torch.zeros(2, dtype=torch.int64))
    last = d.layers[str(len(d.layers) - 1)]
    of_a, of_b = logits.split(last.map_sizes, dim=1)
    assert of_a.shape == of_b.shape == (2, 4)
    for part, channels, others in ((of_a, slice(0, 1), slice(1, 4)), (of_b, slice(1, 4), slice(0, 1))):
        (gradient,) = torch.autograd.grad(part.sum(), images, retain_graph=True)
        assert gradient[:, channels].abs().sum() > 0
        assert gradient[:, others].abs().sum() == 0


def test_terms_are_sums_of_means_over_each_domain(tmp_path):
    objective = tiny_recipe(tmp_path, *TINY_GAMES["cyclegan"]).objective
    read, made = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    cycle, identity = cycle_terms(objective, [1, 3])
    expected = (made[:, 0] - read[:, 0]).abs().mean() + (made[:, 1:] - read[:, 1:]).abs().mean()
    assert (cycle.factor, identity.factor) == (3, 2)
    torch.testing.assert_close(cycle.value(again=made, input_images=read), expected)
    torch.testing.assert_close(identity.value(same=made, input_images=read), expected)


def test_digits_of_two_domains(tmp_path):
    """Halves of the digits: the second drawn where pixels are neither black nor white. None has a counterpart."""
    data = tiny_recipe(tmp_path, *COLOURED).data
    digits = build_dataset(tiny_recipe(tmp_path).data).images.float() / 255
    dataset, training = build_dataset(data), build_training_dataset(data)
    assert (len(dataset), len(dataset.reversed), len(training) > 10 * 898) == (898, 899, True)
    sample, _ = dataset[5]
    assert torch.equal(sample[:1], (digits[10] * 255).to(torch.uint8))
    edge = 4 * digits[11] * (1 - digits[11])
    blue, yellow = (torch.tensor(colour)[:, None, None] for colour in ((0.1, 0.2, 0.5), (1, 0.9, 0.35)))
    assert (sample[1:].float() - 255 * (blue + edge * (yellow - blue))).abs().max() <= 0.51
    assert torch.equal(dataset.reversed[5][0], torch.cat([sample[1:], sample[:1]]))
    assert len({bytes(training[i * 899][0][1:].numpy()) for i in range(9)}) > 5  # one of a, with several of b


def test_a_grid_shows_both_circles(tmp_path):
    recipe = tiny_recipe(tmp_path, *COLOURED)
    samples = torch.randn(2, 4, 16, 16)
    grid = translation_grid(recipe, samples, torch.zeros(2, dtype=torch.int64), CPU)
    a, b = samples[:, :1].expand(-1, 3, -1, -1), samples[:, 1:]

    def infer(inputs, moving):
        """To colour by a negative; to grey by the mean of the half."""
        x = inputs[0]
        return torch.cat([x[:, 1:].mean(dim=1, keepdim=True) / 2, -x[:, :1].expand(-1, 3, -1, -1)], dim=1)

    shown_images = grid.frame(grid.makes(recipe, infer)(grid.inputs, False))
    grey = (b.mean(dim=1, keepdim=True) / 2).expand(-1, 3, -1, -1)
    expected = torch.stack([a, -a, -a / 2, b, grey, -grey], dim=1).flatten(0, 1)
    torch.testing.assert_close(shown_images, expected)
    assert grid.columns == 12


def test_a_directory_is_translated_in_either_direction(tmp_path):
    """At its images' own sizes, by the generator of that direction."""
    run, networks = make_run(tmp_path, *COLOURED)
    folders = {"a_to_b": tmp_path / "grey", "b_to_a": tmp_path / "colour"}
    for direction, folder in folders.items():
        folder.mkdir()
        source = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(source).convert("L" if direction == "a_to_b" else "RGB").save(folder / "x.png")
        out = tmp_path / direction
        arguments = ["sample", "--run", str(run), "--out", str(out), "--input", str(folder), "--files"]
        assert main([*arguments, *(["--direction", direction] if direction == "b_to_a" else [])]) == 0
        found = np.atleast_3d(np.asarray(Image.open(out / "x.png"))).astype(int)
        image = torch.from_numpy(np.atleast_3d(np.asarray(Image.open(folder / "x.png"))).copy()).permute(2, 0, 1)[None]
        translator = getattr(networks["average"].layers["0"], f"to_{direction[-1]}")
        with torch.no_grad():
            expected = ((translator(decode(image)) + 1) * 127.5).round()[0].permute(1, 2, 0).numpy()
        assert found.shape == expected.shape == (20, 24, 3 if direction == "a_to_b" else 1)
        assert np.abs(found - expected).max() <= 1


def test_both_directions_are_measured(tmp_path):
    """A generator that makes the other image of its sample has hardly a distance: an image comes twice, or never."""
    recipe, features = tiny_recipe(tmp_path, *TINY_GAMES["cyclegan"]), random_features()
    dataset, asked = build_dataset(recipe.data), [parse_metric("fid2k", "")]

    def values(infer):
        against = Reference(dataset), recipe.data
        sides = evaluations(asked, recipe, features, *against, 450, lambda _: None, range(1))
        found = measured(sides, recipe, nn.Identity(), partial(shown, recipe, infer), 0, Replica(0, 1))
        assert [(each.num_real, each.num_fake) for each in found] == [(898, 899), (899, 898)]
        assert [line["direction"] for line in records(found, features, {})] == ["a_to_b", "b_to_a"]
        return {name: value for each in found for name, value in each.values.items()}

    same = values(lambda inputs, _: inputs[0])
    assert same.keys() == {"fid2k_a_to_b", "fid2k_b_to_a"}
    assert max(map(abs, same.values())) < 1e-3
    black = values(lambda inputs, _: torch.cat([inputs[0][:, :1], -torch.ones_like(inputs[0][:, 1:])], dim=1))
    assert black["fid2k_a_to_b"] > 1
    assert abs(black["fid2k_b_to_a"]) < 1e-3


def test_metrics_translate_each_image_of_a_domain_once(tmp_path):
    """All 899 of a in one direction, and all 898 of b in the other, whatever the number of the other domain's."""
    recipe, features = tiny_recipe(tmp_path, *COLOURED), random_features()
    dataset = build_dataset(recipe.data)
    sides = evaluations([], recipe, features, Reference(dataset), recipe.data, 450, lambda _: None, range(1))
    for (direction, sources, _), own in zip(sides, (slice(0, 1), slice(1, 4)), strict=True):
        read = list[torch.Tensor]()

        def make(inputs, moving, read=read):
            read.append(inputs[0])
            return inputs[0]

        num = len(sources)
        source = samples_of(recipe, nn.Identity(), make, sources, CPU, 0, direction=direction)
        source(0, torch.zeros(num, dtype=torch.int64))
        domain = dataset.sources if direction == "a_to_b" else dataset.targets
        expected = sorted(image.numpy().tobytes() for image in domain)
        assert sorted(image.numpy().tobytes() for image in encode(read[0][:, own])) == expected


def test_the_best_checkpoint_may_be_chosen_by_a_direction(tmp_path):
    overrides = [*COLOURED, "metrics={names: [fid2k], every_nimg: 64}", "checkpoints.keep_best.metric=metrics/"]
    plan_run(tiny_recipe(tmp_path, *overrides[:-1], overrides[-1] + "fid2k_b_to_a"), 1)
    with pytest.raises(UserError, match=r"\(fid2k_a_to_b, fid2k_b_to_a\), got 'metrics/fid2k'"):
        plan_run(tiny_recipe(tmp_path, *overrides[:-1], overrides[-1] + "fid2k"), 1)


@pytest.mark.parametrize(
    "option, needed",
    [(["--direction", "b_to_a"], "needs two domains, and --input"), (["--files"], "needs a generator from latents")],
)
def test_options_that_do_not_fit(tmp_path, capsys, option, needed):
    run, _ = make_run(tmp_path, *COLOURED)
    assert main(["sample", "--run", str(run), "--out", str(Path(tmp_path, "x")), *option]) == 2
    assert f"{option[0]}: {needed}" in capsys.readouterr().err
