"""`bigsgan data prepare` with data.range: images of any channels and depth keep their values, in .npy files."""

from __future__ import annotations

import json
import shlex
import shutil
import tarfile
import zipfile
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import plugins
from bigsgan.cli import main
from bigsgan.config.data import Data
from bigsgan.config.origin import find_origin
from bigsgan.config.yaml_file import parse_override
from bigsgan.data import build_dataset, prepare
from bigsgan.errors import UserError
from bigsgan.images.size import Fitting, Size
from tests.preparing import samples
from tests.unit.test_wide import Own as Own
from tests.unit.test_wide import npy, png16, tiff

LOW, HIGH = -1000, 3000
CLASSES = ["bone", "skin"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers(dtype: str, number: int = 0, channels: int = 1, sides: tuple[int, int] = (18, 28)) -> np.ndarray:
    drawn = np.random.default_rng(number).uniform(LOW if dtype[0] != "u" else 0, HIGH, (*sides, channels))
    return drawn.astype(dtype)


# Of a suffix, the type of numbers, their channels, and what writes them.
WRITERS = {
    "float.tif": ("f4", 1, lambda x: tiff(x[:, :, 0])),
    "signed.tif": ("i2", 1, lambda x: tiff(x[:, :, 0])),
    "six.tif": ("u2", 6, lambda x: tiff(x, photometric="minisblack", planarconfig="contig")),
    "colour.png": ("u2", 3, png16),
    "double.npy": ("f8", 2, npy),
    "planar.npy": ("i4", 5, lambda x: npy(x.transpose(2, 0, 1))),
    "sixteen.npy": ("f2", 16, npy),
}


def write_source(kind: str, form: str) -> str:
    """Ten images of two classes."""
    dtype, channels, write = WRITERS[form]
    if kind == "tar":
        Path("source").mkdir()
        with tarfile.open("source/0.tar", "w") as archive:
            for number in range(10):
                for suffix, content in ((Path(form).suffix, write(numbers(dtype, number, channels))), (".cls", b"")):
                    content = b"%d" % (number % 2) if suffix == ".cls" else content
                    Path("x").write_bytes(content)
                    archive.add("x", f"{number}{suffix}")
        return "source"
    for number in range(10):
        path = Path("source", CLASSES[number % 2], f"{number}{Path(form).suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(numbers(dtype, number, channels)))
    return shutil.make_archive("source", "zip", "source") if kind == "zip" else "source"


def prepared(capsys, source: str, *words: str, format: str = "zip", size: str = "8") -> Data:
    """The section that the command prints."""
    command = ["data", "prepare", source, "made", "--resolution", size, "--format", format, "--workers", "1", *words]
    assert main(command) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data.kind="))
    return Data(**{keys[1]: value for keys, value in map(parse_override, shlex.split(line))})


def keys(source: str, channels: int, kind: str, **more) -> dict:
    section = {"kind": kind, "root": source, "image_channels": channels, "num_classes": 2, "range": [LOW, HIGH]}
    return {**section, "resolution": 8, **more}


CASES = [
    ("folder", "signed.tif", "zip"), ("folder", "six.tif", "tar"), ("zip", "colour.png", "folder"),
    ("tar", "planar.npy", "tar"), ("tar", "sixteen.npy", "zip"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, form, format, fit",
    [(*case, fit) for case, fit in zip(CASES, cycle(["crop", "pad", "stretch"]), strict=False)],
)
def test_what_is_made_holds_what_training_reads(kind, form, format, fit, capsys, small_parts):
    source = write_source(kind, form)
    for _ in range(2):  # the second time all is there
        data = prepared(capsys, source, f"data.range=[{LOW},{HIGH}]", "--fit", fit, format=format)
    assert (data.kind, data.range, data.num_classes) == (format, [LOW, HIGH], 2)
    assert data.image_channels == WRITERS[form][1]
    made = build_dataset(data)
    expected = build_dataset(Data(**keys(source, data.image_channels, kind, fit=fit)))
    wanted = samples(expected)
    if kind == "tar" and format != "tar":  # whose classes become folders, one after the other
        wanted.sort(key=lambda sample: sample[1])
    assert samples(made) == wanted
    assert made[0][0].dtype == torch.float32
    if kind != "tar":
        assert list(made.class_names) == CLASSES


@pytest.mark.parametrize("form", ["float.tif", "signed.tif", "double.npy"])
def test_values_are_those_of_the_source(form, capsys):
    """Which has the size already; numbers of 64 bits are rounded to float32."""
    dtype, channels, write = WRITERS[form]
    array = numbers(dtype, 0, channels, (8, 8))
    Path("source").mkdir()
    Path("source/x" + Path(form).suffix).write_bytes(write(array))
    prepared(capsys, "source", f"data.range=[{LOW},{HIGH}]", format="folder")
    found = np.load("made/00000000.npy")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array.astype(np.float32))


def test_values_are_reduced_by_the_filter_of_pictures(capsys):
    """Pillow's own resizing of the same numbers, in their units."""
    array = numbers("f4", 3, 1, (20, 32))
    Path("source").mkdir()
    np.save("source/x.npy", array)
    prepared(capsys, "source", f"data.range=[{LOW},{HIGH}]", format="folder")
    picture = Image.fromarray(array[:, :, 0]).crop((6, 0, 26, 20)).resize((8, 8), Image.Resampling.LANCZOS)
    np.testing.assert_allclose(np.load("made/00000000.npy")[:, :, 0], np.asarray(picture), atol=1e-3)


def test_the_last_line_has_the_keys(capsys):
    source = write_source("folder", "double.npy")
    command = ["data", "prepare", source, "made.zip", "--resolution", "8", "--format", "zip", "--workers", "1"]
    assert main([*command, "data.range=[-1000.5, 3e3]"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "data.kind=zip data.root=made.zip 'data.range=[-1000.5,3000]' data.resolution=8 data.image_channels=2 "
        "data.num_classes=2"
    )


def test_values_outside_the_range_are_clipped_and_told(capsys, caplog):
    Path("source").mkdir()
    for number in range(4):
        np.save(f"source/{number}.npy", np.full((8, 8), 1000 * number - 500, np.int16))
    data = prepared(capsys, "source", "data.range=[0,2000]", "data.num_classes=0", format="folder")
    assert caplog.messages == [
        "of 4 images, 2 have values outside data.range, from -500 to 2500, which become black or white"
    ]
    assert [float(np.load(f"made/0000000{number}.npy").max()) for number in range(4)] == [0, 500, 1500, 2000]
    assert [image[0][0, 0, 0].item() for image in build_dataset(data)] == [-1.0, -0.5, 0.5, 1.0]


def test_images_of_other_channels_are_skipped(capsys, caplog):
    Path("source").mkdir()
    np.save("source/a.npy", numbers("f4", 0, 3))
    np.save("source/b.npy", numbers("f4", 1, 2))
    np.save("source/c.npy", np.full((18, 28, 3), np.nan))
    with pytest.raises(UserError, match=r"^data\.image_channels: must be given for images of 2 and 3 channels; give"):
        prepare.prepare(origin("data.range=[-1000,3000]"), Path("made"), "folder", 1)
    assert not Path("made").exists()
    data = prepared(capsys, "source", "data.range=[-1000,3000]", "data.image_channels=3", format="folder")
    assert (data.image_channels, len(build_dataset(data))) == (3, 1)
    assert caplog.messages == [
        "skipped an unreadable image: source/b.npy: it has 2 channels, not 3, of shape (18, 28, 2)",
        "skipped an unreadable image: source/c.npy: it has numbers that are not finite",
        "2 unreadable images were skipped",
    ]


def origin(*words: str):
    return find_origin(Path("source"), Fitting(Size.of(8)), {}, words)


def test_pictures_of_8_bits_get_the_channels_that_are_given(capsys):
    Path("source").mkdir()
    grey = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(grey).save("source/a.png")
    Image.fromarray(np.stack([grey] * 3, 2)).save("source/b.png")
    prepared(capsys, "source", "data.range=[0,255]", "data.image_channels=1", format="folder")
    for number in range(2):
        np.testing.assert_array_equal(np.load(f"made/0000000{number}.npy")[:, :, 0], grey)


def test_vectors_of_labels_stay(capsys):
    source = write_source("folder", "float.tif")
    names = sorted(str(path.relative_to(source)) for path in Path(source).rglob("*.tif"))
    labels = {name: [float(number), number / 2] for number, name in enumerate(names)}
    Path("source/dataset.json").write_text(json.dumps({"labels": list(labels.items())}))
    words = [f"data.range=[{LOW},{HIGH}]", "data.condition_size=2", "data.num_classes=0"]
    data = prepared(capsys, source, *words, format="zip")
    np.testing.assert_array_equal(build_dataset(data).labels, np.array(list(labels.values()), np.float32))
    with zipfile.ZipFile("made") as archive:
        assert sorted(set(archive.namelist())) == [*(f"{number:08}.npy" for number in range(10)), "dataset.json"]


def test_arrays_without_a_range_are_told_of_it():
    write_source("folder", "double.npy")
    with pytest.raises(UserError, match=r"^SRC: 'source' contains no images \(10 other files .*\); set data\.range to"):
        prepare.prepare(origin(), Path("made"), "folder", 1)


def test_code_of_ones_own(capsys):
    plugins.give([f"{__name__}:Own"])
    source, words = f"{__name__}:Own", ["data.range=[0,10]", "data.num_classes=0"]
    made = build_dataset(prepared(capsys, source, *words, format="folder"))
    data = keys("x", 5, source, root=None, num_classes=0, range=[0, 10])
    assert samples(made) == samples(build_dataset(Data(**data)))
    assert made[0][0].shape == (5, 8, 8)


def test_ranges_are_not_encoded(capsys):
    write_source("folder", "float.tif")
    words = ["data", "encode", "source", "made", "--codec", "dct", "--resolution", "8", "data.range=[0,1]"]
    assert main(words) == 2
    assert "data.range: [0.0, 1.0] cannot be encoded (autoencoders take 8 bits)" in capsys.readouterr().err
