"""Checkpoints, exported networks and weights that somebody has made to do harm: one kind of error, within seconds."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigsgan
from bigsgan import checkpoint
from bigsgan.checkpoint.tags import sealed
from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.metrics.weight_files import load_weights
from bigsgan.models.build import build_network
from bigsgan.runtime.paths import check_stored
from bigsgan.weights import sources
from bigsgan.weights.sources import read_source
from bigsgan.weights.stylegan_pickle import _storage, _tensor, read_snapshot
from tests.single_process import entry, save
from tests.snapshots import TINY
from tests.tiny import tiny_recipe
from tests.unit.test_public_pix2pix import Patches, UNet

DATA = TINY.parents[1]

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def exported(tmp_path) -> dict[str, Any]:
    """Tensors and header of a network as `bigsgan export` writes them."""
    recipe = tiny_recipe(tmp_path)
    state = {name: torch.zeros_like(tensor) for name, tensor in build_network(recipe, "generator").state_dict().items()}
    return {"state": state, "header": {"network": "generator", "recipe": json.dumps(recipe.model_dump())}}


def write(path: Path, state: dict[str, torch.Tensor], header: dict[str, str]) -> Path:
    save_file(state, path, metadata=header)
    return path


@pytest.mark.parametrize("device", ["nonsense", "cuda:63"])
def test_a_device_that_is_not_there_is_not_the_files_fault(tmp_path, exported, device):
    path = write(tmp_path / "x.safetensors", exported["state"], exported["header"])
    with pytest.raises((RuntimeError, AssertionError), match=r"nonsense|CUDA|NVIDIA"):
        bigsgan.load(path, device)


HEADERS: dict[str, dict[str, str]] = {
    "no mapping": {"recipe": "[]"},
    "brackets": {"recipe": "[" * 100_000},
    "large": {"recipe": json.dumps("x" * 2_000_000)},
    "another network": {"network": "both"},
    "psi": {"truncation": "much"},
    "psi that is none": {"truncation": "nan"},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "depth": {"generator.depth": 2**62},
    "odd resolution": {"data.resolution": 17},
    "blocks": {"generator": {"family": "r3gan", "widths": [8] * 3, "cardinalities": [1] * 3, "blocks": [2**62] * 3}},
    "width": {"generator.channels": 2**16, "data.resolution": 512, "generator.depth": 64},
}


@pytest.mark.parametrize("name", [*HEADERS, *SECTIONS])
def test_hostile_headers_of_exported_networks(name, tmp_path, exported):
    header = {**exported["header"], **HEADERS.get(name, {})}
    for key, value in SECTIONS.get(name, {}).items():
        recipe = json.loads(header["recipe"])
        section, _, last = key.rpartition(".")
        (recipe[section] if section else recipe)[last] = value
        header["recipe"] = json.dumps(recipe)
    path = write(tmp_path / "x.safetensors", exported["state"], header)
    with pytest.raises(UserError, match=r"^.*: must be an exported network: .*; give a file that `bigsgan"):
        bigsgan.load(path)


def test_pipes_and_other_tensors_are_no_exported_networks(tmp_path, exported):
    os.mkfifo(tmp_path / "pipe")
    first = next(iter(exported["state"]))
    others = [
        {**exported["state"], "more": torch.zeros(3)},
        {**exported["state"], first: torch.zeros(1, 2, 3, 4, 5)},
        {name: value for name, value in exported["state"].items() if name != first},
    ]
    paths = [write(tmp_path / f"{i}.safetensors", state, exported["header"]) for i, state in enumerate(others)]
    for path in (*paths, tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match=r".*: must be an exported network: "):
            bigsgan.load(path)


MANIFESTS: dict[str, dict[str, Any]] = {
    "recipe": {"recipe": [1]},
    "metrics": {"metrics": 3},
    "numbers": {"numbers": {"counters": None}},
    "a large number": {"numbers": {"generator": {"count": 2**70}}},
    "position": {"numbers": {"counters": {"position": -5}}},
    "other images": {"numbers": {"counters": {"nimg": 40}}},
    "kinds": {"kinds": {"counters": 5}},
    "a holder": {"holders": {"counters/master/x": [0]}},
    "a missing file": {"holders": {"counters/master/x": "0-99999999999"}},
    "bounds": {"layout": {"generator.division": [0, "x"]}},
    "nimg": {"nimg": 64.0},
    "world size": {"world_size": "2"},
    "another directory": {"files": {"../../../outside": {"bytes": 4, "sha256": "0" * 64}}},
}


@pytest.mark.parametrize("name", [*MANIFESTS, "brackets", "pipe", "large"])
def test_hostile_manifests_are_passed_over_as_damaged(name, tmp_path):
    (tmp_path / "outside").write_text("four")
    directory = tmp_path / "run/checkpoints"
    assert save(directory, 64, {"counters": entry({"x": torch.zeros(2)})})
    assert checkpoint.newest(directory).nimg == 64
    path = directory / "000000000064/manifest.json"
    manifest = json.loads(path.read_text())
    if name in MANIFESTS:
        path.write_text(json.dumps(sealed({**manifest, **MANIFESTS[name]})))
    elif name == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_text("[" * 100_000 if name == "brackets" else json.dumps(sealed({**manifest, "x": "y" * 2**26})))
    with pytest.raises(UserError, match=r"contains only damaged checkpoints; restore an intact copy"):
        checkpoint.newest(directory)
    with pytest.raises(UserError, match=r"has no complete checkpoint"):
        checkpoint.find(tmp_path / "run")


def test_a_pipe_in_the_place_of_a_shard_is_damage(tmp_path):
    assert save(tmp_path / "checkpoints", 64, {"counters": entry({"x": torch.zeros(2)})})
    tag = tmp_path / "checkpoints/000000000064"
    manifest = json.loads((tag / "manifest.json").read_text())
    manifest["files"]["rank00000.safetensors"]["bytes"] = 0
    (tag / "manifest.json").write_text(json.dumps(sealed(manifest)))
    (tag / "rank00000.safetensors").unlink()
    os.mkfifo(tag / "rank00000.safetensors")
    with pytest.raises(UserError, match=r"has no complete checkpoint"):
        checkpoint.find_intact(tmp_path)


def test_names_of_tags_are_plain_digits(tmp_path):
    for name in ("²", "٣"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="has no complete checkpoint"):
        checkpoint.find(tmp_path / "run", 3)
    assert checkpoint.newest(tmp_path / "run/checkpoints") is None


def compressed(path: Path) -> Path:
    """A state dict as torch.save writes it, but compressed: a thousandth of what it inflates to."""
    plain = io.BytesIO()
    torch.save({"x": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    assert path.stat().st_size < 100_000
    return path


def test_compressed_weights_are_not_inflated(tmp_path):
    path = compressed(tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"--weights: .*x.pth' cannot be read: its member .* is compressed"):
        read_source("r3gan", path, None)
    with pytest.raises(UserError, match=r"weights: '.*' does not contain the network's weights: .* is compressed"):
        load_weights(torch.nn.Linear(1, 1), path)
    with pytest.raises(pickle.UnpicklingError, match=r"its member .* is compressed"):
        _storage(path.read_bytes())


def with_two_directories(content: bytes) -> bytes:
    """The end record names the compressed one; Python reads the one before it, which says that nothing is."""
    end = content.rindex(b"PK\5\6")
    size, offset = struct.unpack("<LL", content[end + 12 : end + 20])
    second, place = bytearray(content[offset : offset + size]), 0
    while place < size:
        lengths = struct.unpack("<HHH", second[place + 28 : place + 34])
        second[place + 10 : place + 12] = bytes(2)
        second[place + 24 : place + 28] = second[place + 20 : place + 24]
        place += 46 + sum(lengths)
    return content[:end] + second + content[end:]


def with_zip64(content: bytes) -> bytes:
    """A locator that names a record elsewhere: torch goes there, Python to what stands before the locator."""
    end = content.rindex(b"PK\5\6")
    size, offset = struct.unpack("<LL", content[end + 12 : end + 20])
    number = int.from_bytes(content[end + 10 : end + 12], "little")
    real = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, number, number, size, offset)
    with_two = with_two_directories(content)
    shown_at = len(content[:end]) + len(real)
    before = content[:end] + real + with_two[end : end + size]
    shown = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, number, number, size, shown_at)
    return before + shown + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1) + content[end:]


HIDDEN = {
    "two directories": with_two_directories,
    "two records": with_zip64,
    "an end that Python does not find": lambda content: content + b"PK\5\6",
    "bytes before it": lambda content: b"PK\3\4" + content,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_compressed_members_do_not_hide_from_one_reader(tmp_path, name):
    path = compressed(tmp_path / "x.pth")
    path.write_bytes(HIDDEN[name](path.read_bytes()))
    with pytest.raises(UserError, match="cannot be read: it is damaged: a zip file whose directory does not stand"):
        read_source("r3gan", path, None)


def test_members_that_share_their_bytes_are_refused(tmp_path):
    """Ten names of a megabyte."""
    path = tmp_path / "x.pth"
    torch.save({f"x{i}": torch.zeros(100_000 if i == 0 else 1) for i in range(10)}, path)
    check_stored(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        (large,) = [info for info in members if info.file_size == 400_000]
        for info in members:
            info.header_offset, info.file_size, info.compress_size = large.header_offset, 400_000, 400_000
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist = members
        archive._didModify = True
    with pytest.raises(ValueError, match="its members overlap"):
        check_stored(path)


def test_tensors_larger_than_their_storage_are_refused(tmp_path):
    torch.save({"x": torch.zeros(1).expand(2**40)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"--weights: must be a state dict, got '.*' \(x is larger than its storage\)"):
        read_source("r3gan", tmp_path / "x.pth", None)
    file = io.BytesIO()
    torch.save(torch.zeros(4).storage(), file, _use_new_zipfile_serialization=False)
    box = _storage(file.getvalue())
    assert _tensor(box, 0, (2, 2), (2, 1)).content.tolist() == [[0, 0], [0, 0]]
    with pytest.raises(pickle.UnpicklingError, match="larger than its storage"):
        _tensor(box, 0, (2**40,), (0,))


@pytest.mark.parametrize("option", ["--weights", "--discriminator"])
def test_weights_that_are_pipes_are_not_waited_for(option, tmp_path):
    os.mkfifo(tmp_path / "x.pth")
    torch.save({}, tmp_path / "y.pth")
    first, second = ("x.pth", None) if option == "--weights" else ("y.pth", tmp_path / "x.pth")
    with pytest.raises(UserError, match=rf"{option}: .*x.pth' cannot be read: a pipe, socket or device"):
        read_source("r3gan", tmp_path / first, second)


def published(source: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State dicts of a generator and a discriminator."""
    if source == "pix2pix":
        return UNet(5, 2, "batch").state_dict(), Patches(3, 2, "batch").state_dict()
    if source == "stylegan2-ada":
        networks = read_snapshot(TINY).networks
        return networks["G_ema"].state, networks["D"].state
    record = load_file(DATA / RECORDS[source])
    parts = [{n[len(k) + 1 :]: t for n, t in record.items() if n.startswith(k)} for k in NETWORKS]
    return parts[0], parts[1]


RECORDS = {"biggan-pytorch": "biggan_pytorch_biggan.safetensors", "r3gan": "r3gan_conditional.safetensors"}


def mutations(state: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The state with one tensor of another shape, or under another name; of some of its tensors."""
    for name, tensor in list(state.items())[:: max(1, len(state) // 12)]:
        yield {key: value for key, value in state.items() if key != name}
        shapes = [(), (3,), (3, 3), (0,) * tensor.dim(), (1, 1, *tensor.shape)]
        yield from ({**state, name: torch.zeros(shape)} for shape in shapes)
        yield {**state, re.sub(r"\d+", "9" * 5000, name, count=1): tensor}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "source",
    ["r3gan", *(pytest.param(s, marks=pytest.mark.slow) for s in ("biggan-pytorch", "stylegan2-ada", "pix2pix"))],
)
def test_a_mutated_network_is_read_or_refused_in_one_line(tmp_path, monkeypatch, source, network):
    generator, discriminator = published(source)
    paths = tmp_path / "g.pth", tmp_path / "d.pth"
    for path in paths:
        path.touch()
    said = []
    for mutated in mutations(generator if network == "generator" else discriminator):
        content = (mutated, discriminator) if network == "generator" else (generator, mutated)
        by_path = dict(zip(paths, content, strict=True))
        monkeypatch.setattr(sources, "read_content", lambda option, path, by_path=by_path: by_path[path])
        try:
            read_source(source, *paths)
        except UserError as error:
            said.append(str(error))
    assert len(said) > 10
    assert not any("\n" in text for text in said)


UNFIT = {
    "sparse": (torch.zeros(2, 3, 4, 4).to_sparse(), "is not a plain tensor"),
    "integer": (torch.zeros(2, 3, 4, 4, dtype=torch.int8), r"is of torch\.int8"),
    "quantized": (torch.quantize_per_tensor(torch.zeros(2, 3, 4, 4), 0.1, 0, torch.qint8), "is not a plain tensor"),
    "nested": (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "is not a plain tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_are_no_weights_are_refused(tmp_path, name):
    tensor, problem = UNFIT[name]
    state = UNet(5, 2, "batch").state_dict()
    torch.save(state | {"model.model.0.weight": tensor}, tmp_path / "x.pth")
    said = r"--weights: (must be a state dict, got '.*' \(model\.model\.0\.weight " + problem + "|.*cannot be read: "
    said += r"|'.*' contains code \(torch\._utils\._rebuild_nested_tensor\))"  # to torch 2.15
    with pytest.raises(UserError, match=said):
        read_source("pix2pix", tmp_path / "x.pth", None)
