"""Photographs that are fine are read: much metadata, many pixels; and the range of 16 bits that images use is told."""

from __future__ import annotations

import io
import logging
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, readable_images
from bigsgan.data.pairs import FilePairs
from bigsgan.images import reading
from bigsgan.images.reading import CorruptImage, image_tensor, open_image, opened_image, upright_size, used_range
from bigsgan.images.size import Fitting, Size

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def metadata(field: str, size: int) -> dict:
    if field == "icc":
        return {"icc_profile": random.Random(0).randbytes(size)}
    info, text = PngImagePlugin.PngInfo(), "ab" * (size // 2)
    if field == "xmp":
        info.add_itxt("XML:com.adobe.xmp", text, zip=True)
    else:
        info.add_text("Comment", text, zip=field == "compressed text")
    return {"pnginfo": info}


@pytest.mark.parametrize("field", ["icc", "xmp", "text", "compressed text"])
@pytest.mark.parametrize("size", [1_200_000, pytest.param(70_000_000, marks=pytest.mark.slow)])
def test_large_metadata_does_not_lose_the_image(field, size):
    image = open_image("x.png", saved(Image.fromarray(PIXELS), **metadata(field, size)))
    assert torch.equal(image_tensor(image, "x.png", Fitting(Size.of(16)), 3).permute(1, 2, 0), torch.from_numpy(PIXELS))


@pytest.mark.slow
def test_metadata_that_inflate_without_end_are_refused():
    """300 MB of text in a file of 300 kB."""
    content = saved(Image.fromarray(PIXELS)).getvalue()
    bomb = b"Comment\0\0" + zlib.compress(bytes(300_000_000), 1)
    chunk = struct.pack(">I", len(bomb)) + b"zTXt" + bomb + struct.pack(">I", zlib.crc32(b"zTXt" + bomb))
    end = len(content) - 12
    with pytest.raises(CorruptImage, match=r"x.png: Decompressed data too large"):
        open_image("x.png", io.BytesIO(content[:33] + chunk + content[33:end] + content[end:]))


def header(width: int, height: int) -> io.BytesIO:
    """A PNG file that says to be so large, and has no pixels."""
    ihdr = b"IHDR" + struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    idat = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (ihdr, idat)]
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def test_images_of_too_many_pixels_are_refused_by_their_header():
    tracemalloc.start()
    try:
        with pytest.raises(CorruptImage, match=r"Image size \(2500000000 pixels\) exceeds limit of 268435456 pixels"):
            open_image("x.png", header(50_000, 50_000))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    with Image.open(header(15_000, 13_000)) as image:  # 195 megapixels, not decoded
        assert image.size == (15_000, 13_000)


MODES = ["RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"]


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_upright_whether_it_is_mapped_or_decoded(tmp_path, orientation, compression):
    """TIFF 6.0, page 36: where row 0 and column 0 of the file are in the picture."""
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3)
    path = str(tmp_path / "x.tif")
    Image.fromarray(stored).save(path, tiffinfo={274: orientation}, compression=compression)
    rows, columns = {1: "top left", 2: "top right", 3: "bottom right", 4: "bottom left", 5: "left top", 6: "right top",
                     7: "right bottom", 8: "left bottom"}[orientation].split()  # fmt: skip
    expected = stored.T if rows in ("left", "right") else stored
    expected = expected[:: -1 if "bottom" in (rows, columns) else 1, :: -1 if "right" in (rows, columns) else 1]
    for content in (None, io.BytesIO(Path(path).read_bytes())):
        found = image_tensor(open_image(path, content), "x", None, 1)
        np.testing.assert_array_equal(found[0], expected)
        with opened_image(path, content) as image:
            assert tuple(upright_size(image)) == expected.shape


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("mode", MODES)
def test_large_images_are_averaged_before_they_are_resized(monkeypatch, mode, orientation):
    """As Lanczos resizes the whole, but for what a box before it changes; with the limit lowered."""
    coarse = Image.fromarray(np.random.default_rng(1).integers(60, 200, (6, 8), dtype=np.uint8))
    smooth = coarse.resize((480, 360), Image.Resampling.BICUBIC)
    wide = Image.fromarray(np.asarray(smooth).astype(np.uint16) * 257)
    image = wide if mode == "I;16" else smooth.convert("RGB").convert(mode) if mode == "CMYK" else smooth.convert(mode)
    image.info["exif"] = (lambda exif: (exif.__setitem__(0x0112, orientation), exif.tobytes())[1])(Image.Exif())
    expected = image_tensor(image.copy(), "x", Fitting(Size.of(16)), 1).float()
    monkeypatch.setattr(reading, "_MANY_PIXELS", 480 * 360 - 1)
    assert reading._reduced(image, Fitting(Size.of(16))).size == (48, 48)
    found = image_tensor(image, "x", Fitting(Size.of(16)), 1).float()
    assert (found - expected).abs().max() <= (9 if mode == "1" else 2)
    assert expected.std() > 20


def test_images_that_are_not_large_stay_as_they_were(monkeypatch):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (400, 300, 3), dtype=np.uint8))
    square = image.crop((0, 50, 300, 350)).resize((16, 16), Image.Resampling.LANCZOS)
    assert torch.equal(
        image_tensor(image, "x", Fitting(Size.of(16)), 3).permute(1, 2, 0), torch.from_numpy(np.array(square))
    )
    monkeypatch.setattr(reading, "_MANY_PIXELS", 1)
    assert reading._reduced(image, Fitting(Size.of(64))) is image  # less than twice three times the side


def sixteen(low: int, high: int, shape: tuple[int, ...] = (8, 8)) -> np.ndarray:
    """Values of 16 bits that reach from one to another."""
    found = np.random.default_rng(0).integers(low, high, shape, endpoint=True)
    found.flat[:2] = low, high
    return found


RANGES = {
    # name: (pixels, suffix, what is told of two such images; nothing if more than half of the range is used)
    "whole": (sixteen(0, 65_535).astype(np.uint16), "png", ""),
    "8 bits": (sixteen(0, 255).astype(np.uint8), "png", ""),
    "12 bits": (sixteen(0, 4095).astype(np.uint16), "png", "values from 0 to 4095, and use 6.25 % of the range from 0"),
    "signed": (
        sixteen(-2000, 40_000).astype(np.int32), "tif",
        "values from -2000 to 40000, and use 61 % of the range from 0 (black) to 65535 (white); those outside it",
    ),
    "32 bits": (
        sixteen(0, 10**6).astype(np.int32), "tif",
        "values from 0 to 1000000, and use 100 % of the range from 0 (black) to 65535 (white); those outside it become",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in ("8 bits", "12 bits") else pytest.param(n, marks=pytest.mark.slow) for n in RANGES]
)
def test_the_part_of_the_range_that_is_used_is_told(tmp_path, name, caplog):
    pixels, suffix, told = RANGES[name]
    (tmp_path / "data").mkdir()
    for i in range(2):
        Image.fromarray(pixels).save(tmp_path / f"data/{i}.{suffix}")
    data = Data(kind="folder", root=str(tmp_path / "data"), resolution=8, num_classes=0)
    with caplog.at_level(logging.WARNING):
        assert len(readable_images(build_dataset(data), data, 2)) == 2
        options = ["--resolution", "4", "--workers", "1"]
        for made in (["prepare", "--format", "zip"], ["prepare", "--format", "folder"], ["encode", "--codec", "dct"]):
            place = str(tmp_path / "-".join(made))
            assert cli.main(["data", made[0], str(tmp_path / "data"), place, *options, *made[1:]]) == 0
    if not told:
        assert caplog.messages == []
        return
    text = f"2 images of more than 8 bits have {told}"
    assert caplog.messages[0].startswith(f"{data.root}: of 2 images, {text}")
    assert caplog.messages[0].endswith("; scale them to it, or set data.range")
    assert [message.startswith(text) for message in caplog.messages[1:]] == [True] * 3


@pytest.mark.parametrize("narrow", ["inputs", "inputs/targets", "both"])
@pytest.mark.parametrize("kind", ["paired_folders", "unpaired_folders"])
def test_the_part_of_the_range_is_told_of_its_own_folder(tmp_path, narrow, kind, caplog):
    roots = {"inputs": tmp_path / "inputs", "inputs/targets": tmp_path / "inputs/targets"}
    roots["inputs/targets"].mkdir(parents=True)
    pixels = [sixteen(0, 4095).astype(np.uint16), sixteen(0, 65_535).astype(np.uint16)]
    for name, root in roots.items():
        Image.fromarray(pixels[narrow not in (name, "both")]).save(root / "0.png")
    pairs = FilePairs(
        [(f"{tmp_path}/inputs/0.png", f"{tmp_path}/inputs/targets/0.png")],
        data := Data(
            kind=kind, input_root=str(roots["inputs"]), root=str(roots["inputs/targets"]), resolution=8, num_classes=0
        ),
    )
    with caplog.at_level(logging.WARNING):
        assert len(readable_images(pairs, data, 1)) == 1
    told = [message.partition(": of 1 images, 1 image of")[0] for message in caplog.messages]
    assert told == [str(tmp_path / name) for name in roots if narrow in (name, "both")]


@pytest.mark.parametrize("colour_type, channels, is_alpha_last", [(2, 3, False), (4, 2, True), (6, 4, True)])
def test_colours_of_16_bits_count_too(colour_type, channels, is_alpha_last):
    """Pillow keeps the upper 8 bits of each colour; 4095 becomes 15. Alpha is no value."""
    pixels = sixteen(0, 4095, (8, 8, channels)).astype(">u2")
    if is_alpha_last:
        pixels[0, 0, 0], pixels[0, 1, 0], pixels[..., -1] = 0, 4095, 65535
    ihdr = b"IHDR" + struct.pack(">2I5B", 8, 8, 16, colour_type, 0, 0, 0)
    idat = b"IDAT" + zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    chunks = [struct.pack(">I", len(e) - 4) + e + struct.pack(">I", zlib.crc32(e)) for e in (ihdr, idat, b"IEND")]
    with reading.noting_values() as values:
        image = open_image("x.png", io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)))
    assert np.asarray(image)[..., 0].max() == 15
    assert values == [(0, 4095)]
    assert used_range(values).startswith("1 image of more than 8 bits has values from 0 to 4095, and use 6.25 %")


@pytest.mark.parametrize("largest, is_told", [(255, False), (4095, False), (65535, True)])
def test_a_colour_ppm_of_16_bits_counts_too(largest, is_told):
    """Pillow scales by the largest value that the file names; 4080 of 65535 becomes 16."""
    pixels = sixteen(0, min(largest, 4080), (8, 8, 3)).astype(np.uint8 if largest < 256 else ">u2")
    with reading.noting_values() as values:
        open_image("x.ppm", io.BytesIO(b"P6 8 8 %d\n" % largest + pixels.tobytes()))
        open_image("x.pbm", io.BytesIO(b"P1 2 1\n0 1\n"))
    assert bool(used_range(values)) == is_told
    assert len(values) == (largest > 255)


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_signed_bytes_are_not_taken_for_unsigned_ones(byte_order):
    """A TIFF file of one strip with SampleFormat 2, which Pillow reads as if it were 1."""
    entries = [(256, 2), (257, 2), (258, 8), (259, 1), (262, 1), (273, 200), (277, 1), (278, 2), (279, 4)]
    for sample_format, is_read in ((1, True), (2, False)):
        given = [*entries, (339, sample_format)]
        fields = b"".join(struct.pack(f"{byte_order}2HI2H", tag, 3, 1, value, 0) for tag, value in given)
        start = (b"II" if byte_order == "<" else b"MM") + struct.pack(f"{byte_order}HIH", 42, 8, len(given))
        content = (start + fields + bytes(4)).ljust(200, b"\0") + bytes([0, 127, 128, 255])
        if is_read:
            assert np.asarray(open_image("x.tif", io.BytesIO(content))).tolist() == [[0, 127], [128, 255]]
        else:
            with pytest.raises(CorruptImage, match=r"x.tif: signed pixels of 8 bits need data.range"):
                open_image("x.tif", io.BytesIO(content))


def test_floating_point_pixels_name_their_range(tmp_path):
    Image.fromarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "x.tif")
    with pytest.raises(CorruptImage, match=r"no known range, here from -1 to 1; data\.range gives one"):
        image_tensor(open_image(str(tmp_path / "x.tif")), "x", Fitting(Size.of(8)), 1)


def test_one_image_of_the_whole_range_does_not_hide_the_others():
    narrow = [(0, 4095)] * 9
    text = "9 images of more than 8 bits have values from 0 to 4095, and use 6.25 %"
    assert used_range([*narrow, (0, 65535)]).startswith(text)
    assert used_range([*narrow, *[(0, 65535)] * 20]).startswith(text)  # as 12 bits end there
    assert used_range([(0, 4095), *[(0, 65535)] * 20]) == ""
    assert used_range([*[(0, 9000)] * 9, *[(0, 65535)] * 9]) == ""  # dark photographs
    assert used_range([(0, 20000), (30000, 65535)]) == ""
    assert "become black or white" in used_range([(-1, 300), *[(0, 65535)] * 5])


@pytest.mark.parametrize("side, num_hot, is_told", [(8, 1, True), (64, 4, True), (64, 40, False)])
def test_hot_pixels_do_not_hide_a_narrow_range(side, num_hot, is_told):
    pixels = sixteen(0, 4095, (side, side)).astype(np.uint16)
    pixels.flat[1 : 1 + num_hot] = 65535
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    with reading.noting_values() as values:
        for _ in range(5):
            open_image("x.png", io.BytesIO(file.getvalue()))
    assert bool(used_range(values)) == is_told
