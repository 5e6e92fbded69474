"""Files of tensors, written piece by piece, are such as safetensors writes."""

from __future__ import annotations

import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bigsgan.checkpoint import files

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"{dtype}@{i}": (9 * torch.randn(i + 1)).to(dtype) for i, dtype in enumerate(DTYPES)}
    found["second/a@0"], found["second/é@7"] = torch.randn(1000), torch.empty(0)
    found["strided@0"] = torch.randn(30)[::3]
    return found


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_the_library_reads_the_same_as_from_its_own(tmp_path, monkeypatch, tensors, piece_bytes):
    monkeypatch.setattr(files, "_PIECE_BYTES", piece_bytes)
    moved = []
    digest = files.write_tensors(tmp_path / "ours", tensors, {"format": "2"}, moved.append)
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(dense, tmp_path / "theirs", metadata={"format": "2"})
    ours, theirs = (load_file(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "2"}
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    assert sum(moved) == (tmp_path / "ours").stat().st_size
    assert (len(moved) > 10) == (piece_bytes < 1 << 20)
    printed = subprocess.run(["sha256sum", tmp_path / "ours"], capture_output=True, text=True, check=True).stdout
    assert digest == printed.split()[0] == files.checksum(tmp_path / "ours")


def test_a_call_that_writes_less_goes_on(tmp_path, monkeypatch, tensors):
    class Slow:
        """A file as on a disk that takes seven bytes at a time."""

        def __init__(self, path, mode, buffering):
            self.file = open(path, mode, buffering=buffering)  # noqa: SIM115
            self.fileno = self.file.fileno

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, view):
            return self.file.write(view[:7])

    files.write_tensors(tmp_path / "whole", tensors, {}, files.unnoticed)
    monkeypatch.setattr(files, "open", Slow, raising=False)
    files.write_tensors(tmp_path / "slow", tensors, {}, files.unnoticed)
    assert (tmp_path / "slow").read_bytes() == (tmp_path / "whole").read_bytes()
