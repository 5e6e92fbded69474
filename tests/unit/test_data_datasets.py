"""The four kinds of data set, and the conversion of every pixel format against values worked out by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage, image_tensor
from bigsgan.images.size import Fitting, Size
from bigsgan.training.sampling import column_labels


def folder(root, **changes) -> Data:
    return Data(**{"kind": "folder", "root": str(root), "num_classes": 0, "resolution": 2, **changes})


def read(root, image: Image.Image, name: str, *, channels: int, resolution: int = 2, **save) -> torch.Tensor:
    """Write one image to a file and read it through the data set: (C, R, R)."""
    image.save(root / name, **save)
    dataset = build_dataset(folder(root, image_channels=channels, resolution=resolution))
    assert len(dataset) == 1
    pixels, label = dataset[0]
    assert label == 0
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (channels, resolution, resolution)
    return pixels


def palette(colour, transparent: bool) -> Image.Image:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, *colour])
    if transparent:
        image.info["transparency"] = 1
    return image


def plain(mode: str, value) -> Image.Image:
    return Image.new(mode, (2, 2), value)


CONVERSIONS = {
    # name: (image, suffix, colour as read). Alpha a over white: v a / 255 + 255 (255 - a) / 255.
    "L": (plain("L", 77), "png", (77, 77, 77)),
    "1": (plain("1", 1), "png", (255, 255, 255)),
    "LA": (plain("LA", (77, 128)), "png", (166, 166, 166)),  # 38.65 + 127
    "RGB": (plain("RGB", (1, 2, 3)), "png", (1, 2, 3)),
    "RGBA": (plain("RGBA", (200, 100, 0, 51)), "png", (244, 224, 204)),  # a fifth of the colour, and 204
    "P": (palette((10, 20, 30), transparent=False), "png", (10, 20, 30)),
    "P transparent": (palette((10, 20, 30), transparent=True), "png", (255, 255, 255)),
    "CMYK": (plain("CMYK", (51, 102, 0, 51)), "tif", (163, 122, 204)),  # 204 * (204, 153, 255) / 255
    "I;16": (Image.fromarray(np.full((2, 2), 25_700, np.uint16)), "png", (100, 100, 100)),  # 25,700 = 100 * 257
    "I": (Image.fromarray(np.full((2, 2), 25_700, np.int32)), "tif", (100, 100, 100)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_mode_becomes_colour_or_grey(tmp_path, name):
    image, suffix, (red, green, blue) = CONVERSIONS[name]
    pixels = read(tmp_path, image, f"image.{suffix}", channels=3)
    assert pixels.permute(1, 2, 0).reshape(4, 3).tolist() == [[red, green, blue]] * 4
    luma = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    assert read(tmp_path, image, f"image.{suffix}", channels=1).flatten().tolist() == [round(luma)] * 4
    with Image.open(tmp_path / f"image.{suffix}") as written:
        assert written.mode == name.split()[0]


def test_sixteen_bits_are_scaled_and_rounded(tmp_path):
    # 65535 -> 255, so 128 (0.498) -> 0 and 129 (0.502) -> 1. Cutting the low byte would make 129 0.
    image = Image.fromarray(np.array([[128, 129], [65_535, 65_407]], np.uint16))
    assert read(tmp_path, image, "image.png", channels=1).tolist() == [[[0, 1], [255, 255]]]


def test_floating_point_pixels_are_reported(tmp_path):
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "image.tif")
    with pytest.raises(CorruptImage, match="floating-point pixels have no known range"):
        build_dataset(folder(tmp_path))[0]


# Stored [[10, 20], [30, 40]]. Orientation 6 says that row 0 is the right side and column 0 the top, and so on.
UPRIGHT = {
    1: [[10, 20], [30, 40]],
    2: [[20, 10], [40, 30]],
    3: [[40, 30], [20, 10]],
    4: [[30, 40], [10, 20]],
    5: [[10, 30], [20, 40]],
    6: [[30, 10], [40, 20]],
    7: [[40, 20], [30, 10]],
    8: [[20, 40], [10, 30]],
}


@pytest.mark.parametrize("suffix", ["png", "tif"])  # Pillow turns TIFF, and only TIFF, upright by itself
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_is_undone_once(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.array(UPRIGHT[1], np.uint8))
    pixels = read(tmp_path, image, f"image.{suffix}", channels=1, exif=exif)
    assert pixels[0].tolist() == UPRIGHT[orientation]
    (file,) = tmp_path.rglob(f"image.{suffix}")
    with Image.open(file) as image:  # as some of torchvision's data sets leave it: not decoded yet
        assert image_tensor(image, "x", Fitting(Size.of(2)), 1)[0].tolist() == UPRIGHT[orientation]


@pytest.mark.parametrize("orientation", [3, 6])
def test_pairs_in_one_file_are_cut_after_they_are_turned(tmp_path, orientation):
    """Upright, the input is black and the target white."""
    (tmp_path / "pairs").mkdir()
    upright, back = np.zeros((8, 16), np.uint8), {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    upright[:, 8:] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(upright).transpose(back[orientation]).save(tmp_path / "pairs/a.png", exif=exif)
    data = Data(kind="side_by_side", root=str(tmp_path / "pairs"), resolution=8, num_classes=0, image_channels=1,
                input_channels=1)  # fmt: skip
    both, _ = build_dataset(data)[0]
    assert both.flatten(1).tolist() == [[0] * 64, [255] * 64]


def test_exif_orientation_survives_the_conversion_of_alpha_and_16_bits(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = Image.fromarray(np.array(UPRIGHT[1], np.uint16) * 257)
    assert read(tmp_path, wide, "image.png", channels=1, exif=exif)[0].tolist() == UPRIGHT[6]
    grey = Image.fromarray(np.array(UPRIGHT[1], np.uint8)).convert("LA")
    assert read(tmp_path, grey, "image.png", channels=1, exif=exif)[0].tolist() == UPRIGHT[6]


def test_damaged_exif_does_not_lose_the_image(tmp_path):
    image = Image.fromarray(np.array(UPRIGHT[1], np.uint8))
    assert read(tmp_path, image, "image.png", channels=1, exif=b"Exif\0\0rubbish")[0].tolist() == UPRIGHT[1]


def test_the_centre_is_cropped(tmp_path):
    wide = np.arange(15, dtype=np.uint8).reshape(3, 5)
    pixels = read(tmp_path, Image.fromarray(wide), "image.png", channels=1, resolution=3)
    assert pixels[0].tolist() == wide[:, 1:4].tolist()
    pixels = read(tmp_path, Image.fromarray(wide.T.copy()), "image.png", channels=1, resolution=3)
    assert pixels[0].tolist() == wide.T[1:4].tolist()
    even = np.arange(12, dtype=np.uint8).reshape(3, 4)  # one column too many: the right one goes
    pixels = read(tmp_path, Image.fromarray(even), "image.png", channels=1, resolution=3)
    assert pixels[0].tolist() == even[:, :3].tolist()


def lanczos_matrix(source: int, target: int) -> np.ndarray:
    """Weights of the antialiased Lanczos filter, three lobes each as wide as a target pixel: (target, source)."""
    scale = source / target
    centres = (np.arange(target) + 0.5) * scale
    x = (np.arange(source) + 0.5 - centres[:, None]) / scale
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def test_resizing_is_antialiased_lanczos(tmp_path):
    source = np.random.default_rng(0).integers(60, 200, (12, 12), dtype=np.uint8)  # far from the clipping ends
    matrix = lanczos_matrix(12, 4)
    expected = matrix @ source @ matrix.T
    pixels = read(tmp_path, Image.fromarray(source), "image.png", channels=1, resolution=4)
    assert np.abs(pixels[0].numpy() - expected).max() < 1.1  # Pillow rounds after each of its two passes
    assert np.abs(source[1::3, 1::3] - expected).max() > 20  # taking every third pixel is something else


def write_images(root, *names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plain("L", number + 1).save(path)


def test_class_folders_are_numbered_in_alphabetical_order(tmp_path):
    hidden = ["c/._y.bmp", "c/.t/z.png", ".git/z.png"]
    write_images(tmp_path, "b/2.png", "b/1.PNG", "a/deep/er/x.png", "c/y.bmp", *hidden, "loose.png")
    (tmp_path / "b/notes.txt").write_text("no image")
    dataset = build_dataset(folder(tmp_path, num_classes=3))
    found = [(int(pixels[0, 0, 0]), label) for pixels, label in (dataset[i] for i in range(len(dataset)))]
    assert found == [(3, 0), (2, 1), (1, 1), (4, 2)]
    assert dataset.path(0) == str(tmp_path / "a/deep/er/x.png")


def test_without_classes_images_may_lie_anywhere_and_labels_are_zero(tmp_path):
    write_images(tmp_path, "loose.png", "b/2.png", "b/c/1.png")
    dataset = build_dataset(folder(tmp_path))
    assert sorted(int(dataset[i][0][0, 0, 0]) for i in range(len(dataset))) == [1, 2, 3]
    assert {dataset[i][1] for i in range(3)} == {0}


def test_another_number_of_class_folders_names_the_right_one(tmp_path):
    write_images(tmp_path, "cat/1.png", "dog/1.png", "owl/1.png")
    said = r"^data\.num_classes: must be 3 .* 10 \(.* has 3 class folders \(cat, dog, owl\)\); set data\.num.*=3"
    with pytest.raises(UserError, match=said):
        build_dataset(folder(tmp_path, num_classes=10))


def test_images_without_class_folders_are_trained_without_classes(tmp_path):
    write_images(tmp_path, "1.png")
    with pytest.raises(UserError, match=r"has 0 class folders\); set data.num_classes=0$"):
        build_dataset(folder(tmp_path, num_classes=10))


@pytest.mark.parametrize("num_classes", [0, 2])
def test_directories_without_images_are_refused(tmp_path, num_classes):
    with pytest.raises(UserError, match=r"^data.root: '.*' contains no images; give a directory with files of \."):
        build_dataset(folder(tmp_path, num_classes=num_classes))
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    (tmp_path / "cat/1.txt").touch()
    with pytest.raises(UserError, match=r"data.root: .* contains no images \(1 other file ignored: 1 \.txt, .*\.png"):
        build_dataset(folder(tmp_path, num_classes=num_classes))


def test_a_root_that_is_no_directory_is_refused(tmp_path):
    write_images(tmp_path, "1.png")
    with pytest.raises(UserError, match=r"data.root: '.*/nowhere' does not exist; "):
        build_dataset(folder(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data.root: must be a directory, got '.*/1.png'; "):
        build_dataset(folder(tmp_path / "1.png"))


def test_unreadable_files_are_reported_by_path(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "a_cut.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "b_text.png").write_text("not an image")
    (tmp_path / "c_empty.png").write_bytes(b"")
    (tmp_path / "d_gone.png").symlink_to(tmp_path / "nowhere")
    dataset = build_dataset(folder(tmp_path))
    names = ["a_cut.jpg", "b_text.png", "c_empty.png", "d_gone.png"]
    reasons = ["truncated", "cannot identify", "cannot identify", "No such file"]
    for index, (name, reason) in enumerate(zip(names, reasons, strict=True)):
        with pytest.raises(CorruptImage) as caught:
            dataset[index]
        assert caught.value.path == str(tmp_path / name)
        assert reason in caught.value.reason
    assert dataset[4][0].shape == (1, 2, 2)


@pytest.mark.parametrize("resolution", [4, 8, 16, 32])
def test_digits_are_enlarged_by_pillows_bicubic_filter(resolution):
    dataset = build_dataset(Data(kind="digits", resolution=resolution))
    pixels, labels = load_digits(return_X_y=True)
    assert len(dataset) == 1797
    for index in (0, 1, 2, 1796):
        image, label = dataset[index]
        grey = Image.fromarray((pixels[index].reshape(8, 8) * 255 / 16).astype(np.float32))
        expected = np.asarray(grey.resize((resolution, resolution), Image.Resampling.BICUBIC)).clip(0, 255)
        assert label == labels[index]
        assert image.dtype == torch.uint8
        assert image.shape == (1, resolution, resolution)
        assert np.abs(image[0].numpy() - expected).max() <= 0.501  # rounded once


def test_synthetic_images_are_a_function_of_the_index():
    data = Data(kind="synthetic", resolution=9, image_channels=3, num_classes=7, num_images=300)
    dataset, again = build_dataset(data), build_dataset(data.model_copy(update={"num_images": 10_000}))
    assert len(dataset) == 300
    assert len(again) == 10_000
    for index in reversed(range(300)):
        image, label = dataset[index]
        assert image.dtype == torch.uint8
        assert image.shape == (3, 9, 9)
        assert label == index % 7
        assert torch.equal(image, again[index][0])
    images = torch.stack([dataset[index][0] for index in range(300)])
    assert len(images.flatten(1).unique(dim=0)) == 300
    assert abs(images.float().mean() - 127.5) < 4 * 74 / (8192 + 243) ** 0.5  # bytes of deviation 74 from one line


def write_mnist(root, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the files of MNIST: big-endian header (magic number, sizes), then bytes."""
    raw = root / "MNIST/raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        header = struct.pack(">4i", 2051, *images.shape)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels.tobytes())


def torchvision_section(root, dataset, **changes) -> Data:
    return Data(**{"kind": "torchvision", "root": str(root), "dataset": dataset, "resolution": 28, **changes})


def test_a_torchvision_data_set_is_read_from_its_root(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
    write_mnist(tmp_path, images, np.array([3, 1, 9, 0], np.uint8))
    dataset = build_dataset(torchvision_section(tmp_path, "MNIST"))
    assert [dataset[index][1] for index in range(len(dataset))] == [3, 1, 9, 0]
    assert torch.equal(dataset[2][0], torch.from_numpy(images[2:3]))
    colour = build_dataset(torchvision_section(tmp_path, "MNIST", num_classes=0, image_channels=3))
    assert colour[2][1] == 0
    assert torch.equal(colour[2][0], torch.from_numpy(images[2]).expand(3, 28, 28))
    with pytest.raises(UserError, match=r"data.num_classes: must be 10 .*, got 4 \(.* has 10 classes\)"):
        build_dataset(torchvision_section(tmp_path, "MNIST", num_classes=4))


def test_torchvision_reads_files_with_our_reader(tmp_path):
    plain("RGBA", (200, 100, 0, 51)).save(tmp_path / "image.png")
    write_images(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "image.png").rename(tmp_path / "cat/1.png")
    (tmp_path / "dog/1.png").write_text("not an image")
    dataset = build_dataset(torchvision_section(tmp_path, "ImageFolder", num_classes=2, resolution=2, image_channels=3))
    assert dataset[0][0][:, 0, 0].tolist() == [244, 224, 204]  # torchvision's own reader would drop alpha
    with pytest.raises(CorruptImage) as caught:
        dataset[1]
    assert caught.value.path == str(tmp_path / "dog/1.png")


def test_torchvision_names_are_checked():
    for name, remedy in {"cifar10": "did you mean CIFAR10", "CIFAR1O": "did you mean CIFAR10", "qq": "such as"}.items():
        with pytest.raises(UserError, match=rf"data.dataset: must be a class of .*, got '{name}'; .*{remedy}"):
            build_dataset(torchvision_section("/nowhere", name))
    with pytest.raises(UserError, match=r"data.dataset: 'CocoDetection' needs annFile, which a recipe cannot give; "):
        build_dataset(torchvision_section("/nowhere", "CocoDetection"))


def test_nothing_is_downloaded(tmp_path, monkeypatch):
    # SEMEION's constructor downloads unless it is told not to.
    monkeypatch.setattr("torchvision.datasets.SEMEION.download", lambda _: pytest.fail("tried to download"))
    with pytest.raises(UserError, match=r"data.root: '.*' cannot be read as SEMEION: "):
        build_dataset(torchvision_section(tmp_path, "SEMEION"))


@pytest.mark.parametrize("name", ["CIFAR10", "MNIST", "ImageNet"])
def test_missing_torchvision_files_are_reported(tmp_path, name):
    with pytest.raises(UserError, match=rf"data.root: '.*' cannot be read as {name}:"):
        build_dataset(torchvision_section(tmp_path, name))


def test_torchvision_labels_that_are_no_classes_need_an_unconditional_run(tmp_path):
    base = tmp_path / "VOCdevkit/VOC2012"
    for below in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (base / below).mkdir(parents=True)
    (base / "ImageSets/Segmentation/train.txt").write_text("one\n")
    plain("L", 90).save(base / "JPEGImages/one.jpg")
    plain("L", 1).save(base / "SegmentationClass/one.png")
    with pytest.raises(UserError, match=r"data.num_classes: must be 0 .*, got 10 \(the labels of VOCSegmentation are"):
        build_dataset(torchvision_section(tmp_path, "VOCSegmentation", resolution=2))
    dataset = build_dataset(torchvision_section(tmp_path, "VOCSegmentation", num_classes=0, resolution=2))
    assert dataset[0][0].tolist() == [[[90, 90], [90, 90]]]


def test_one_empty_class_folder_is_named(tmp_path):
    write_images(tmp_path, "cat/1.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match=r"data.root: .* has class folders without images \(dog\); "):
        build_dataset(folder(tmp_path, num_classes=2))


def test_classes_of_digits_are_vectors_where_labels_are_left_out():
    data = Data(kind="digits", resolution=8, condition_dropout=0.25, missing_labels="accept")
    plain, given = build_dataset(Data(kind="digits", resolution=8)), build_dataset(data)
    assert np.array_equal(given.labels, np.eye(10)[plain.labels])
    assert np.array_equal(given[7][1], np.eye(10)[plain[7][1]])
    assert torch.equal(column_labels(data, given.labels), torch.eye(10))
