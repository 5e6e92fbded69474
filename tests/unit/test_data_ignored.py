"""Files that are listed and not read are counted and named, and most of a data set is not ignored."""

from __future__ import annotations

import contextlib
import gzip
import logging
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, shards
from bigsgan.data.listing import image_suffixes
from bigsgan.errors import UserError
from bigsgan.inference.translations import _images
from tests.archives import png, write_tar, write_zip


def warned(caplog):
    """Warnings alone: whether a shard's headers are told depends on the level that earlier tests have left."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


PNG = png(0)


def write(kind: str, place: Path, names: list[str]) -> Path:
    """Files of these names, all with the content of one image or of a class."""
    place = place.with_suffix(".zip") if kind == "zip" else place
    contents = {name: b"0" if name.endswith(".cls") else PNG for name in names}
    if kind == "zip":
        write_zip(place, contents)
    elif kind == "tar":
        write_tar(place / "0.tar", contents)
    else:
        for name, content in contents.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
    return place


def opened(kind: str, root: Path, **changes):
    return build_dataset(Data(**{"kind": kind, "root": str(root), "resolution": 4, "num_classes": 0, **changes}))


def files(num: int, suffix: str, folder: str = "a") -> list[str]:
    return [f"{folder}/{suffix.strip('.')}-{i}{suffix}" for i in range(num)]


MIXED = [
    *files(30, ".png"), *files(20, ".HEIC"), *files(18, ".txt"), *files(7, ".json"), *files(4, ".xml"),
    *files(1, ".csv"), "a/.hidden.png", ".git/x.png",
]  # fmt: skip
TOLD = "50 other files ignored: 20 .heic, 18 .txt, 7 .json, 4 .xml, ..., such as a/HEIC-0.HEIC"


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "side_by_side"])
def test_files_that_are_not_read_are_counted_and_named(tmp_path, kind, caplog):
    root = write(kind, tmp_path / "data", [name for name in MIXED if kind != "tar" or not name.startswith(".")])
    with caplog.at_level(logging.WARNING, "bigsgan"):
        for _ in range(2):
            assert len(opened(kind, root)) == 30
            shards.keep_indices()
    assert warned(caplog) == [f"{root}: {TOLD}"]  # once in a process


@pytest.mark.parametrize("kind", ["folder", "zip", "side_by_side"])
@pytest.mark.parametrize("suffix", [".heic", ".wmf", ".mat", ".unknown", ""])
def test_most_of_a_data_set_is_not_ignored(tmp_path, kind, suffix):
    root = write(kind, tmp_path / "data", [*files(5, ".png"), *(f"a/other{i}{suffix}" for i in range(6))])
    message = rf"data.root: '{root}' has 6 files that would be ignored, and 5 images \(6 other files ignored: 6 "
    with pytest.raises(UserError, match=message):
        opened(kind, root)


@pytest.mark.parametrize("suffix", [".md", ".yaml", ".jsonl", ".parquet", ".ipynb"])
def test_text_is_no_lost_image(tmp_path, suffix):
    root = write("folder", tmp_path / "data", [*files(5, ".png"), *(f"a/other{i}{suffix}" for i in range(6))])
    assert len(opened("folder", root)) == 5


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_names_that_repeat_in_other_folders_are_images_of_their_own(tmp_path, kind):
    """Four of five cameras were left out: their files had the names of the first one's images."""
    numbers = range(3)
    names = [f"cam0/{i}.png" for i in numbers] + [f"cam{camera}/{i}.heic" for camera in (1, 2, 3, 4) for i in numbers]
    with pytest.raises(UserError, match=r"has 12 files that would be ignored, and 3 images \(12 other files ignored"):
        opened(kind, write(kind, tmp_path / "data", names))
    loose = write("folder", tmp_path / "loose", ["a/1.png", "b/2.png", *(f"{i}.png" for i in (1, 2, 3))])
    with pytest.raises(UserError, match="has 3 files that would be ignored, and 2 images"):
        opened("folder", loose, num_classes=2)
    masks = write(
        kind, tmp_path / "masks", [f"{part}/{i}.{end}" for part, end in (("x", "jpg"), ("y", "exr")) for i in numbers]
    )
    assert len(opened(kind, masks)) == 3


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_what_belongs_to_images_is_no_lost_image(tmp_path, kind, caplog):
    """Captions, as img2dataset writes them, masks and annotations."""
    names = [f"a/{i:03}.{suffix}" for i in range(4) for suffix in ("jpg", "txt", "json", "npy", "seg.npy", "dat")]
    root = write(kind, tmp_path / "data", names)
    assert len(opened(kind, root)) == 4
    told = "20 other files ignored: 8 .npy, 4 .dat, 4 .json, 4 .txt, such as a/000."
    assert warned(caplog)[0].startswith(f"{root}: {told}")


def test_images_have_any_suffix_that_pillow_reads(tmp_path):
    """Pillow writes each format that it can, and the data set reads the file; the others are named here."""
    root, known, written = tmp_path / "data", Image.registered_extensions(), set()
    root.mkdir()
    for number, (suffix, kind) in enumerate(known.items()):
        for mode in ("L", "RGB", "P", "RGBA", "1"):
            with contextlib.suppress(Exception):
                Image.new(mode, (16, 16)).save(root / f"{number}{suffix.upper() if number % 2 else suffix}", kind)
                with Image.open(next(root.glob(f"{number}.*"))) as image:
                    image.load()
                written.add(suffix)
                break
        else:
            (root / f"{number}{suffix}").unlink(missing_ok=True)
    unread = {".pfm", ".pdf", ".palm", ".eps", ".ps", ".mpg", ".mpeg", ".wmf", ".emf", ".h5", ".hdf", ".grib", ".bufr"}
    assert set(image_suffixes()) == known.keys() - unread
    assert {".gif", ".tga", ".jp2", ".avif", ".ico", ".qoi", ".sgi", ".pcx", ".dds", ".mpo"} <= written
    for path in root.iterdir():
        if path.suffix.lower() in unread:
            path.unlink()
    dataset = opened("folder", root, resolution=16)
    assert len(dataset) == len(written - unread)
    assert all(dataset[number][0].shape == (1, 16, 16) for number in range(len(dataset)))


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_a_rarer_format_beside_an_image_of_its_name_is_no_second_image(tmp_path, kind, caplog):
    names = ["a/cat.png", "a/cat.psd", "a/cat.seg.png", "a/dog.gif", "b/cat.ico"]
    dataset = opened(kind, write(kind, tmp_path / "data", names))
    kept = [name for name in names if name != "a/cat.psd" and (kind != "tar" or "seg" not in name)]
    assert [dataset.path(number).partition("/data")[2][-len(kept[number]) :] for number in range(len(dataset))] == kept
    assert "1 .psd" in warned(caplog)[0]


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_more_files_than_images_may_be_ignored_on_request(tmp_path, kind, caplog, capsys):
    names = [*files(2, ".png"), *files(9, ".mat"), "a/README"]
    root = write(kind, tmp_path / "data", names)
    with pytest.raises(UserError, match=r"has 10 files .* 2 images .*, or set data.max_ignored=10 to ignore them"):
        opened(kind, root)
    with pytest.raises(UserError, match=r"has 10 files that would be ignored"):
        opened(kind, root, max_ignored=9)
    assert len(opened(kind, root, max_ignored=10)) == 2
    assert warned(caplog) == [f"{root}: 10 other files ignored: 9 .mat, 1 without a suffix, such as a/README"]
    options = ["--resolution", "4", "--workers", "1", "--codec", "dct"]
    words = ["data", "encode", str(root), str(tmp_path / "made"), *options]
    assert cli.main(words) == 2
    assert ", or give --max-ignored 10 to ignore them" in capsys.readouterr().err
    assert cli.main([*words, "--max-ignored", "10"]) == 0
    assert cli.main([*words, "--max-ignored", "-1"]) == 2
    assert "--max-ignored: must be at least 0, got -1" in capsys.readouterr().err


def test_keys_of_shards_end_at_the_first_dot(tmp_path):
    """Fifteen of twenty images were left out without a word."""
    names = [*(f"photo{i:03}.2024.jpg" for i in range(15)), *(f"photo{i:03}.jpg" for i in range(15, 20))]
    root = write("tar", tmp_path / "data", names)
    for _ in range(2):  # the second time from the index
        said = r"has 15 files .*, and 5 images \(15 .*: 15 \.jpg, such as photo000.*or set data\.max_ignored=15 to"
        with pytest.raises(UserError, match=rf"^data\.root: .* {said}"):
            opened("tar", root)
        shards.keep_indices()
    with pytest.raises(UserError, match=r"contains no images \(15 .*photo000.2024.jpg\); rename the files: a key ends"):
        opened("tar", write("tar", tmp_path / "all", names[:15]))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_shards_are_named(tmp_path, kind):
    """Keys that end at the first dot were given as the cause, and another file as the example."""
    root = write("tar", tmp_path / "data", ["a.png", "a.txt"])
    (root / "README.txt").write_text("")
    with tarfile.open(root / "1.tar", "w") as archive:
        for number in range(3):
            info = tarfile.TarInfo(f"l{number}.png")
            info.type, info.linkname = kind, "a.png"
            archive.addfile(info)
    told = "5 other files ignored: 3 linked .png, 2 .txt, such as l0.png"
    for _ in range(2):  # the second time from the index
        with pytest.raises(UserError) as caught:
            opened("tar", root)
        assert f"has 3 files that would be ignored, and 1 image ({told}); pack the files that" in str(caught.value)
        assert "key ends" not in str(caught.value)
        shards.keep_indices()
    write("tar", tmp_path / "more", ["b.2.png"] + [f"b{i}.2.png" for i in range(3)])
    (tmp_path / "more/0.tar").rename(root / "2.tar")
    with pytest.raises(UserError, match=r"has 7 files .* such as l0.png\); pack the files .*; rename the files: a"):
        opened("tar", root)


def test_files_of_other_formats_in_shards_are_to_be_converted(tmp_path):
    root = write("tar", tmp_path / "data", ["1.png", "2.heic", "3.heic"])
    with pytest.raises(UserError, match=r"such as 2.heic\); convert them to .jpg or .png, or move them .*, or set"):
        opened("tar", root)


def test_labels_that_shards_do_not_have_of_a_listing(tmp_path):
    root = write("tar", tmp_path / "data", ["x/1.png", "x/2.png", "dataset.json"])
    message = r"has no labels but those of a dataset.json \(it is read beside files, and in zip files\); unpack"
    with pytest.raises(UserError, match=message):
        opened("tar", root, num_classes=3)
    assert len(opened("tar", root)) == 2
    made = str(tmp_path / "made.zip")
    words = ["data", "prepare", str(root), made, "--kind", "tar", "--format", "zip", "--resolution", "4"]
    assert cli.main(words) == 2
    assert cli.main([*words, "data.num_classes=0"]) == 0


def test_images_of_shards_without_classes(tmp_path):
    root = write("tar", tmp_path / "data", ["1.png", "1.json", "2.png", "2.json"])
    with pytest.raises(UserError, match=r"^data\.root: .* has no classes \(.*; 2 other .*: 2 \.json, such as 1"):
        opened("tar", root, num_classes=10)
    assert len(opened("tar", root, num_classes=1)) == 2  # of one class


@pytest.mark.parametrize("names", [["0.tar.gz"], ["0.tar", "1.tgz"], ["0.tar", "1.tar.zst", "1.tar.xz"]])
def test_compressed_shards_are_refused(tmp_path, names):
    root = write("tar", tmp_path / "data", ["1.png"])
    (root / "0.tar").rename(root / "x")
    for name in names:
        (root / name).write_bytes((root / "x").read_bytes())
    (root / "x").unlink()
    with pytest.raises(UserError, match=r"data.root: '.*' has compressed shards \(.*z.*\) \(images in them cannot be"):
        opened("tar", root)
    if "0.tar" in names:
        for name in names[1:]:
            (root / name).rename(root / name.replace("1", "0"))
        assert len(opened("tar", root)) == 1  # beside what they were made into


def test_an_archive_of_another_format_is_named(tmp_path):
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(write("folder", tmp_path / "data", ["a.png"]))
    with pytest.raises(UserError, match=r"data.root: must be a zip file, got '.*' \(it is a tar archive\); unpack it"):
        opened("zip", tmp_path / "data.tar.gz")


@pytest.mark.parametrize(
    "content, what",
    [
        (b"7z\xbc\xaf\x27\x1c\0\4", r"it is a 7z archive\); pack the images in it as a zip file"),
        (b"Rar!\x1a\x07\1\0", r"it is a RAR archive\); pack the images"),
        (gzip.compress(b"text", mtime=0), r"it is a gzip file\); pack the images"),
        (b"\x28\xb5\x2f\xfd\0\0", r"it is a Zstandard file\); pack the images"),
        (b"an image\n" * 100, r"it does not begin as one\); give the zip file with the images"),
        (b"", r"it is empty\); give the zip file with the images"),
    ],
)
def test_a_file_of_another_format_is_not_called_damaged(tmp_path, content, what):
    (tmp_path / "data.zip").write_bytes(content)
    with pytest.raises(UserError, match=rf"data.root: must be a zip file, got '.*data.zip' \({what}"):
        opened("zip", tmp_path / "data.zip")


def test_inputs_to_translate_and_their_others(tmp_path, caplog):
    root = write("folder", tmp_path / "data", ["1.png", "1.txt", "2.HEIC", ".hidden.txt"])
    assert _images(root) == [root / "1.png"]
    assert warned(caplog) == [f"{root}: 2 other files ignored: 1 .heic, 1 .txt, such as 2.HEIC"]
    write("folder", root, ["3.heic"])
    with pytest.raises(UserError, match=r"--input: '.*' has 2 files that would be ignored, and 1 image \(3 other"):
        _images(root)


@pytest.mark.parametrize("command", ["prepare", "encode"])
def test_commands_end_with_what_they_ignored(tmp_path, capsys, command):
    root, options = write("folder", tmp_path / "data", MIXED), ["--resolution", "4", "--workers", "1"]
    options += ["--format", "zip"] if command == "prepare" else ["--codec", "dct"]
    for _ in range(2):  # the second time all is there
        assert cli.main(["data", command, str(root), str(tmp_path / "made"), *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == TOLD
    many = write("folder", tmp_path / "many", [*files(2, ".png"), *files(9, ".heic")])
    assert cli.main(["data", command, str(many), str(tmp_path / "other"), *options]) == 2
    assert f"SRC: '{many}' has 9 files that would be ignored, and 2 images (" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
