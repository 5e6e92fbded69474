"""Tables that follow from the recipe: they are computed and not saved, and files that have them are still read."""

from __future__ import annotations

import cmath

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bigsgan
from bigsgan import checkpoint
from bigsgan.cli import main
from bigsgan.config import NETWORKS
from bigsgan.images.size import Size
from bigsgan.inference.trained import open_trained
from bigsgan.models import transformer
from bigsgan.models.build import build_network
from tests.runs import make_run
from tests.tiny import TINY_GAMES, tiny_recipe

TABLES = {"rotation", "table"}
CPU = torch.device("cpu")


def older(network):
    """Buffers as older versions saved them: rotations as (2, P, E), of patches alone."""
    found = {name: buffer + 1 for name, buffer in network.named_buffers()}
    for name in [name for name in found if name.endswith(".rotation")]:
        turning = found[name].repeat_interleave(2, dim=1)  # (T, E, 2)
        found[name] = turning.permute(2, 0, 1)[:, turning.shape[0] % 2 :].contiguous()
    return found


def read_manifest(run):
    return checkpoint.find(run).manifest


def last(names):
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("network", NETWORKS)
def test_they_are_in_no_state(network, tmp_path):
    built = build_network(tiny_recipe(tmp_path, *TINY_GAMES["gat"]), network)
    assert last(dict(built.named_buffers())) == TABLES
    assert checkpoint.saved_buffers(built) == {}
    assert not last(built.state_dict()) & TABLES


def test_they_are_there_before_anything_is_initialized():
    """Pairs of features are complex numbers that turn: by the patch's row in the first half, by its column behind."""
    attention, positions = transformer.Attention(24, 2, [Size.of(3)], bf16=False), transformer.Positions(24, Size.of(3))
    x = torch.randn(1, 2, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = torch.view_as_complex(transformer.rotated(x, attention.rotation).unflatten(-1, (-1, 2)))
    for patch in range(9):
        for pair in range(6):
            angle = (patch // 3 if pair < 3 else patch % 3) * 10_000 ** (-(pair % 3) / 3)
            expected = torch.view_as_complex(x.unflatten(-1, (-1, 2)))[0, :, patch, pair] * cmath.exp(1j * angle)
            torch.testing.assert_close(turned[0, :, patch, pair], expected, rtol=1e-6, atol=1e-6)
    waves = [cmath.exp(1j * at * 10_000 ** (-k / 6)) for at in (2, 1) for k in range(6)]  # patch 5: column 2, row 1
    found = torch.complex(positions.table[5].view(2, 2, 6)[:, 1], positions.table[5].view(2, 2, 6)[:, 0]).flatten()
    torch.testing.assert_close(found, torch.tensor(waves).to(found.dtype), rtol=1e-6, atol=1e-6)


def test_a_checkpoint_that_has_them_is_read(tmp_path, monkeypatch):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    new, _ = make_run(tmp_path / "new", *TINY_GAMES["gat"])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "saved_buffers", older)
        old, _ = make_run(tmp_path / "old", *TINY_GAMES["gat"])
    assert read_manifest(old)["kinds"]["generator"] == ["buffer", "master"]
    for network in NETWORKS:
        found, expected = (open_trained(run, network, False, None, CPU).network for run in (old, new))
        tensors = [dict(each.named_buffers()) | dict(each.named_parameters()) for each in (found, expected)]
        assert all(torch.equal(tensors[0][name], value) for name, value in tensors[1].items())


def test_an_export_that_has_them_is_read(tmp_path):
    run, _ = make_run(tmp_path, *TINY_GAMES["gat"])
    file, file_of_older = tmp_path / "g.safetensors", tmp_path / "older.safetensors"
    assert main(["export", "--run", str(run), "--out", str(file)]) == 0
    with safe_open(file, framework="pt") as opened:
        header, state = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert not last(state) & TABLES
    network = bigsgan.load(file)
    save_file(state | older(network.network), file_of_older, header)
    inputs = torch.randn(2, 64)[:, : network.network.layers["0"].latent_size], torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(bigsgan.load(file_of_older)(*inputs), network(*inputs))
