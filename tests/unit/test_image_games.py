"""Games between images: two unpaired domains, what G reads and returns, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bigsgan import plugins
from bigsgan.adversarial import SampleDraws, build_source
from bigsgan.adversarial.image_pool import ImagePool
from bigsgan.adversarial.terms import FEATURES, GRADIENTS, IMAGES, LOGITS, image_gradient, images_read
from bigsgan.adversarial.terms.own import own_terms
from bigsgan.config import plan_run
from bigsgan.config.data_and_networks import READ_BY_TERMS
from bigsgan.data import LabelledImages, Slice, build_dataset, build_training_dataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.evaluate import _with_data
from bigsgan.models.outside_check import check_outside
from bigsgan.monitor import Statistics
from bigsgan.planner.phases import kept_images
from tests.cyclegan import game
from tests.image_games import AUTOENCODER, PAIRS
from tests.image_games import NAMES as GAMES
from tests.tiny import tiny_plan, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    own = [f"{__name__}:{name}" for name in ("Loses", "Totals", "Mixes", "of_input", "margin")]
    names = [f"tests.image_games:{name}" for name in GAMES]
    monkeypatch.setattr(plugins, "_given", {*own, *names})


@pytest.fixture
def domains(tmp_path):
    """Five red images and three blue ones, whose brightness is their number."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder, num, channel in zip(folders, (5, 3), (0, 2), strict=True):
        folder.mkdir()
        for i in range(num):
            pixels = np.zeros((16, 16, 3), np.uint8)
            pixels[..., channel] = 10 * (i + 1)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return folders


def numbers(dataset, index):
    """The numbers of the images that a sample joins; all else of it is black."""
    image, label = dataset[index]
    assert (image.shape, image.dtype, label) == ((6, 32, 32), torch.uint8, 0)
    assert image[[1, 2, 3, 4]].max() == 0
    return int(image[0, 0, 0]) // 10 - 1, int(image[5, 0, 0]) // 10 - 1


def test_two_domains_in_training(tmp_path, domains):
    """In 64 passes, each image of the first meets each of the second about equally often."""
    dataset = build_training_dataset(tiny_recipe(tmp_path, *game(*domains)).data)
    assert len(dataset) == 64 * 5
    met = np.zeros((5, 3))
    for index in range(len(dataset)):
        met[numbers(dataset, index)] += 1
    assert (met.sum(axis=1) == 64).all()
    assert (met > 64 / 3 - 4 * (64 * 2 / 9) ** 0.5).all()  # four standard deviations of a binomial


def test_two_domains_beside_training(tmp_path, domains):
    """Each image of the second is seen once, as metrics need it."""
    recipe = tiny_recipe(tmp_path, *game(*domains))
    dataset = build_dataset(recipe.data)
    assert [numbers(dataset, i) for i in range(len(dataset))] == [(0, 0), (1, 1), (2, 2)]
    before = dataset.fingerprint()
    (domains[1] / "2.png").rename(domains[1] / "3.png")
    assert build_dataset(recipe.data).fingerprint() != before
    assert (recipe.data.channels, recipe.judged_channels, recipe.input_channels, recipe.shown_channels) == (6, 6, 6, 3)


def test_both_networks_read_the_sample(tmp_path, domains):
    source = build_source(tiny_recipe(tmp_path, *game(*domains)), SampleDraws(Draws(0), CPU), range(1))
    batch = LabelledImages(torch.rand(2, 6, 16, 16), torch.zeros(2, dtype=torch.int64))
    slices = dict.fromkeys(("generator", "discriminator"), Slice(2, 1, 0, 1))
    inputs = source.inputs("discriminator", (0, 0), slices, lambda: [batch])
    for found in (inputs.generator(0), source.real(batch), (batch.images, *inputs.conditions(0))):
        assert len(found) == 2
        assert all(map(torch.equal, found, batch))


def test_a_pool_as_the_public_one():
    """One image at a time, with the same random numbers: whether to exchange, and with which."""

    class Given:
        def uniform(self, stream, counters, samples, shape):
            assert (stream, list(samples), shape) == ("pool", [1], (2,))
            return torch.tensor([[0.1, 0.9], [0.6, 0.7], [0.9, 0.2], [0.7, 1.0]])[[counters[0] % 4]]

    pool = ImagePool(2, Slice(2, 1, 1, 2), (1, 1, 1), Given(), CPU)
    shown = []
    for update in range(6):
        new = torch.full((1, 1, 1, 1), float(update))
        first = pool.shown((update, 0), 0, new)
        assert pool.shown((update, 0), 0, new) is first  # where D is differentiated before it trains
        shown.append(int(first))
        pool.finish_update(1)
    # 0 and 1 fill it; 2 takes the first's place, 3 the second's; 4 passes; 5 takes the second's, where 3 is
    assert shown == [0, 1, 0, 1, 4, 3]
    assert [float(part.values) for part in pool.parts()] == [2, 5]
    assert pool.numbers() == {"filled": 2, "batch": 2}


def test_a_pool_takes_no_infinite_images():
    """As fp16 makes them in an update that is skipped, whose images would come back and be saved."""

    class Given:
        def uniform(self, stream, counters, samples, shape):
            return torch.tensor([[0.9, 0.5], [0.9, 0.5]])

    pool = ImagePool(1, Slice(2, 1, 0, 1), (1, 1, 1), Given(), CPU)
    first = torch.tensor([1.0, float("nan")]).view(2, 1, 1, 1)
    assert pool.shown((0, 0), 0, first) is first
    pool.finish_update(1)
    shown = pool.shown((1, 0), 0, torch.tensor([float("inf"), 2.0]).view(2, 1, 1, 1))
    assert shown.flatten().tolist() == [float("inf"), 0.0]
    assert [part.values.tolist() for part in pool.parts()] == [[1.0, 2.0]]


def test_a_pool_is_memory_of_d(tmp_path, domains):
    plan = tiny_plan(tmp_path, 2, game(*domains, batch=8), {})
    assert kept_images(plan, SimpleNamespace(is_first=True)) == (2 + 1) * 4 * 6 * 32 * 32 * 4
    assert kept_images(plan, SimpleNamespace(is_first=False)) == 0


def of_input(images, input_images):
    """The mean square of a difference."""
    return (images - input_images).square().mean()


def test_a_term_of_images_reads_the_input(tmp_path):
    """Which is the real image, where the data has no pairs."""
    recipe = tiny_recipe(tmp_path, *AUTOENCODER[:2], OBJECTIVE.format(f"{{use: '{__name__}:of_input', weight: 3}}"))
    (term,) = own_terms(recipe, CPU)
    made, real, inputs = torch.rand(3, 2, 1, 16, 16)
    labels = torch.zeros(2)
    for conditions, other in (((labels,), real), ((labels, inputs), inputs)):
        found = image_gradient([term], images_read(made, conditions, real), Statistics(CPU))
        torch.testing.assert_close(found, 3 * 2 * (made - other) / made.numel())


OBJECTIVE = "objective={{l1: 3, reuse_fakes: true, terms: [{}]}}"


class Loses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)

    def forward(self, images, labels, seeds):
        return self.layer(images), images


class Totals(Loses):
    def forward(self, images, labels, seeds):
        return self.layer(images), images, images.sum()


class Mixes:
    """A term of outputs and of logits."""

    def __call__(self, code, fake_logits):
        return code.mean() * fake_logits.mean()


def replaced(game, overrides):
    """A game's overrides and others, in place of those of the same sections."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(each for each in game if each.partition("=")[0] not in keys), *overrides]


READS = f"generator={{family: '{__name__}:%s', reads: images, seeds: true, outputs: [code, classes]}}"


@pytest.mark.parametrize(
    "overrides, field, problem, remedy",
    [
        (["generator.outputs=[]"], "generator.family", "must return one tensor of floats", "name what comes after"),
        (["generator.outputs=[code]"], "generator.outputs", "must be the names of the 2 tensors that", "name each"),
        ([READS % "Loses"], "generator.outputs", "of the 1 tensor that", "name each"),
        ([READS % "Totals"], "generator.outputs", "must be an output of 4 samples, is of shape []", "an entry for"),
        (["generator.outputs=[code, code]"], "generator.outputs.1", "is the name of something", "a name of its own"),
        (["generator.outputs=[code, images]"], "generator.outputs.1", "is the name of something", "a name of its own"),
        (["generator.latent_size=8"], "generator.latent_size", "must be unset with generator.reads", "remove it"),
        (["generator.reads=latents"], "generator.latent_size", "must be given", "set reads=images"),
        (["discriminator.latents=true"], "discriminator.latents", "must be false with this generator", "remove it"),
        (["data.codec.kind=dct"], "data.codec.kind", "must be pixels with generator.reads=images", "remove it"),
        (["objective.reuse_fakes=false"], "objective.reuse_fakes", "must be true with a generator from", "=true"),
        (
            ["data.num_classes=10", OBJECTIVE.format("").replace("terms", "fake_labels: frequencies, terms")],
            "objective.fake_labels",
            "must be unset with a generator from images, whose labels are those of the images",
            "remove it",
        ),
        ([OBJECTIVE.format(f"{{use: '{__name__}:Mixes'}}")], "objective.terms.0.use", "must read outputs", "make two"),
        (["generator.outputs=[other, classes]"], "objective.terms.0.arguments.code", "must be given", "add it to"),
    ],
)
def test_what_is_refused(tmp_path, overrides, field, problem, remedy):
    def begin():
        recipe = tiny_recipe(tmp_path, *replaced(AUTOENCODER, overrides))
        check_outside(recipe, 2)
        own_terms(recipe, CPU)

    with pytest.raises(UserError) as caught:
        begin()
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "overrides, field, problem",
    [
        (["data.num_classes=2"], "data.num_classes", "must be 0 with data.kind=unpaired_folders"),
        (["data.input_root=null"], "data.input_root", "must be given with data.kind=unpaired_folders"),
        (["data.root=null"], "data.root", "must be given with data.kind=unpaired_folders"),
        (["generator={family: dcgan, latent_size: 8}"], "generator.family", "must be a family for images of two"),
        (["data.input_channels=1"], "objective.identity", "must be 0 where domains differ in channels"),
        (["objective.l1=1"], "objective.l1", "must be 0 with data.kind=unpaired_folders"),
        (["augmentation={kind: diffaugment}"], "augmentation", "must be null with pairs of images"),
        (["data.codec.kind=dct"], "data.codec.kind", "must be pixels with data.kind=unpaired_folders"),
        (["objective.schedule=overlapped"], "objective.schedule", "must be exact with a generator from images"),
    ],
)
def test_what_does_not_fit_two_domains(tmp_path, domains, overrides, field, problem):
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *replaced(game(*domains), overrides))
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize("which, empty", [(0, "data.input_root"), (1, "data.root")])
def test_an_empty_domain(tmp_path, domains, which, empty):
    for file in domains[which].iterdir():
        file.unlink()
    with pytest.raises(UserError, match=f"{empty}: .* contains no images"):
        build_training_dataset(tiny_recipe(tmp_path, *game(*domains)).data)


def margin(fake_logits, margin: float):
    """A term of D with an argument of an output's name."""
    return (fake_logits - margin).square().mean()


def test_outputs_are_not_of_ds_terms(tmp_path):
    own = f"{{use: '{__name__}:margin', network: discriminator, arguments: {{margin: 2.0}}}}"
    overrides = ["generator.outputs=[margin, classes]", OBJECTIVE.format(own)]
    (term,) = own_terms(tiny_recipe(tmp_path, *replaced(AUTOENCODER, overrides)), CPU)
    assert float(term.value(fake_logits=torch.tensor([1.0, 4.0]))) == (1 + 4) / 2


def test_names_that_outputs_cannot_have():
    assert set(READ_BY_TERMS) == {*IMAGES, *LOGITS, *GRADIENTS, FEATURES}


def test_the_shape_of_samples_is_the_runs(tmp_path, domains):
    """Data in another place, for metrics."""
    recipe = tiny_recipe(tmp_path, *game(*domains), "objective.identity=0")
    (tmp_path / "config.yaml").write_text(recipe.to_yaml())
    trained = SimpleNamespace(recipe=recipe)

    def told(*overrides):
        with pytest.raises(UserError) as caught:
            _with_data(trained, SimpleNamespace(run=tmp_path, overrides=overrides))
        return str(caught.value)

    assert told("data.input_channels=1").startswith("data.input_channels: must be 3, as in the run, got 1; remove it")
    changed = told("data={kind: folder, root: x, resolution: 32, image_channels: 3, num_classes: 0}")
    assert changed.startswith("generator.family: must be a family for images of one domain, got 'cyclegan'")


READS_LATENTS = ["data.num_classes=0", 'discriminator={family: "tests.image_games:judge", latents: true}']


@pytest.mark.parametrize("others", [PAIRS[:3], [], READS_LATENTS], ids=["pairs", "classes", "latents"])
def test_pools_are_of_images_alone(tmp_path, others):
    """Older images have other classes and inputs than those beside them."""
    with pytest.raises(UserError, match=r"objective.pool: must be 0 with pairs, classes or"):
        tiny_recipe(tmp_path, *others, "objective={reuse_fakes: true, pool: 5}")


def test_pairs_for_networks_from_outside(tmp_path):
    check_outside(tiny_recipe(tmp_path, *PAIRS), 2)
    with pytest.raises(UserError, match=r"generator.reads: must be unset with data.kind=synthetic_pairs"):
        tiny_recipe(tmp_path, *PAIRS, "generator.reads=images")
    assert plan_run(tiny_recipe(tmp_path, *PAIRS), 2).recipe.translates
