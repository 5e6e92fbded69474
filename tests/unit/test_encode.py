"""`bigsgan data encode`: latents as the autoencoder makes them, resumed, and read by data.kind=latents."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, readable_images
from bigsgan.images.cosines import to_cosines
from tests.archives import write_tar, write_zip
from tests.autoencoders import save_autoencoder
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("small_parts")
SIZE = 32
ONE_LABEL = b'{"labels": [["a.png", 0]]}'


def write_images(root: Path) -> torch.Tensor:
    """Images of two classes, five in each, and one that is none; in [-1, 1]."""
    drawn = np.random.default_rng(0).integers(0, 256, (10, SIZE, SIZE, 3), dtype=np.uint8)
    for i, pixels in enumerate(drawn):
        (root / f"class{i // 5}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"class{i // 5}" / f"{i}.png")
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


def encode(source: Path, made: Path, codec: str, *more: str) -> int:
    batch = [] if "--batch" in more else ["--batch", "3"]
    arguments = ["--codec", codec, "--resolution", str(SIZE), "--workers", "1", *batch, *more]
    return cli.main(["data", "encode", str(source), str(made), *arguments])


def printed_data(capsys) -> Data:
    """The section that the printed overrides make."""
    tree: dict[str, Any] = {"codec": {}, "num_workers": 0}
    for override in shlex.split(capsys.readouterr().out.splitlines()[-1]):
        key, _, value = override.removeprefix("data.").partition("=")
        place = tree["codec"] if key.startswith("codec.") else tree
        place[key.removeprefix("codec.")] = yaml.safe_load(value)
    return Data(**tree)


def contents(made: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(made.iterdir()) if path.is_file()}


@pytest.mark.slow
def test_posteriors_of_an_autoencoder(tmp_path, capsys):
    network, images = save_autoencoder(tmp_path / "vae"), write_images(tmp_path / "images")
    (tmp_path / "images" / "class1" / "7.png").write_bytes(b"none")
    assert encode(tmp_path / "images", tmp_path / "made", f"diffusers:{tmp_path / 'vae'}", "--keep-images") == 0
    data = printed_data(capsys)
    assert (data.codec.kind, data.codec.path, data.codec.scale) == ("diffusers", str(tmp_path / "vae"), None)
    dataset, kept = build_dataset(data), [0, 1, 2, 3, 4, 5, 6, 8, 9]
    with torch.no_grad():
        posterior = network.encode(images[kept]).latent_dist
    assert len(dataset) == 9
    for index, number in enumerate(kept):
        latents, label = dataset[index]
        expected = torch.cat([posterior.mean[index], posterior.std[index]])
        torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
        assert label == number // 5
        assert torch.equal(dataset.image(index).float() / 127.5 - 1, images[number])
    with torch.no_grad():
        expected = network.decode(posterior.mean).sample
    torch.testing.assert_close(readable_images(dataset, data, 9), expected, rtol=1e-4, atol=1e-4)


def test_cosines_have_a_scale(tmp_path, capsys):
    images = write_images(tmp_path / "images")
    assert encode(tmp_path / "images", tmp_path / "made", "dct:4") == 0
    data = printed_data(capsys)
    cosines, dataset = to_cosines(images, 4), build_dataset(data)
    for index in range(10):
        torch.testing.assert_close(dataset[index][0][:48], cosines[index])
    assert data.codec.scale == pytest.approx(1 / cosines.std().item(), rel=1e-3)
    torch.testing.assert_close(readable_images(dataset, data, 10), images, rtol=0, atol=1e-5)


def test_a_second_run_makes_what_is_missing_or_damaged(tmp_path, capsys):
    write_images(tmp_path / "images")
    made = tmp_path / "made"
    assert encode(tmp_path / "images", made, "dct") == 0
    before, (first, second, third) = contents(made), sorted(made.glob("*.tar"))
    sums = json.loads(before["codec.json"])["sha256"]
    assert list(sums) == [first.name, second.name, third.name]
    untouched = first.stat().st_mtime_ns
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1] + b"x")
    assert encode(tmp_path / "images", made, "dct") == 0
    assert contents(made) == before
    assert first.stat().st_mtime_ns == untouched
    capsys.readouterr()
    for codec, more, message in (
        ("dct:4", [], "holds work with codec dct2, not dct4"),
        ("dct", ["--keep-images"], "holds work with keep images False, not True"),
        ("dct", ["--batch", "4"], "holds work with batch 3, not 4"),
    ):
        assert encode(tmp_path / "images", made, codec, *more) == 2
        assert message in capsys.readouterr().err
    assert contents(made) == before


class Halves(torch.nn.Module):
    """Means and deviations of blocks of 2x2 pixels."""

    def forward(self, images):
        assert not torch.is_grad_enabled(), "an encoder is not trained"
        blocks = images.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        return blocks.mean((3, 5)), blocks.std((3, 5))


class Enlarging(torch.nn.Module):
    def forward(self, latents):
        return latents.repeat_interleave(2, 2).repeat_interleave(2, 3)


def test_programs_encode_and_decode(tmp_path, capsys):
    images, programs = write_images(tmp_path / "images"), [tmp_path / "encoder.pt", tmp_path / "decoder.pt"]
    for network, path in zip((Halves(), Enlarging()), programs, strict=True):
        torch.jit.script(network).save(str(path))
    assert encode(tmp_path / "images", tmp_path / "made", f"torchscript:{programs[0]},{programs[1]}") == 0
    data = printed_data(capsys)
    assert (data.codec.factor, data.codec.channels) == (2, 3)
    with torch.no_grad():
        means, stds = Halves()(images)
    dataset = build_dataset(data)
    torch.testing.assert_close(dataset[6][0], torch.cat([means[6], stds[6]]))
    spread = (means.var(correction=0) + stds.square().mean()).sqrt().item()
    assert data.codec.scale == pytest.approx(1 / spread, rel=1e-3)
    about = json.loads((tmp_path / "made" / "codec.json").read_text())
    assert about["mean"] == pytest.approx(means.mean().item())
    assert about["deviation"] == pytest.approx(spread)
    torch.testing.assert_close(readable_images(dataset, data, 10), Enlarging()(means))


@pytest.mark.parametrize(
    "codec, message",
    [
        ("vae", "--codec: must name a codec, got 'vae'; give diffusers:FOLDER"),
        ("torchscript:one", "--codec: must name a codec, got 'torchscript:one'"),
        ("diffusers:none", "--codec: 'none' cannot be read: No such file"),
    ],
)
def test_codecs_that_cannot_encode(codec, message, tmp_path, capsys):
    write_images(tmp_path / "images")
    assert encode(tmp_path / "images", tmp_path / "made", codec) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_two_ranks_write_the_bytes_of_one(tmp_path):
    """More images than a shard holds, so that both have work."""
    save_autoencoder(tmp_path / "vae")
    drawn = np.random.default_rng(0).integers(0, 256, (1_003, 16, 16, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for i, pixels in enumerate(drawn):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i:04}.png")
    arguments = ["data", "encode", str(tmp_path / "images"), "--resolution", "16", "--workers", "1"]
    arguments += ["--codec", f"diffusers:{tmp_path / 'vae'}"]
    torchrun = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    for name, launcher in (("one", []), ("two", [*torchrun, "-m"])):
        command = [sys.executable, "-m", *launcher, "bigsgan", *arguments, str(tmp_path / name)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert sorted(one) == ["codec.json", "shard-000000.tar", "shard-000001.tar"]
    assert one == two


def packed(images: Path, kind: str, file: Path) -> None:
    """Pack class folders as others do; the images of a zip file with labels lie in folders that are not classes."""
    paths = sorted(images.glob("*/*.png"))
    labels = {path: int(path.parent.name[-1]) for path in paths}
    if "shards" in kind:
        suffix = kind.removeprefix("shards")
        for number in range(2):
            members = {}
            for i, path in enumerate(paths[5 * number : 5 * number + 5]):
                members |= {f"sample{i}.cls": str(labels[path]).encode(), f"sample{i}.png": path.read_bytes()}
            write_tar(file / f"train-{number}.tar{suffix}", members, mode=f"w:{suffix[1:]}")
        return
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        names = {
            path: f"00000/{path.name}" if kind == "labels" else f"{path.parent.name}/{path.name}" for path in paths
        }
        for path in paths:
            archive.write(path, names[path])
        if kind == "labels":
            archive.writestr("dataset.json", json.dumps({"labels": [[names[path], labels[path]] for path in paths]}))


@pytest.mark.parametrize("kind", ["folders", "labels", "shards", "shards.gz", "shards.xz"])
def test_images_in_archives_are_those_in_folders(kind, tmp_path, capsys):
    write_images(tmp_path / "images")
    source = tmp_path / ("shards" if "shards" in kind else "images.zip")
    packed(tmp_path / "images", kind, source)
    for images, made in ((tmp_path / "images", "one"), (source, "two")):
        assert encode(images, tmp_path / made, "dct:4", "--keep-images") == 0
    assert printed_data(capsys).num_classes == 2
    expected, found = (contents(tmp_path / made) for made in ("one", "two"))
    assert json.loads(expected["classes.json"]) == ["class0", "class1"]
    if kind != "folders":  # other archives have numbers alone
        del expected["classes.json"]
    assert expected == found
    assert len(found) == (5 if kind == "folders" else 4)
    assert encode(source, tmp_path / "two", "dct:4", "--keep-images") == 0  # resumes
    if "shards" not in kind:
        packed(tmp_path / "images", kind, source)
        os.utime(source, ns=(1, 1))
        assert encode(source, tmp_path / "two", "dct:4", "--keep-images") == 2
        assert "holds work on other images than SRC has now" in capsys.readouterr().err


@pytest.mark.parametrize("suffix, damage", [(".gz", slice(-100)), (".gz", slice(9, None)), (".zst", slice(None))])
def test_compressed_shards_that_cannot_be_read_are_named(tmp_path, capsys, suffix, damage):
    write_images(tmp_path / "images")
    packed(tmp_path / "images", "shards.gz", tmp_path / "shards")
    path = tmp_path / "shards/train-1.tar.gz"
    content = path.read_bytes()[damage]
    path.unlink()
    path.with_suffix(suffix).write_bytes(content)
    assert encode(tmp_path / "shards", tmp_path / "made", "dct:4") == 2
    problem = "has a damaged shard, train-1.tar.gz: " if suffix == ".gz" else "has compressed shards (train-1.tar.zst)"
    assert f"SRC: '{tmp_path / 'shards'}' {problem}" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_damaged_image_in_an_archive_is_left_out(tmp_path, capsys):
    write_images(tmp_path / "images")
    (tmp_path / "images" / "class1" / "7.png").write_bytes(b"none")
    packed(tmp_path / "images", "folders", tmp_path / "images.zip")
    content = bytearray((tmp_path / "images.zip").read_bytes())
    place = content.index(b"class0/2.png") + 60
    content[place] ^= 255
    (tmp_path / "images.zip").write_bytes(content)
    assert encode(tmp_path / "images.zip", tmp_path / "made", "dct:4") == 0
    assert f"{tmp_path / 'made'}: latents of 8 images of 2 classes" in capsys.readouterr().out


def test_a_zip_file_whose_labels_are_null_has_no_classes(tmp_path, capsys):
    """As StyleGAN's and EDM2's tools write it; their folders are of 1,000 images each."""
    write_images(tmp_path / "images")
    paths = sorted((tmp_path / "images").glob("*/*.png"))
    members = {f"{i // 5:05}/{path.name}": path.read_bytes() for i, path in enumerate(paths)}
    write_zip(tmp_path / "images.zip", {**members, "dataset.json": b'{"labels": null}'})
    assert encode(tmp_path / "images.zip", tmp_path / "made", "dct:4") == 0
    printed = capsys.readouterr().out
    assert "latents of 10 images of no classes" in printed
    assert "data.num_classes=0" in printed
    with tarfile.open(min((tmp_path / "made").glob("*.tar"))) as archive:
        assert {Path(name).suffix for name in archive.getnames()} == {".npy"}


@pytest.mark.parametrize("kind", ["folders", "shards"])
@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_a_fault_of_the_disk_is_no_damaged_image(kind, fault, tmp_path, capsys, monkeypatch):
    write_images(tmp_path / "images")
    source = tmp_path / "packed"
    packed(tmp_path / "images", kind, source)
    read, calls = os.pread, []

    def failing(*arguments: int) -> bytes:
        calls.append(arguments)
        if len(calls) > 6:
            raise OSError(fault, os.strerror(fault))
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        assert encode(source, tmp_path / "made", "dct:4", "--keep-images") == 2
    told = capsys.readouterr().err
    assert re.search(f"SRC: '.*png' cannot be read: {os.strerror(fault)}; fix the disk, then run", told)
    for images, made in ((source, "made"), (tmp_path / "images", "expected")):
        assert encode(images, tmp_path / made, "dct:4", "--keep-images") == 0
    made, expected = contents(tmp_path / "made"), contents(tmp_path / "expected")
    if kind == "shards":
        del expected["classes.json"]  # they have numbers alone
    assert made == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"none"), r"SRC: must be a zip file, got '.*' \(it does not begin as one\)"),
        (lambda path: path.write_bytes(b"PK\3\4"), "SRC: '.*' is damaged"),
        (lambda path: write_zip(path, {"a.txt": b"none"}), "SRC: '.*' contains no images"),
        (
            lambda path: write_zip(path, {"a.png": b"none", "b.png": b"none", "dataset.json": ONE_LABEL}),
            r"SRC: '.*' has b\.png, which its dataset\.json does not list; pack it again",
        ),
        (
            lambda path: write_zip(
                path, {"a.png": b"", "dataset.json": b'{"labels": {"a.png": 0, "c.png": 1, "d": 1}}'}
            ),
            r"SRC: '.*' has no c\.png, which its dataset\.json lists \(dataset\.json lists 2 files .*; pack it again",
        ),
        (
            lambda path: write_zip(path, {"a.png": b"none", "dataset.json": b"{}"}),
            r"SRC: '.*' has no readable dataset\.json: 'labels'; pack it again",
        ),
    ],
)
def test_archives_that_are_no_source(make, message, tmp_path, capsys):
    make(tmp_path / "images.zip")
    assert encode(tmp_path / "images.zip", tmp_path / "made", "dct:4") == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("class2/", "has class folders without images (class2); fill or remove them"),
        ("a.png", "contains images beside its class folders (a.png); move them into the folder of their class"),
    ],
)
def test_folders_of_a_zip_file_are_refused_as_those_of_a_directory(name, message, tmp_path, capsys):
    images = tmp_path / "images"
    write_images(images)
    packed(images, "folders", tmp_path / "images.zip")
    with zipfile.ZipFile(tmp_path / "images.zip", "a") as archive:
        archive.writestr(name, b"")
        archive.extract(name, images)
    for source in (images, tmp_path / "images.zip"):
        assert encode(source, tmp_path / "made", "dct:4") == 2
        assert f"SRC: '{source}' {message}" in capsys.readouterr().err
