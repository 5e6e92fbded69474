"""FID against reference files: their statistics, their images, torchmetrics' and numpy's own, and what is refused."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch
import torch_fidelity
from torchmetrics.image.fid import FrechetInceptionDistance

from bigsgan.config.data import Data
from bigsgan.config.metrics import FeatureNetwork, parse_metric
from bigsgan.data import build_dataset
from bigsgan.errors import UserError
from bigsgan.images.codec import encode
from bigsgan.metrics import Evaluation, Made, Replica
from bigsgan.metrics.features import open_features
from bigsgan.metrics.reference import open_reference
from tests.unit.test_metrics_evaluation import DIGITS, WIDTH, Given, random_features, values_of
from tests.unit.test_metrics_features import random_weights as random_weights

NUM = 600


@pytest.fixture(scope="module")
def digits():
    """Images (N, R, R, C) and classes of the first digits."""
    dataset = build_dataset(DIGITS)
    images = torch.stack([dataset[i][0] for i in range(NUM)]).permute(0, 2, 3, 1).numpy()
    return images, np.array([dataset[i][1] for i in range(NUM)])


def features_of(images):
    """In float64, (N, D)."""
    return random_features()(torch.from_numpy(images).permute(0, 3, 1, 2)).features.double()


def statistics(images):
    """As numpy has them, under the names of reference files."""
    features = features_of(images).numpy()
    return {"mu": features.mean(0), "sigma": np.cov(features, rowvar=False)}


def noisy(first, labels):
    """Samples: the digits from 1000 on, darker; what is asked for is remembered."""
    dataset = build_dataset(DIGITS)
    ASKED.extend(labels.tolist())
    numbers = [1000 + (first + i) % 700 for i in range(len(labels))]
    return Made(torch.stack([dataset[i][0] for i in numbers]).float() / 127.5 * 0.8 - 1)


ASKED: list[int] = []


def measured(path, cache, names=(f"fid{NUM}",), data=DIGITS):
    asked = [parse_metric(name, "--metrics") for name in names]
    reference = open_reference(path, data, WIDTH, "--reference")
    ASKED.clear()
    made = Evaluation(asked, random_features(), reference, data.model_copy(update={"root": str(path)}), 100, cache)
    return values_of(made.measure(noisy, Replica(0, 1)))


@pytest.mark.slow
def test_statistics_images_and_torchmetrics_agree(tmp_path, digits):
    images, labels = digits
    np.savez(tmp_path / "images.npz", images, labels)
    np.savez(tmp_path / "mu.npz", **statistics(images))
    np.savez(tmp_path / "both.npz", arr_0=images[:100], **statistics(images))
    np.savez(tmp_path / "all.npz", arr_0=images[:100], mu_s=np.zeros(3), **statistics(images))
    by_name = {name: measured(tmp_path / f"{name}.npz", tmp_path)["fid600"] for name in ("images", "mu", "both", "all")}
    theirs = FrechetInceptionDistance(feature=Given(WIDTH), input_img_size=(WIDTH,))
    theirs.set_dtype(torch.float64)
    fakes = encode(noisy(0, torch.zeros(NUM)).images).permute(0, 2, 3, 1).numpy()
    for seen, real in ((images, True), (fakes, False)):
        theirs.update(features_of(seen), real=real)
    expected = float(theirs.compute())
    assert expected > 0.1
    for name, value in by_name.items():
        assert value == pytest.approx(expected, rel=1e-5), name


class Listed(torch.utils.data.Dataset):
    """Images (N, C, R, R) for torch-fidelity."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


@pytest.mark.slow
def test_metrics_by_inception_are_torch_fidelitys(tmp_path, random_weights):
    """Of the same images, and FID from statistics; with the network and the resizer of published numbers."""
    num, data = 30, Data(kind="synthetic", resolution=24, image_channels=3, num_classes=0)
    reals, fakes = torch.randint(0, 256, (2, num, 3, 24, 24), generator=torch.Generator().manual_seed(0)).byte()
    fakes = torch.cat([fakes[:15] * 0.7, reals[15:] * 0.98]).byte()  # half of them near real images
    theirs = torch_fidelity.calculate_metrics(
        input1=Listed(fakes),
        input2=Listed(reals),
        **dict.fromkeys(("fid", "isc", "kid", "prc"), True),
        **dict.fromkeys(("samples_shuffle", "cuda", "cache", "verbose"), False),
        kid_subsets=1,
        kid_subset_size=num,
        feature_layer_prc="2048",
        batch_size=10,
        feature_extractor="inception-v3-compat",  # precision and recall have another by default
        feature_extractor_weights_path=str(random_weights),
    )
    features = open_features(FeatureNetwork(network="inception", weights=str(random_weights)), data, tmp_path)
    seen = features(reals).features.double().numpy()
    images = reals.permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "images.npz", images)
    np.savez(tmp_path / "mu.npz", mu=seen.mean(0), sigma=np.cov(seen, rowvar=False))
    for name in ("images", "mu"):
        path = tmp_path / f"{name}.npz"
        kinds = ("fid", "kid", "is", "pr") if name == "images" else ("fid",)
        asked = [parse_metric(f"{kind}{num}", "--metrics") for kind in kinds]
        section = data.model_copy(update={"root": str(path)})
        reference = open_reference(path, data, features.width, "--reference")
        made = Evaluation(asked, features, reference, section, 10, tmp_path)

        def generate(first, labels):
            return Made(fakes[first : first + len(labels)].float() / 127.5 - 1)

        found = values_of(made.measure(generate, Replica(0, 1)))
        assert found[f"fid{num}"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3), name
        if name == "images":
            assert found[f"kid{num}"] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-3)
            assert found[f"is{num}"] == pytest.approx(theirs["inception_score_mean"], rel=1e-4)
            manifold = [found[f"pr{num}_{which}"] for which in ("precision", "recall")]
            assert min(manifold) > 0
            assert max(manifold) < 1
            assert manifold == pytest.approx([theirs["precision"], theirs["recall"]], abs=1e-6)


@pytest.mark.slow
def test_classes_are_those_of_the_file_or_all_alike(tmp_path, digits):
    images, _ = digits
    np.savez(tmp_path / "ones.npz", images, np.ones(NUM, np.int64))
    measured(tmp_path / "ones.npz", tmp_path)
    assert set(ASKED) == {1}
    for name, arrays in (("images", {"arr_0": images}), ("mu", statistics(images))):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        measured(tmp_path / f"{name}.npz", tmp_path)
        counts = np.bincount(ASKED, minlength=10)
        assert len(counts) == 10
        assert counts.min() > 30, counts


REFUSED = {
    "nothing": ({"x": np.zeros(3)}, "has neither arr_0 nor mu and sigma"),
    "mu alone": ({"mu": np.zeros(3)}, r"must have mu (D,) and sigma (D, D), got mu (3,) and sigma (0,)"),
    "NaN": ({"mu": np.array([0, np.nan]), "sigma": np.eye(2)}, "has mu or sigma with non-finite values"),
    "features of another network": ({"mu": np.zeros(2), "sigma": np.eye(2)}, f"must have statistics of {WIDTH}"),
    "lopsided": ({"mu": np.zeros(2), "sigma": np.array([[1.0, 0.5], [0.0, 1.0]])}, "has a sigma that is not symmetric"),
    "channels first": ({"arr_0": np.zeros((4, 1, 16, 16), np.uint8)}, "must have arr_0 (N, 16, 16, 1) uint8"),
    "no range": ({"arr_0": np.zeros((10, 16, 16, 1), np.float32)}, "must have arr_0 (N, 16, 16, 1) uint8, as the"),
    "few images": ({"arr_0": np.zeros((9, 16, 16, 1), np.uint8)}, "has 9 images, and metrics need at least 10"),
    "a class too much": (
        {"arr_0": np.zeros((4, 16, 16, 1), np.uint8), "arr_1": np.array([0, 1, 2, 10])},
        "must have classes 0 to 9 in arr_1, got 0 to 10",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_are_refused(tmp_path, name):
    arrays, message = REFUSED[name]
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError) as caught:
        open_reference(tmp_path / "a.npz", DIGITS, WIDTH, "--reference")
    assert str(caught.value).startswith(f"--reference: '{tmp_path / 'a.npz'}' {message}") or message in str(
        caught.value
    )
    assert caught.value.field == "--reference"


def test_other_keys_are_ignored_and_statistics_may_be_compressed(tmp_path, digits):
    images, expected = digits[0][:100], statistics(digits[0][:100])
    others = {"note": np.array([{}], dtype=object), "mu_s": np.zeros(3)}
    np.savez(tmp_path / "stored.npz", arr_0=images, **others)
    np.savez_compressed(tmp_path / "small.npz", **others, **expected)
    with zipfile.ZipFile(tmp_path / "stored.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("readme.txt", "nothing" * 100)
    assert np.array_equal(open_reference(tmp_path / "stored.npz", DIGITS, WIDTH, "--reference").images._images, images)
    found = open_reference(tmp_path / "small.npz", DIGITS, WIDTH, "--reference")
    assert found.images is None
    assert np.array_equal(found.gaussian.mean.numpy(), expected["mu"])
    assert np.array_equal(found.gaussian.covariance.numpy(), expected["sigma"])


RANGE = Data(kind="folder", root="x", num_classes=0, image_channels=4, resolution=16, range=[-10, 30])


def test_images_in_the_units_of_the_data(tmp_path):
    """As `bigsgan sample` writes them; values outside the range are black or white, and bytes are those of pixels."""
    images = np.random.default_rng(0).uniform(-12, 32, (10, 16, 16, 4)).astype(np.float32)
    np.savez(tmp_path / "units.npz", arr_0=images)
    found = open_reference(tmp_path / "units.npz", RANGE, WIDTH, "--reference").images
    expected = np.clip((images.astype(np.float64) + 10) / 20 - 1, -1, 1).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(torch.stack([image for image, _ in found]).numpy(), expected, atol=1e-7)
    pixels = encode(torch.from_numpy(expected)).permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "bytes.npz", arr_0=pixels)
    found = open_reference(tmp_path / "bytes.npz", RANGE, WIDTH, "--reference").images
    np.testing.assert_array_equal(torch.stack([image for image, _ in found]).permute(0, 2, 3, 1).numpy(), pixels)
    np.savez(tmp_path / "signed.npz", arr_0=images.astype(np.int16))
    with pytest.raises(UserError, match=r"uint8, or float in the units of data.range, as .* int16"):
        open_reference(tmp_path / "signed.npz", RANGE, WIDTH, "--reference")


def test_metrics_of_images_in_units_are_those_of_their_bytes(tmp_path, digits):
    """Both of a run with a range, which `evaluate --reference` opens."""
    images = digits[0][:100]
    np.savez(tmp_path / "bytes.npz", arr_0=images)
    np.savez(tmp_path / "units.npz", arr_0=(images / 255 * 40 - 10).astype(np.float32))
    data = DIGITS.model_copy(update={"range": [-10.0, 30.0], "num_classes": 0})
    found = [measured(tmp_path / name, tmp_path / name[0], ["fid100"], data) for name in ("bytes.npz", "units.npz")]
    assert found[0] == found[1]
    assert found[0]["fid100"] > 0


def test_statistics_larger_than_any_are_not_read(tmp_path):
    """A small file can say that it holds a lot."""
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (20_000, 20_000)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mu.npy", header.getvalue())
    with pytest.raises(UserError, match=r"mu.npy is larger than 1024 MiB, or has Python objects"):
        open_reference(tmp_path / "a.npz", DIGITS, WIDTH, "--reference")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.npz").write_text("nothing")
    for path in (tmp_path / "a.npz", tmp_path / "b.npz", tmp_path):
        with pytest.raises(
            UserError,
            match=r"--reference: must be an .npz file whose images are uncompressed: |--reference: '.*' must be",
        ):
            open_reference(path, DIGITS, WIDTH, "--reference")


def test_metrics_that_need_images_or_classes(tmp_path, digits):
    np.savez(tmp_path / "mu.npz", **statistics(digits[0]))
    np.savez(tmp_path / "images.npz", digits[0])
    with pytest.raises(UserError, match="metrics: 'kid100' needs real images, not their statistics; remove it"):
        measured(tmp_path / "mu.npz", tmp_path, ["fid100", "kid100"])
    with pytest.raises(UserError, match="metrics: 'cfid100' needs data with one class for each image; use fid instead"):
        measured(tmp_path / "images.npz", tmp_path, ["cfid100"])
    unlabelled = Data(kind="digits", resolution=16, num_classes=0)
    assert measured(tmp_path / "images.npz", tmp_path, ["fid100"], unlabelled)["fid100"] > 0
    found, alone, scores = (
        measured(tmp_path / f"{name}.npz", tmp_path, names)
        for name, names in (("mu", ["fid100", "is100"]), ("mu", ["fid100"]), ("images", ["is100"]))
    )
    assert found == alone | scores
