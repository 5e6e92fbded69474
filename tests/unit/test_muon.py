"""Muon's rule, its numbers against torch's, who does the work, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bigsgan.config import NETWORKS
from bigsgan.config.families import FAMILIES
from bigsgan.config.sections import Muon as MuonSection
from bigsgan.config.sections import Optimizer
from bigsgan.doctor.games import TINY_GAMES, stages, tiny_plan, tiny_recipe, zero
from bigsgan.engines import muon
from bigsgan.engines.base import Piece, Rates
from bigsgan.engines.deepspeed_config import checked_config
from bigsgan.engines.optimizer import build_torch_optimizer, set_rates
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta
from bigsgan.planner.states import build_states

MUON = [f"optimizer.{network}={{kind: muon, lr: 1e-3, betas: [0.5, 0.9]}}" for network in NETWORKS]
GAT = [*(text for text in TINY_GAMES["gat"] if not text.startswith("optimizer.")), *MUON]
IN_BLOCKS = ("attention.qkv", "attention.out", "perceptron.expand", "perceptron.contract")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(muon.comm, "device", lambda: torch.device("cpu"))


def names_of(tmp_path, game, network):
    overrides = [text for text in TINY_GAMES[game] if not text.startswith("optimizer.")]
    return {name for name, _ in network_on_meta(tiny_recipe(tmp_path, *overrides), network).named_matrices()}


def test_matrices_are_the_linear_maps_of_blocks(tmp_path):
    """The generator's layers are a mapping, two blocks, a head, two blocks, a head; layer 0 of GAT's D makes noise."""
    modulated = (*IN_BLOCKS, "modulation.linear")
    expected = {f"layers.{i}.{part}.weight" for i in (1, 2, 4, 5) for part in modulated}
    assert names_of(tmp_path, "gat", "generator") == expected
    assert names_of(tmp_path, "gat", "discriminator") == {
        f"layers.{i}.{part}.weight" for i in (2, 3) for part in IN_BLOCKS
    }
    expected = {f"layers.{i}.{part}.weight" for i in (1, 3) for part in modulated}
    assert names_of(tmp_path, "cat", "generator") == expected


def test_a_stage_has_those_of_its_layers(tmp_path):
    network = network_on_meta(tiny_recipe(tmp_path, *GAT), "generator")
    assert {name.split(".")[1] for name, _ in network.part(2, 5).named_matrices()} == {"2", "4"}
    assert not network.part(0, 1).matrices()


OPTIONS = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "ns_coefficients": [3.0, -3.2, 1.2], "eps": 1e-6}


class Stack(nn.Module):
    """Parameters of which those with two dimensions are matrices."""

    def __init__(self, shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        self.own = nn.ParameterList(nn.Parameter(each) for each in drawn)

    def matrices(self):
        return [matrix for _, matrix in self.named_matrices()]

    def named_matrices(self):
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.dim() == 2]


def stepped(optimizers, stack, rates=(), factors=()):
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for parameter in stack.own:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer, multiplier in optimizers:
            if rates:
                set_rates(optimizer, Rates(rates[number] * multiplier, 0.7, factors))
            optimizer.step()
    return list(stack.own)


SHAPES = [(9, 4), (4, 9), (6, 6), (5,), (1, 1)]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize("rates", [(), (0.1, 0.01, 0.2, 0.05)], ids=["constant", "moving"])
def test_it_is_torchs(options, adjust, rates):
    """Matrices to the last bit, with every option, and with a learning rate and a beta2 that move."""
    if not ratio_is_known(adjust):
        pytest.skip("this torch does not know it")
    own, theirs = Stack(SHAPES), Stack(SHAPES)
    told = {"lr_multiplier": 0.5, "adjust_lr_fn": adjust, **options}
    settings = {"kind": "muon", "lr": 0.02, "betas": [0.5, 0.9], "weight_decay": 0.3, "muon": told}
    found = stepped([(build_torch_optimizer(Optimizer.model_validate(settings), own), 1.0)], own, rates)
    vectors = [parameter for parameter in theirs.own if parameter.dim() == 1]
    expected = stepped(
        [
            (torch.optim.Muon(theirs.matrices(), 0.01, 0.3, adjust_lr_fn=adjust, **options), 0.5),
            (torch.optim.AdamW(vectors, 0.02, (0.5, 0.9), weight_decay=0.3, fused=True), 1.0),
        ],
        theirs,
        rates,
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other) if mine.dim() == 2 else assert_close(mine, other) is None


def ratio_is_known(adjust):
    """Whether torch has the adjustment; ``spectral_unclamped`` is younger than the others."""
    try:
        torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], adjust_lr_fn=adjust)
    except ValueError:
        return False
    return True


def test_the_defaults_are_torchs():
    own, theirs = MuonSection(), torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults
    for key in ("momentum", "nesterov", "ns_steps", "eps"):
        assert getattr(own, key) == theirs[key]
    assert own.ns_coefficients == list(theirs["ns_coefficients"])


def placed(parts, shape=(8, 8), num=12):
    """Places of equal matrices, of which rank r has ``parts(i)[r]`` elements."""
    shapes = {str(i): torch.Size(shape) for i in range(num)}
    found = {str(i): [(0, length) for length in parts(i)] for i in range(num)}
    return muon._Places(shapes, found, {}, {}), list(shapes)


def test_each_matrix_has_one_owner_and_the_work_is_shared():
    for parts in (lambda i: [64] * 4, lambda i: [16] * 4):  # copies, and equal parts
        places, names = placed(parts)
        owners = places.owners(names)
        assert owners.keys() == set(names)
        assert Counter(owners.values()) == dict.fromkeys(range(4), 3)
    places, names = placed(lambda i: [64 if rank == i // 3 else 0 for rank in range(4)])
    assert places.owners(names) == {str(i): i // 3 for i in range(12)}  # nothing has to travel


def test_an_owner_of_most_has_less_of_the_others():
    places, names = placed(lambda i: [64, 0] if i == 0 else [32, 32], num=4)
    owners = places.owners(names)
    assert owners["0"] == 0
    assert Counter(owners.values()) == {0: 2, 1: 2}


def test_state_goes_to_whom_it_belongs():
    """A checkpoint has all kinds; another layout asks by the tensor, even for one that has nothing but padding."""
    stack = Stack([(2, 2), (3,)])
    settings = {"kind": "muon", "lr": 0.02, "betas": [0.5, 0.9]}
    optimizer = build_torch_optimizer(Optimizer.model_validate(settings), stack)
    flat, vector = torch.zeros(4), torch.zeros(3)
    pieces = [[[Piece("a", 0, 4, 0)], [Piece("b", 0, 3, 0)]], [[], [Piece("b", 0, 3, 0)]]]
    optimizer._place([flat, vector], {"a": torch.Size([2, 2])}, pieces, rank=1)
    state = {"step": 3, "exp_avg": flat, "exp_avg_sq": flat, "momentum_buffer": flat}
    assert optimizer.state_of(flat, state).keys() == {"momentum_buffer"}
    assert optimizer.state_of(vector, state).keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_the_planner_counts_one_number_for_an_element_of_a_matrix(tmp_path):
    plan = tiny_plan(tmp_path, 2, GAT, dict.fromkeys(NETWORKS, zero(1)))
    found = build_states(plan, "generator", [800, 160, 40, 24], 800).device
    assert found["masters"] == 4 * 512
    assert found["optimizer"] == 4 * (400 * 1 + 112 * 2)
    adamw = [text.replace("muon", "adamw") for text in GAT]
    plan = tiny_plan(tmp_path, 2, adamw, dict.fromkeys(NETWORKS, zero(1)))
    assert build_states(plan, "generator", [800, 160, 40, 24], 800).device["optimizer"] == 4 * 512 * 2


def refused(tmp_path, overrides):
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("family", [family for family, (each, _) in FAMILIES.items() if not each.is_transformer])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_without_blocks_are_refused(tmp_path, network, family):
    """Convolutions above all, and the linear maps of perceptrons, which are none of a transformer."""
    game = [text for text in TINY_GAMES.get(family, []) if not text.startswith("optimizer.")]
    (own,) = (text for text in MUON if text.startswith(f"optimizer.{network}"))
    assert refused(tmp_path, [*game, own]) == (
        f"optimizer.{network}.kind: must be adam, adamw, sgd or rmsprop with {network}.family={family}, got 'muon' "
        f"(Muon is for the matrices of a transformer's blocks); set optimizer.{network}.kind=adamw, or "
        f"{network}.family to cat, dit{', features' * (network == 'generator')} or gat"
    )


@pytest.mark.parametrize("kind", ["muon", "rmsprop"])
def test_deepspeeds_own_adam_on_the_host_is_refused(tmp_path, kind):
    overrides = [text.replace("muon", kind).replace("0.5, 0.9]", "0.0, 0.9]") for text in GAT]
    host = zero(2, zero={"offload_optimizer": {"device": "cpu"}}, zero_force_ds_cpu_optimizer=True)
    with pytest.raises(UserError, match=rf"zero_force_ds_cpu_optimizer: must be false with .*={kind}, got true"):
        tiny_plan(tmp_path, 2, overrides, {"generator": host, "discriminator": zero(1)})


def test_a_drive_is_refused(tmp_path):
    nvme = zero(3, zero={"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}})
    with pytest.raises(UserError, match=r"offload_optimizer\.device: must be cpu with .*\.kind=muon, got 'nvme'"):
        tiny_plan(tmp_path, 2, GAT, {"generator": nvme, "discriminator": zero(1)})


def test_stages_that_would_wait_for_each_other_are_refused(tmp_path):
    ds = {"generator": zero(1, zero={"reduce_scatter": False}), "discriminator": zero(1)}
    tiny_plan(tmp_path, 2, GAT, ds)
    with pytest.raises(UserError, match=r"optimizer\.generator\.kind: .* with these pipeline stages, got 'muon'"):
        tiny_plan(tmp_path, 2, [*GAT, *stages(2, 1)], ds)


def test_a_torch_without_it_is_refused(tmp_path, monkeypatch):
    plan = tiny_plan(tmp_path, 1, GAT, dict.fromkeys(NETWORKS, zero(0)))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"^optimizer\.generator\.kind: 'muon' needs torch 2\.9 or later, and this is "):
        checked_config(plan, "generator")
