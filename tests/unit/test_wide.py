"""Images of any channels and depth: values of files and arrays reach the networks, and samples come back in them."""

import io
import logging
import re
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import bigsgan
from bigsgan import plugins
from bigsgan.cli import main
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset, readable_images
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.grids import image_grid
from bigsgan.images.reading import CorruptImage, open_image, upright
from bigsgan.images.wide import in_units, turned
from bigsgan.models.build import build_network, example_labels
from tests.archives import png, write_zip
from tests.networks import filled
from tests.runs import make_run
from tests.tiny import TINY_GAMES, tiny_recipe

SIDE = 8


def numbers(dtype, channels=1, low=0, high=4096, seed=0):
    drawn = np.random.default_rng(seed).uniform(low, high, (SIDE, SIDE, channels))
    return drawn.astype(dtype)


def png16(array: np.ndarray) -> bytes:
    """A PNG file of 16 bits, written by hand from the specification."""
    height, width, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tiff(array: np.ndarray, **more) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **more)
    return file.getvalue()


def png8(array: np.ndarray) -> bytes:
    return png(array.squeeze())


# Of a name, the numbers (H, W, C), the file, and the range.
FILES = {
    "grey16.png": (numbers("u2"), png16, [0, 4095]),
    "colour16.png": (numbers("u2", 3, 0, 65536), png16, [0, 65535]),
    "alpha16.png": (numbers("u2", 4, 0, 65536), png16, [0, 65535]),
    "grey8.png": (numbers("u1", 1, 0, 256), png8, [0, 255]),
    "rgba8.png": (numbers("u1", 4, 0, 256), png8, [0, 255]),
    "float.tif": (numbers("f4", 1, -3, 5), lambda x: tiff(x[:, :, 0]), [-3, 5]),
    "signed.tiff": (numbers("i2", 1, -1000, 3000), lambda x: tiff(x[:, :, 0]), [-1000, 3000]),
    "eight.tif": (numbers("u2", 8), lambda x: tiff(x, photometric="minisblack", planarconfig="contig"), [0, 4095]),
    "planes.tif": (numbers("f4", 6), lambda x: tiff(x.transpose(2, 0, 1), photometric="minisblack"), [0, 4096]),
    "array.npy": (numbers("f8", 2, -1, 1), npy, [-1, 1]),
    "planar.npy": (numbers("i4", 5, -9, 9), lambda x: npy(x.transpose(2, 0, 1)), [-9, 9]),
    "flat.npy": (numbers("f2", 1, 0, 1), lambda x: npy(x[:, :, 0]), [0, 1]),
}


def section(root: Path, channels: int, values, kind="folder", **more) -> Data:
    keys = {"resolution": SIDE, "num_classes": 0, "num_workers": 0, **more}
    return Data(kind=kind, root=str(root), image_channels=channels, range=values, **keys)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
@pytest.mark.parametrize("name", FILES)
def test_values_of_files(tmp_path, name, kind):
    if kind != "folder" and name not in ("eight.tif", "array.npy", "colour16.png"):
        pytest.skip("the same file in another place")
    array, write, (low, high) = FILES[name]
    root = tmp_path / "data"
    root.mkdir()
    (root / name).write_bytes(write(array))
    if kind == "zip":
        root = write_zip(tmp_path / "data.zip", {name: write(array)})
    if kind == "tar":
        with tarfile.open(tmp_path / "0.tar", "w") as archive:
            archive.add(root / name, name)
        root = tmp_path
    data = section(root, array.shape[2], [low, high], kind)
    image, _ = build_dataset(data)[0]
    expected = torch.from_numpy(array.astype(np.float64)).permute(2, 0, 1)
    expected = 2 * (expected - low) / (high - low) - 1
    torch.testing.assert_close(image.double(), expected, atol=1e-6, rtol=0)
    part = Slice(1, 1, 0, 1)
    reals = RealImages(build_dataset(data), data, Draws(0), part, torch.device("cpu"))
    torch.testing.assert_close(reals.next_phase()[0].images[0].double(), expected, atol=1e-6, rtol=0)


def test_an_image_fits_as_one_of_8_bits_does(tmp_path):
    """Cut, reduced and padded by the same filter; 8 bits are rounded once more."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    for fit in ("crop", "pad", "stretch"):
        keys = {"kind": "folder", "root": str(tmp_path), "resolution": [8, 16], "num_classes": 0, "fit": fit}
        narrow = build_dataset(Data(**keys, image_channels=3))[0][0].float() / 127.5 - 1
        wide = build_dataset(Data(**keys, image_channels=3, range=[0, 255]))[0][0]
        assert (wide - narrow).abs().max() < 2 / 127.5  # rounded once a side


def test_values_outside_the_range_are_clipped_and_told(tmp_path, caplog):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full((SIDE, SIDE), 1000 * number - 500, np.float32))
    data = section(tmp_path, 1, [0, 2000])
    with caplog.at_level(logging.WARNING, "bigsgan"):
        images = readable_images(build_dataset(data), data, 4)
    assert images[:, 0, 0, 0].tolist() == [-1.0, -0.5, 0.5, 1.0]
    assert caplog.messages == [
        f"{tmp_path}: of 4 images, 2 have values outside data.range, from -500 to 2500, which become black or white"
    ]


@pytest.mark.parametrize("values", [None, [0, 255]])
def test_images_of_other_proportions_are_told(tmp_path, caplog, values):
    for number, (width, height) in enumerate([(16, 8), (32, 16), (17, 8), (8, 8)]):
        Image.new("L", (width, height)).save(tmp_path / f"{number}.png")
    keys = {"kind": "folder", "root": str(tmp_path), "resolution": [8, 16], "image_channels": 1, "num_classes": 0}
    for fit, done in (("crop", "cropped"), ("pad", "padded with black"), ("stretch", "stretched")):
        data = Data(**keys, fit=fit, range=values)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "bigsgan"):
            readable_images(build_dataset(data), data, 4)
        assert caplog.messages == [
            f"{tmp_path}: of 4 images, 2 have other proportions: {done} to 8x16 (data.fit={fit})"
        ]


def test_values_of_16_bits_are_counted_once(tmp_path, caplog):
    for number in range(4):
        Image.fromarray(np.full((SIDE, SIDE), 200 * number, np.uint16)).save(tmp_path / f"{number}.png")
    data = section(tmp_path, 1, [0, 500])
    with caplog.at_level(logging.WARNING, "bigsgan"):
        readable_images(build_dataset(data), data, 4)
    assert caplog.messages == [
        f"{tmp_path}: of 4 images, 1 has values outside data.range, from 600 to 600, which become black or white"
    ]


UNREADABLE = {
    "it has 2 channels, not 3, of shape (8, 8, 2)": npy(numbers("f4", 2)),
    "it has numbers that are not finite": npy(np.full((SIDE, SIDE, 3), np.nan)),
    "it is complex128 of shape (8, 8, 3), and no image": npy(np.zeros((SIDE, SIDE, 3), complex)),
    "it is float64 of shape (8,), and no image": npy(np.zeros(SIDE)),
    "it is cut off, or has Python objects": npy(numbers("f4", 3))[:-4],
    "magic string": b"no array at all, but as long as a header",
}


@pytest.mark.parametrize("problem", UNREADABLE)
def test_what_is_no_image_is_counted(tmp_path, problem):
    (tmp_path / "x.npy").write_bytes(UNREADABLE[problem])
    with pytest.raises(CorruptImage, match=re.escape(problem)):
        build_dataset(section(tmp_path, 3, [0, 1]))[0]


@pytest.mark.parametrize("damage", range(6))
def test_a_damaged_png_of_16_bits_is_counted(tmp_path, damage):
    """libpng, which torchvision uses, would end the process."""
    content = bytearray(png16(numbers("u2", 3)))
    place = content.index(b"IDAT") + 4
    if damage < 4:
        content[place + 7 * damage + 2] ^= 0xFF
    else:
        content = content[: place + 10] if damage == 4 else content[:place] + bytes(len(content) - place)
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(CorruptImage):
        build_dataset(section(tmp_path, 3, [0, 4095]))[0]


@pytest.mark.parametrize("given", range(1, 9))
def test_arrays_are_turned_upright_as_pictures_are(tmp_path, given):
    pixels = np.arange(6 * 4, dtype=np.uint8).reshape(6, 4)
    exif = Image.Exif()
    exif[0x0112] = given
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    expected = np.array(upright(open_image(str(tmp_path / "x.png"))))
    np.testing.assert_array_equal(turned(pixels, given), expected)
    (tmp_path / "x.png").unlink()
    wide = pixels.astype("u2") * 100
    (tmp_path / "x.tif").write_bytes(tiff(wide, extratags=[(274, "H", 1, given, False)]))
    data = Data(kind="folder", root=str(tmp_path), num_classes=0, range=[0, 2550], resolution=list(expected.shape))
    found = build_dataset(data)[0][0][0]
    torch.testing.assert_close((found + 1) * 12.75, torch.from_numpy(expected).float(), atol=1e-3, rtol=0)


def test_pictures_of_8_bits_are_converted(tmp_path):
    """As without a range; 4 channels are those of RGBA."""
    palette = Image.fromarray(numbers("u1", 3, 0, 256)).quantize(4)
    palette.save(tmp_path / "x.png")
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA"), (2, "LA")):
        expected = np.array(palette.convert("RGB").convert(mode)).reshape(SIDE, SIDE, channels)
        image = build_dataset(section(tmp_path, channels, [0, 255]))[0][0]
        np.testing.assert_allclose((image.permute(1, 2, 0) + 1) * 127.5, expected, atol=1e-3)


def test_files_whose_values_another_reader_scales_are_refused(tmp_path):
    (tmp_path / "x.pgm").write_bytes(b"P5 2 2 4095\n" + np.arange(4, dtype=">u2").tobytes())
    with pytest.raises(CorruptImage, match=r"more than 8 bits are read from PNG, TIFF and \.npy files alone"):
        build_dataset(section(tmp_path, 1, [0, 4095]))[0]
    (tmp_path / "x.pgm").unlink()
    (tmp_path / "x.tif").write_bytes(tiff(numbers("u2")[:, :, 0], photometric="miniswhite"))
    with pytest.raises(CorruptImage, match="TIFF of the kind MINISWHITE is not supported"):
        build_dataset(section(tmp_path, 1, [0, 4095]))[0]
    (tmp_path / "x.tif").write_bytes(tiff(numbers("u2")[:, :, 0], compression="lzw"))
    assert build_dataset(section(tmp_path, 1, [0, 4095]))[0][0].shape == (1, SIDE, SIDE)


def test_planes_as_many_as_pixels_a_side(tmp_path):
    pages = np.arange(SIDE, dtype="f4")[:, None, None].repeat(SIDE, 1).repeat(SIDE, 2)
    (tmp_path / "x.tif").write_bytes(tiff(pages, photometric="minisblack"))
    image = build_dataset(section(tmp_path, SIDE, [0, SIDE - 1]))[0][0]
    torch.testing.assert_close(image, torch.from_numpy(pages) * 2 / (SIDE - 1) - 1, atol=1e-5, rtol=0)


class Own(torch.utils.data.Dataset):
    """Float images of five channels."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.from_numpy(numbers("f4", 5, 0, 10, index)).permute(2, 0, 1)


def test_arrays_of_own_code():
    plugins.give([f"{__name__}:Own"])
    data = Data(kind=f"{__name__}:Own", image_channels=5, range=[0, 10], resolution=SIDE, num_classes=0)
    expected = torch.from_numpy(numbers("f4", 5, 0, 10, 2)).permute(2, 0, 1) / 5 - 1
    torch.testing.assert_close(build_dataset(data)[2][0], expected, atol=1e-5, rtol=0)


REFUSED = {
    "data.image_channels: must be 1 or 3, got 4": ["data.image_channels=4"],
    "data.image_channels: must be at most 16, got 17": ["data.image_channels=17", "data.range=[0,1]"],
    "data.range: must be two numbers, the lower one first, got [1.0, 1.0]": ["data.range=[1,1]"],
    "data.range: must hold at least 256 numbers of float32, in which images are read, got [2000000000.0": [
        "data.range=[2000000000,2000000255]"
    ],
    "data.range.1: must be a finite number, got inf": ["data.range=[0,.inf]"],
    "data.range: must be unset with data.kind=digits": ["data.kind=digits", "data.range=[0,1]"],
    "augmentation.pipeline: must be one of b, geom": [
        "data.image_channels=2",
        "data.range=[0,1]",
        "augmentation={p: 0.1}",
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_ranges_and_channels_that_do_not_fit(message):
    words = REFUSED[message]
    words = words if "data.kind=digits" in words else ["data.kind=folder", "data.root=x", *words]
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        Recipe.read("digits_dcgan", "data.num_classes=0", *words)


@pytest.mark.parametrize("channels, seen", [(1, [0]), (2, [0]), (3, [0, 1, 2]), (5, [0, 1, 2])])
def test_a_grid_shows_channels_that_one_can_see(channels, seen):
    images = torch.rand(4, channels, 3, 3) * 2 - 1
    assert torch.equal(image_grid(images, 2), image_grid(images[:, seen], 2))


KEYS = ["data={kind: folder, root: x, num_classes: 3, image_channels: 4, range: [-10, 30]}"]


def test_samples_come_in_the_units_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, _ = make_run(tmp_path, *KEYS)
    words = ["sample", "--run", str(run), "--num", "6"]
    assert main([*words, "--out", "x.npz"]) == 0
    with np.load("x.npz") as found:
        images = found["arr_0"]
    assert images.shape == (6, 16, 16, 4)
    assert images.dtype == np.float32
    assert main([*words, "--files", "--out", "single"]) == 0
    for number in range(6):
        np.testing.assert_allclose(
            np.load(f"single/class{number % 3:03}_sample{number:06}.npy"), images[number], atol=1e-4
        )
    assert main([*words, "--files", "--out", "single"]) == 0  # its own files are replaced
    assert main(["export", "--run", str(run), "--format", "hub", "--out", "hub"]) == 0
    card = Path("hub/README.md").read_text()
    assert "16 x 16, 4 channels" in card
    assert "in [-1, 1], for values from -10 to 30" in card
    assert "| values | float32 (n, 4, height, width), from -1 for -10 to 1 for 30 |" in card
    network = bigsgan.load("hub")
    latents = torch.from_numpy(Draws(0).normal("sample", (0,), 0, 6, network.recipe.latent_size))
    made = in_units(network(latents, torch.arange(6) % 3), [-10, 30]).detach().permute(0, 2, 3, 1).numpy()
    assert np.abs(made - images).max() < 0.2
    with Image.open("hub/samples.png") as grid:
        assert grid.mode == "RGB"


def test_samples_outside_the_values_of_the_data_are_clipped():
    images = torch.tensor([-7.0, -1, 0.5, 1, 1.01])
    assert in_units(images, [100, 4096]).tolist() == [100, 100, 3097, 4096, 4096]
    assert in_units(images, None).tolist() == [-1, -1, 0.5, 1, 1]


FAMILIES = ["biggan_deep", "biggan_unshared", "cat", "dcgan_light", "gat", "r3gan", "stylegan2"]


@pytest.mark.parametrize("game", FAMILIES)
def test_networks_of_five_channels(tmp_path, game):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[game])
    data = recipe.data.model_copy(update={"image_channels": 5, "kind": "synthetic"})
    recipe = recipe.model_copy(update={"data": data})
    generator, discriminator = (filled(build_network(recipe, network)).eval() for network in NETWORKS)
    latents, labels, seeds = torch.randn(2, recipe.latent_size), example_labels(data, 2), torch.arange(2)
    made = generator(latents, labels, *([seeds] if recipe.generator.draws else []))
    assert made.shape == (2, recipe.judged_channels, *data.resolution)
    assert made.shape[1] % 5 == 0
    assert discriminator(made, labels, *([seeds] if recipe.discriminator_reads_seeds else [])).shape[0] == 2


@pytest.mark.slow
def test_a_run_on_wide_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number in range(24):
        np.save(f"data/{number:02}.npy", numbers("i2", 4, -500, 500, number))
    keys = ["data={kind: folder, root: data, resolution: 8, image_channels: 4, range: [-500, 500], num_classes: 0}"]
    small = ["total_nimg=16", "batch=8", "monitor=[]", "metrics=null", "augmentation=null", "data.num_workers=1"]
    with bigsgan.Trainer(Recipe.read("digits_dcgan", "out=run", *keys, *small)) as trainer:
        for _ in trainer:
            pass
        assert trainer.sample(2).shape == (2, 4, 8, 8)
    assert Path("run/samples/samples_real_000000000000.png").is_file()
