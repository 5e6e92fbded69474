"""Every parameter and buffer of a network is initialized under the run's seed, whatever module holds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigsgan.errors import UserError
from bigsgan.models.batch_norm import AffineBatchNorm
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.plain import Linear

TORCHS = {
    "linear": lambda: nn.Linear(5, 7),
    "convolution": lambda: nn.Conv2d(3, 4, 3, groups=1),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, bias=False),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "embedding": lambda: nn.Embedding(10, 6, padding_idx=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention_of_other_widths": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "batch_norm": lambda: nn.BatchNorm2d(3),
    "prelu": lambda: nn.PReLU(3),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
}


def stack(*layers, first=0):
    return LayerStack(list(layers), first=first)


def with_memory(network, value):
    """The network in memory that holds other numbers."""
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data.fill_(value)
    return network


def state(network):
    return {name: value.detach().clone() for name, value in (*network.named_parameters(), *network.named_buffers())}


@pytest.mark.parametrize("kind", TORCHS)
def test_torchs_layers_follow_seed_and_place(kind):
    """As torch fills them, and not from what memory holds, what was drawn before, or what stands beside them."""
    torch.manual_seed(1)
    one = with_memory(stack(nn.Linear(2, 2), TORCHS[kind]()), 3)
    torch.manual_seed(2)
    part = with_memory(stack(TORCHS[kind](), nn.Linear(3, 3), first=1).to(torch.bfloat16).float(), 7)
    before = torch.get_rng_state()
    for network in (one, part):
        initialize(network, 5)
    assert torch.equal(before, torch.get_rng_state())
    found, again = state(one), state(part)
    shared = [name for name in found if name.startswith("layers.1.")]
    assert shared
    for name in shared:
        assert torch.equal(found[name], again[name]), name
    initialize(part, 6)
    drawn = [name for name in shared if found[name].is_floating_point() and len(found[name].unique()) > 2]
    assert all(not torch.equal(found[name], part.state_dict()[name]) for name in drawn)
    fresh = TORCHS[kind]()
    for name in shared:  # the sizes are those of torch's rules
        like = dict((*fresh.named_parameters(), *fresh.named_buffers()))[name.removeprefix("layers.1.")]
        assert found[name].dtype == like.dtype
        largest, usual = (float(each.detach().float().abs().max()) for each in (found[name], like))
        assert usual / 4 <= largest <= 4 * usual, name


def test_a_module_that_holds_others_has_the_last_word():
    """As torch's attention sets the bias of its last map."""
    attention = with_memory(stack(nn.MultiheadAttention(8, 2)), 3)
    initialize(attention, 5)
    assert not attention.layers["0"].out_proj.bias.any()
    assert not attention.layers["0"].in_proj_bias.any()

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.own = nn.Linear(3, 3), nn.Parameter(torch.empty(2))

        def initialize(self, generators):
            self.map.weight.zero_()
            self.own.normal_(generator=generators("own"))

    silent = with_memory(stack(Silent()), 3)
    initialize(silent, 5)
    layer = silent.layers["0"]
    assert not layer.map.weight.any()
    assert layer.map.bias.any()
    assert layer.own.any()


class Forgets(nn.Module):
    """Fills one of its own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.filled = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.ones(3).to(dtype))

    def initialize(self, generators):
        self.filled.zero_()


class Bare(nn.Module):
    """Has neither ``initialize`` nor ``reset_parameters``."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_a_buffer_that_nothing_fills_is_named(dtype):
    with pytest.raises(UserError, match=r"^layers\.1\.table: lacks an initial value; let its module fill it"):
        initialize(stack(Linear(2, 2, 1.0), Forgets(dtype)), 0)


def test_parameters_that_nothing_fills_are_named():
    with pytest.raises(UserError, match=r"^layers\.0\.scale: lacks an initial value \(so do layers\.1\.scale\); "):
        initialize(stack(Bare(), Bare()), 0)


def test_parametrized_weights_are_named():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    with pytest.raises(UserError, match=r"layers\.0\.parametrizations\.weight\."):
        initialize(stack(layer), 0)


def test_shared_parameters_are_filled_once():
    one, other = nn.Linear(3, 3), Bare()
    other.scale = one.bias
    initialize(stack(one, other), 5)
    alone = stack(nn.Linear(3, 3))
    initialize(alone, 5)
    assert torch.equal(one.weight, alone.layers["0"].weight)


def test_sharded_parameters_are_gathered_with_those_that_a_module_changes():
    gathered = []

    class Gather:
        def __init__(self, parameters):
            gathered.append(len(parameters))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    network = stack(nn.MultiheadAttention(8, 2), AffineBatchNorm(3))
    initialize(network, 5, Gather)
    assert gathered == [2, 2, 4]  # from the end: gain and bias, the last map's, and all of the attention's
    initialize(network, 5, Gather, writes=False)
    assert gathered == [2, 2, 4] * 2
