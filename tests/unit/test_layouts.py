"""Convolutions of half types on a GPU find the channels of a pixel side by side, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.models import convolutions
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, initialize
from tests.tiny import TINY_GAMES, awake, tiny_recipe

INSTANCE = ["generator.norm=instance", "discriminator.norm=instance"]


class Turned(TorchDispatchMode):
    """Counts what a kernel that wants the channels of a pixel side by side has to turn round first."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            maps = [args[0]] if func is torch.ops.aten.convolution.default else args[:2]
            self.inside += sum(not x.is_contiguous(memory_format=torch.channels_last) for x in maps)
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and args[0].dim() == 4:
            kept = args[0].is_contiguous(memory_format=torch.channels_last)
            result = func(*args, **(kwargs or {}))
            self.copies += result.is_contiguous(memory_format=torch.channels_last) != kept
            return result
        return func(*args, **(kwargs or {}))


def built(family: str, overrides: list[str], tmp_path: Any) -> tuple[Any, list[LayerStack]]:
    recipe = tiny_recipe(tmp_path, *{"biggan": [], **TINY_GAMES}[family], *overrides)
    with awake():
        networks = [build_network(recipe, name) for name in ("generator", "discriminator")]
        for network in networks:
            initialize(network, 1)
    for network in networks:
        network.double()
        with torch.no_grad():
            for parameter in network.parameters():  # a bias of 0 leaves rectifiers at their kink where their input is 0
                parameter += 0.1 * torch.randn(parameter.shape)
    return recipe, networks


def trained(recipe: Any, networks: list[LayerStack]) -> tuple[list[Tensor], Turned]:
    """Logits of fakes of four samples, all gradients, those of a penalty, and G's statistics afterwards.

    Counted is what comes before the penalty: torch's second derivatives see a weight's gradient as a convolution of
    samples, which have no order of their own.
    """
    g, d = networks
    data = recipe.data
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(4) % max(data.num_classes, 1)
    given: list[Tensor] = []
    if recipe.generator.paired:
        given = [torch.randn(4, data.input_channels, *data.resolution, generator=draw).double()]
        inputs = (*given, labels, torch.arange(4))
    else:
        inputs = (torch.randn(4, recipe.generator.latent_size, generator=draw).double(), labels)
        inputs = (*inputs, torch.arange(4)) if recipe.generator.draws else inputs
    parameters = [p for network in networks for p in network.parameters()]
    with moving_state(g.stateful_layers(), True), Turned() as turned:
        images = g(*inputs)
        logits = d(images, labels, *given)
        first = torch.autograd.grad(logits.square().sum(), parameters, retain_graph=True)
    (slopes,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    second = torch.autograd.grad(slopes.square().sum(), list(d.parameters()), allow_unused=True)
    return [logits, *first, *(grad for grad in second if grad is not None), *g.buffers()], turned


EXACT = ["objective.r1={weight: 1}"]


@pytest.mark.parametrize(
    ("family", "overrides", "before", "now"),
    [
        ("biggan", EXACT, None, None),  # whose maps are in order everywhere
        pytest.param("biggan_deep", EXACT, None, None, marks=pytest.mark.slow),
        pytest.param("biggan_light", EXACT, None, None, marks=pytest.mark.slow),
        ("biggan_unshared", EXACT, None, None),
        ("dcgan", [], (12, 0), (0, 0)),
        ("dcgan_light", [], (9, 0), (0, 0)),
        ("dcgan_spectral", [], (6, 0), (0, 0)),
        ("r3gan", [], (83, 0), (4, 15)),  # of filters, where Triton's, which keep the order, are not there
        ("stylegan2", [], (61, 0), (0, 3)),
        pytest.param(
            "stylegan2_architectures", [], (67, 0), (6, 3), marks=pytest.mark.slow
        ),  # filters of a single channel
        ("pix2pix", [], (44, 0), (0, 2)),  # the input, and what D is given
        ("pix2pix_resnet", [], (38, 0), (0, 2)),
        ("pix2pix", INSTANCE, (44, 0), (8, 23)),  # torch's instance norm works on contiguous maps alone
        ("pix2pix_resnet", INSTANCE, (38, 0), (6, 22)),
    ],
)
def test_the_order_changes_no_number_and_stays(family, overrides, before, now, tmp_path, monkeypatch):
    recipe, networks = built(family, overrides, tmp_path)
    state = [copy.deepcopy(network.state_dict()) for network in networks]
    expected, contiguous = trained(recipe, networks)
    for network, values in zip(networks, state, strict=True):
        network.load_state_dict(values)
    monkeypatch.setattr(convolutions, "suits_tensor_cores", lambda device, dtype: True)
    found, last = trained(recipe, networks)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    counts = [(turned.inside, turned.copies) for turned in (contiguous, last)]
    assert counts == [before or counts[0], now or counts[0]]
