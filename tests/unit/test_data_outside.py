"""Data sets of the user's own code: every form of a sample, labels, fingerprints, and what is refused."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import plugins
from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset
from bigsgan.data.datasets import readable_images
from bigsgan.data.outside import OutsideImages
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage, image_tensor
from bigsgan.images.size import Fitting, Size

PIXELS = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3) * 20


class Samples(torch.utils.data.Dataset):
    """Gives what it is built with."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if isinstance(self.samples[index], BaseException):
            raise self.samples[index]
        return self.samples[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.fixture
def section(monkeypatch):
    """A function that returns the section of data that some code returns."""

    def make(build, **changes) -> Data:
        module = types.ModuleType("their")
        module.build = build
        monkeypatch.setitem(sys.modules, "their", module)
        monkeypatch.setattr(plugins, "_given", {"their:build"})
        given = {"kind": "their:build", "resolution": 2, "image_channels": 3, "num_classes": 0, "num_workers": 0}
        return Data(**{**given, **changes})

    return make


def test_pairs(section):
    """The input's channels come first, and both are fitted."""
    grey, wide = np.full((4, 4), 9, np.uint8), np.full((4, 4, 3), 7, np.uint8)
    data = section(lambda input_channels: Samples([(grey, wide)] * input_channels), pairs=True, input_channels=1)
    image, label = build_dataset(data)[0]
    assert (label, image.dtype) == (0, torch.uint8)
    assert image.tolist() == [[[number] * 2] * 2 for number in (9, 7, 7, 7)]


@pytest.mark.parametrize(
    "changes, sample, text",
    [
        ({}, PIXELS, "has a first sample that is no pair of images: it is of type ndarray, not a tuple of two"),
        ({}, (PIXELS, PIXELS, 0), "it is of type tuple, not a tuple of two"),
        ({}, (PIXELS, 3), "it is of type int; return two, each a PIL image"),
        ({"num_classes": 2}, (PIXELS, PIXELS), "data.num_classes: must be 0 with data.pairs=true"),
        ({"missing_labels": "accept", "condition_size": 4}, (PIXELS, PIXELS), "data.condition_size: must be unset"),
        ({"range": [0, 1]}, (PIXELS, PIXELS), "data.range: must be null with data.pairs=true"),
        ({"pairs": False, "input_channels": 1}, PIXELS, "data.input_channels: must be unset with data.pairs=false"),
        ({"kind": "digits", "image_channels": 1}, PIXELS, "remove it, set data.pairs=false, or choose a data.kind"),
    ],
)
def test_what_are_no_pairs(section, changes, sample, text):
    with pytest.raises(UserError) as caught:
        build_dataset(section(lambda: Samples([sample]), **{"pairs": True, **changes}))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "sample",
    [
        PIXELS,
        Image.fromarray(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        (PIXELS, 5),
        [PIXELS],
        (np.dstack([PIXELS, np.full((2, 2), 255, np.uint8)]), "a name"),
    ],
    ids=["array", "PIL", "tensor", "with a label", "list", "with alpha"],
)
def test_forms_of_a_sample(section, sample):
    image, label = build_dataset(section(lambda: Samples([sample])))[0]
    assert torch.equal(image, torch.from_numpy(PIXELS).permute(2, 0, 1))
    assert (image.dtype, label) == (torch.uint8, 0)


@pytest.mark.parametrize("form", [lambda a: a, torch.from_numpy, lambda a: a[:, :, None]], ids=["2D", "tensor", "3D"])
def test_another_size_is_cropped_and_resized_as_a_file_is(section, form):
    grey = np.random.default_rng(0).integers(0, 256, (9, 7), dtype=np.uint8)
    image, _ = build_dataset(section(lambda: Samples([form(grey)]), image_channels=1, resolution=4))[0]
    assert torch.equal(image, image_tensor(Image.fromarray(grey), "x", Fitting(Size.of(4)), 1))


@pytest.mark.parametrize("label", [3, np.int64(3), torch.tensor(3), torch.tensor([3])])
def test_labels_are_classes(section, label):
    assert build_dataset(section(lambda: Samples([(PIXELS, label)]), num_classes=4))[0][1] == 3


def test_what_the_signature_names_is_given(section):
    found = []

    def build(root, resolution, num_classes=9, *, deep):
        found.append((root, resolution, num_classes, deep))
        return Samples([(PIXELS, 1)])

    build_dataset(section(build, root="there", num_classes=2, arguments={"deep": [1]}))
    assert found == [("there", 2, 2, [1])]


@pytest.mark.parametrize(
    "build, changes, text",
    [
        (Stream, {}, "data.kind: must return a map-style data set, got 'their:build' .it returns Stream.; return a"),
        (lambda: Samples([KeyError("x")]), {}, r"data.kind: 'their:build' fails in __getitem__\(0\): KeyError: 'x'"),
        (lambda: Samples(["a"]), {}, "data.kind: .* first sample that is no image: it is of type str; return a PIL im"),
        (lambda: Samples([PIXELS / 255]), {}, r"it is float64 of shape \(2, 2, 3\) as \(H, W, C\); return a PIL"),
        (lambda: Samples([PIXELS]), {"num_classes": 2}, "data.num_classes: must be 0 .*of its first image, it has no"),
        (lambda: Samples([(PIXELS, 0.5)]), {"num_classes": 2}, "it has the label 0.5, which is not the number of a cl"),
        (lambda: Samples([(PIXELS, -1)]), {"num_classes": 2}, "must be 0 .*of its first image, it has the label -1,"),
        (lambda: Samples([(PIXELS, 2)]), {"num_classes": 2}, "data.num_classes: must be 3 with this data, got 2"),
        (lambda: Samples([PIXELS]), {"root": "x"}, "data.root: must be unset with data.kind=their:build, got 'x' .its"),
    ],
)
def test_what_is_refused(section, build, changes, text):
    with pytest.raises(UserError, match=text):
        build_dataset(section(build, **changes))


def test_a_sample_that_fails_counts_as_unreadable(section, caplog):
    samples = [PIXELS, ValueError("bad"), PIXELS / 2, PIXELS + 1, SystemExit(3)]
    dataset = build_dataset(section(lambda: Samples(samples)))
    for index, text in ((1, "image 1 of their:build: ValueError: bad"), (2, "it is float64"), (4, "SystemExit: 3")):
        with pytest.raises(CorruptImage, match=text):
            dataset[index]
    reals = RealImages(dataset, section(lambda: Samples(samples)), Draws(0), Slice(5, 1, 0, 1), torch.device("cpu"))
    (batch,) = reals.next_phase()
    assert {round(127.5 * (float(image[0, 0, 0]) + 1)) for image in batch.images} <= {0, 1}
    assert sum("skipped an unreadable image" in record.message for record in caplog.records) == 3


def test_a_negative_label_is_told_with_its_image(section):
    dataset = build_dataset(section(lambda: Samples([(PIXELS, 1), (PIXELS, -1)]), num_classes=2))
    with pytest.raises(CorruptImage, match="image 1 of their:build: it has the label -1, and classes count from 0"):
        dataset[1]


def test_code_without_a_root_is_told_by_its_name(section, caplog):
    data = section(lambda: Samples([PIXELS[:1]]))
    readable_images(build_dataset(data), data, 1)
    assert caplog.messages == ["their:build: of 1 image, 1 has other proportions: cropped to 2x2 (data.fit=crop)"]
    with pytest.raises(UserError, match=r"data\.kind: 'their:build' contains no readable images"):
        readable_images(OutsideImages(Samples([PIXELS / 2]), data, data.kind), data, 1)


def test_fingerprints_differ_with_what_there_is_one_of_for_each_image(section):
    def found(classes, num=2):
        source = Samples([PIXELS] * num)
        source.targets, source.about = classes, "x"
        return build_dataset(section(lambda: source)).fingerprint()

    assert found([0, 1]) == found([0, 1])
    assert found([0, 1]).difference(found([1, 1])) == "images of other names"
    assert found([0, 1]).difference(found([0, 1], num=3)) == "3 images"


class Jittered(Samples):
    def __getitem__(self, index):
        return torch.randint(0, 256, (3, 2, 2), dtype=torch.uint8) if index else super().__getitem__(index)


@pytest.mark.parametrize("kind, warns", [(Samples, False), (Jittered, True)])
def test_samples_that_change_are_named(section, caplog, kind, warns):
    build_dataset(section(lambda: kind([PIXELS, OSError("damaged"), PIXELS])))
    told = [each for each in caplog.messages if "another sample when one is read again" in each]
    assert len(told) == warns
