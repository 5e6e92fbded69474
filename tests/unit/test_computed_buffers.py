"""Tables that follow from the recipe: they are computed and not saved."""

from __future__ import annotations

import cmath

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.config import NETWORKS
from bigsgan.images.size import Size
from bigsgan.models import transformer
from bigsgan.models.build import build_network
from tests.tiny import TINY_GAMES, tiny_recipe

TABLES = {"rotation", "table"}
CPU = torch.device("cpu")


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
