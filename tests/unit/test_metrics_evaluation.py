"""An evaluation as a whole, on one rank: real images as samples, the cache, labels, records."""

import logging
import os

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.metrics import parse_metric
from bigsgan.data import build_dataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.codec import encode
from bigsgan.images.size import Size
from bigsgan.metrics import Evaluation, Features, Made, Replica
from bigsgan.metrics.evaluation import drawn_labels
from bigsgan.metrics.features import Seen
from bigsgan.metrics.moments import Moments, frechet_distance

DIGITS = Data(kind="digits", resolution=16, image_channels=1, num_classes=10)
NUM, WIDTH = 1797, 12


class Given(torch.nn.Module):
    """A feature network for torchmetrics that returns its input."""

    def __init__(self, width):
        super().__init__()
        self.num_features = width

    def forward(self, x):
        return x.double()


def random_features():
    """A fixed random projection of means over parts of an image; logits are the first of its features."""
    projection = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def look(images):
        features = F.adaptive_avg_pool2d(images.double() / 255, 4).flatten(1) @ projection
        return Seen(features, features[:, :5])

    return Features("random", "none", "0" * 16, torch.nn.Identity(), look, width=WIDTH, num_classes=5)


def evaluation(names, cache, data=DIGITS, batch=200, tell=lambda _: None):
    asked = [parse_metric(name, "--metrics") for name in names]
    return Evaluation(asked, random_features(), build_dataset(data), data, batch, cache, tell)


def real_images(first, labels):
    """The real digits in another order, as if they were samples."""
    order = Draws(seed=9).permutation("order", (), NUM)
    dataset = build_dataset(DIGITS)
    numbers = [order[(first + i) % NUM] for i in range(len(labels))]
    return Made(torch.stack([dataset[int(n)][0] for n in numbers]).float() / 127.5 - 1)


def values_of(found):
    return {name: value for measured in found for name, value in measured.values.items()}


@pytest.mark.slow
def test_real_images_as_samples_are_perfect(tmp_path):
    names = [f"{kind}{NUM}" for kind in ("fid", "kid", "pr", "dc", "labels")]
    asked = evaluation(names, tmp_path)
    found = values_of(asked.measure(real_images, Replica(0, 1)))
    assert found["fid1797"] == pytest.approx(0, abs=1e-6)
    assert found["pr1797_precision"] == found["pr1797_recall"] == found["dc1797_coverage"] == 1
    assert found["labels1797_js"] == pytest.approx(0, abs=1e-12)
    # The kernel of an image with itself stands in the mean between the sets, and not in the means within them.
    dataset = build_dataset(DIGITS)
    features = asked.features(torch.stack([dataset[i][0] for i in range(NUM)])).features.double()
    kernel = (features @ features.T / WIDTH + 1) ** 3
    expected = float(2 * (kernel.mean() - kernel.diagonal().mean()) / (NUM - 1))
    assert found["kid1797"] == pytest.approx(expected, rel=1e-5)


def test_fewer_samples_are_the_first_ones(tmp_path):
    asked = evaluation(["fid500", "fid300"], tmp_path)
    found = values_of(asked.measure(real_images, Replica(0, 1)))
    dataset = build_dataset(DIGITS)
    reals = Moments(WIDTH)
    reals.add(asked.features(torch.stack([dataset[i][0] for i in range(NUM)])).features)
    for num in (500, 300):
        fakes = Moments(WIDTH)
        fakes.add(asked.features(encode(real_images(0, torch.zeros(num)).images)).features)
        assert found[f"fid{num}"] == pytest.approx(frechet_distance(reals, fakes), rel=1e-9)


def test_class_distance_is_the_mean_over_classes(tmp_path):
    data = DIGITS.model_copy(update={"num_classes": 10})
    asked = evaluation(["cfid1000"], tmp_path, data)
    dataset = build_dataset(DIGITS)
    reals = torch.stack([dataset[i][0] for i in range(NUM)])
    classes = torch.tensor([dataset[i][1] for i in range(NUM)])

    def dimmed(first, labels):
        picks = [reals[classes == label][i % 150] for i, label in enumerate(labels.tolist())]
        return Made((torch.stack(picks).float() * 0.9) / 127.5 - 1)

    found = values_of(asked.measure(dimmed, Replica(0, 1)))
    labels = drawn_labels(0, 1000, torch.bincount(classes))
    images = torch.cat([dimmed(first, labels[first : first + 200]).images for first in range(0, 1000, 200)])
    expected = []
    for label in range(10):
        sides = Moments(WIDTH), Moments(WIDTH)
        sides[0].add(asked.features(reals[classes == label]).features)
        sides[1].add(asked.features(encode(images[labels == label])).features)
        expected.append(frechet_distance(*sides))
    assert found["cfid1000"] == pytest.approx(sum(expected) / 10, rel=1e-6)


@pytest.mark.slow
def test_real_images_are_looked_at_once(tmp_path):
    told = []
    first = values_of(evaluation(["fid500"], tmp_path, tell=told.append).measure(real_images, Replica(0, 1)))
    assert any(text.startswith("real image ") for text in told)
    told.clear()
    again = evaluation(["fid500"], tmp_path, tell=told.append)
    assert values_of(again.measure(real_images, Replica(0, 1))) == first
    assert values_of(again.measure(real_images, Replica(0, 1))) == first
    assert not any(text.startswith("real image ") for text in told)
    told.clear()
    with_rows = evaluation(["fid500", "kid500"], tmp_path, tell=told.append)  # rows were not kept
    kernel = values_of(with_rows.measure(real_images, Replica(0, 1)))["kid500"]
    assert any(text.startswith("real image ") for text in told)
    told.clear()
    fewer = evaluation(["kid500"], tmp_path, tell=told.append)
    assert values_of(fewer.measure(real_images, Replica(0, 1)))["kid500"] == kernel
    assert not any(text.startswith("real image ") for text in told)


@pytest.mark.parametrize("change", [{"resolution": Size(20, 20)}, {"num_classes": 0}])
def test_other_data_has_another_entry(tmp_path, change):
    data = DIGITS.model_copy(update=change)
    evaluation(["fid500"], tmp_path).measure(real_images, Replica(0, 1))
    told = []
    evaluation(["fid500"], tmp_path, data, tell=told.append).measure(real_images, Replica(0, 1))
    assert any(text.startswith("real image ") for text in told)


@pytest.mark.slow
def test_a_data_set_that_was_mended_has_another_entry(tmp_path):
    """It has as many images as before, and those whose pixels are hashed are the same."""
    for i in range(200):
        (tmp_path / f"data/{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), i).save(tmp_path / f"data/{i % 2}/{i:03d}.png")
    data = Data(kind="folder", root=str(tmp_path / "data"), resolution=8, image_channels=1, num_classes=2)
    evaluation(["fid500"], tmp_path, data).measure(real_images, Replica(0, 1))
    os.rename(tmp_path / "data/0/002.png", tmp_path / "data/0/mended.png")
    told = []
    evaluation(["fid500"], tmp_path, data, tell=told.append).measure(real_images, Replica(0, 1))
    assert any(text.startswith("real image ") for text in told)


def test_damaged_and_unwritable_caches_cost_time_alone(tmp_path, caplog):
    first = values_of(evaluation(["kid500"], tmp_path).measure(real_images, Replica(0, 1)))
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    assert values_of(evaluation(["kid500"], tmp_path).measure(real_images, Replica(0, 1))) == first
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        found = evaluation(["kid500"], blocked).measure(real_images, Replica(0, 1))
    assert values_of(found) == first
    assert "statistics of the real images cannot be cached" in caplog.text


def test_labels_are_as_frequent_as_in_the_data():
    counts = torch.tensor([100.0, 0.0, 300.0])
    labels = drawn_labels(0, 4000, counts)
    found = torch.bincount(labels, minlength=3)
    assert found[1] == 0
    assert float(found[2]) == pytest.approx(3000, abs=4 * (4000 * 0.75 * 0.25) ** 0.5)
    assert torch.equal(torch.cat([drawn_labels(0, 7, counts), drawn_labels(7, 3993, counts)]), labels)


def test_what_does_not_go_with_network_or_data(tmp_path):
    unlabelled = DIGITS.model_copy(update={"num_classes": 0})
    with pytest.raises(UserError, match="metrics: 'cfid500' needs data with one class for each image; use fid instead"):
        evaluation(["cfid500"], tmp_path, unlabelled)
    asked = evaluation(["fid500"], tmp_path)
    asked.features.num_classes = None
    with pytest.raises(UserError, match="needs class logits"):
        Evaluation([parse_metric("is500", "--metrics")], asked.features, build_dataset(DIGITS), DIGITS, 100, tmp_path)


@pytest.mark.parametrize("seen", [False, True], ids=["real images", "samples"])
def test_a_stopped_evaluation_gives_nothing(tmp_path, seen):
    asked, answers = evaluation(["fid1000"], tmp_path, batch=100), iter([False, False, True])
    if seen:
        asked._see_reals(lambda: False)
    assert asked.measure(real_images, Replica(0, 1), lambda: next(answers)) == []
    assert bool(list(tmp_path.iterdir())) == seen  # sums of some real images are not cached
    assert next(answers, "asked three times") == "asked three times"


def test_replicas_share_the_samples(tmp_path):
    """Two replicas, one of two ranks, played one after the other: together they look at each sample once."""
    looked_at = []
    for replica in (Replica(0, 2, 0, 2), Replica(0, 2, 1, 2), Replica(1, 2)):
        asked = evaluation(["fid250"], tmp_path, batch=60)
        see = asked.features.look

        def look(images, see=see):
            looked_at.append(images)
            return see(images)

        asked._see_reals(lambda: False)
        asked.features.look = look
        asked.measure(real_images, replica)
    seen = torch.cat(looked_at)[:, 0].flatten(1)
    expected = encode(real_images(0, torch.zeros(360)).images)[:, 0].flatten(1)  # 250 fill three rounds of two batches
    assert sorted(map(bytes, seen.numpy())) == sorted(map(bytes, expected.numpy()))
