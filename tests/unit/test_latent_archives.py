"""Latents in archives: the same samples as in files of their own, and the images beside them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bigsgan.data import build_dataset
from bigsgan.data.packed import write_tar
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage
from tests.archives import png
from tests.autoencoders import latents, write_latents

NUM = 5


def pack_zip(root: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(root.with_suffix(".zip"), "w", compression) as archive:
        for path in sorted(root.iterdir()):
            archive.write(path, path.name)
    return root.with_suffix(".zip")


def pack_tar(root: Path, images: dict[int, np.ndarray], field: str = "npy") -> Path:
    """Two shards with the classes of dataset.json."""
    shards = root.with_name("shards")
    shards.mkdir()
    labels = dict(json.loads((root / "dataset.json").read_text())["labels"])
    for shard, numbers in enumerate((range(3), range(3, NUM))):
        members = []
        for i in numbers:
            members += [(f"{i:03}.{field}", (root / f"{i:03}.npy").read_bytes())]
            members += [(f"{i:03}.cls", str(labels[f"{i:03}.npy"]).encode())]
            if i in images:
                members.append((f"{i:03}.png", png(images[i])))
        write_tar(shards / f"shard-{shard:06}.tar", members)
    return shards


@pytest.mark.parametrize("kind", ["stored", "deflated", "tar", "tar with a field"])
def test_archives_hold_the_samples_of_files(kind, tmp_path):
    write_latents(tmp_path / "data", NUM, posterior=True)
    loose = build_dataset(latents(tmp_path))
    if kind.startswith("tar"):
        root = pack_tar(tmp_path / "data", {}, "npy" if kind == "tar" else "moments.npy")
    else:
        root = pack_zip(tmp_path / "data", zipfile.ZIP_STORED if kind == "stored" else zipfile.ZIP_DEFLATED)
    for _ in range(2):  # the second time from the index of the shards
        packed = build_dataset(latents(tmp_path, root=str(root)))
        assert len(packed) == len(loose) == NUM
        for index in range(NUM):
            (expected, label), (found, other) = loose[index], packed[index]
            assert torch.equal(found, expected)
            assert other == label == index % 2
    plain = build_dataset(latents(tmp_path, root=str(root), num_classes=0))
    assert [plain[index][1] for index in range(NUM)] == [0] * NUM


def test_images_lie_beside_latents(tmp_path):
    write_latents(tmp_path / "data", NUM, posterior=False)
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    dataset = build_dataset(latents(tmp_path, root=str(pack_tar(tmp_path / "data", {1: image}))))
    assert dataset.image(0) is None
    np.testing.assert_array_equal(dataset.image(1).permute(1, 2, 0).numpy(), image)
    assert dataset[1][0].shape == (8, 8, 8)
    assert build_dataset(latents(tmp_path)).image(1) is None


def test_damaged_members_count_as_corrupt_images(tmp_path):
    write_latents(tmp_path / "data", NUM, posterior=False)
    path = pack_zip(tmp_path / "data")
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY") + 200] ^= 1
    path.write_bytes(content)
    dataset = build_dataset(latents(tmp_path, root=str(path)))
    with pytest.raises(CorruptImage, match=r"data\.zip/000\.npy: its checksum differs"):
        dataset[0]
    assert dataset[1][1] == 1


def test_archives_that_do_not_fit(tmp_path):
    write_latents(tmp_path / "data", NUM, posterior=False)
    path, shards = pack_zip(tmp_path / "data"), pack_tar(tmp_path / "data", {})
    with pytest.raises(UserError, match=r"data\.num_classes: must be 2 with this data, got 1"):
        build_dataset(latents(tmp_path, root=str(path), num_classes=1))
    with pytest.raises(UserError, match=r"data\.num_classes: must be 2 with this data, got 1"):
        build_dataset(latents(tmp_path, root=str(shards), num_classes=1))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("dataset.json", '{"labels": [["000.npy", 0]]}')
    with pytest.raises(UserError, match=r"has 4 files that .*, and 1 image .*; list them in dataset\.json"):
        build_dataset(latents(tmp_path, root=str(path)))
    listed = json.dumps({"labels": [*([f"{i:03}.npy", 0] for i in range(NUM)), ["none.npy", 0]]})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("dataset.json", listed)
    with pytest.raises(UserError, match=r"data\.root: .* has no none\.npy, which its dataset\.json lists"):
        build_dataset(latents(tmp_path, root=str(path)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("000.npy", "")
    with pytest.raises(UserError, match=r"data\.root: .* has no readable dataset\.json"):
        build_dataset(latents(tmp_path, root=str(path)))
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"data\.root: must be a zip file, .*; give the zip file with the latents"):
        build_dataset(latents(tmp_path, root=str(path)))


def test_shards_tell_which_autoencoder_made_them(tmp_path):
    write_latents(tmp_path / "data", NUM, posterior=False)
    shards, data = pack_tar(tmp_path / "data", {}), latents(tmp_path)
    data = latents(tmp_path, root=str(shards))
    weights = build_dataset(data).fingerprint().codec
    about = {"kind": "diffusers", "weights": weights}
    (shards / "codec.json").write_text(json.dumps({"codec": about}))
    assert len(build_dataset(data)) == NUM
    for more, message in (
        ({"weights": "0" * 64}, r"data\.codec\.path: .*vae' is another autoencoder than that which made the latents"),
        ({"kind": "dct"}, r"data\.codec\.kind: must be dct with these latents, got 'diffusers'"),
    ):
        (shards / "codec.json").write_text(json.dumps({"codec": about | more}))
        with pytest.raises(UserError, match=message):
            build_dataset(data)
    (shards / "codec.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"data\.root: .* has a damaged codec\.json: it is nested too deeply"):
        build_dataset(data)
