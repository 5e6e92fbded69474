"""Convolutions of half types on a GPU find the channels of a pixel side by side, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.models import convolutions
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from tests.tiny import FAMILIES, tiny_recipe

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

INSTANCE = ["generator.norm=instance", "discriminator.norm=instance"]


def test_the_order_follows_device_and_type():
    for device, dtype, wanted in [
        ("cpu", torch.bfloat16, False),
        ("cuda", torch.float32, False),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
    ]:
        assert convolutions.suits_tensor_cores(torch.device(device), dtype) == wanted


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
    recipe = tiny_recipe(tmp_path, *FAMILIES[family], *overrides)
    networks = [build_network(recipe, name) for name in ("generator", "discriminator")]
    for network in networks:
        initialize(network, 1)
        network.double()
    return recipe, networks


def trained(recipe: Any, networks: list[LayerStack]) -> list[Tensor]:
    """Logits of fakes, and all gradients, of four samples."""
    g, d = networks
    data = recipe.data
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(4) % max(data.num_classes, 1)
    if recipe.generator.paired:
        inputs = torch.randn(4, data.input_channels, data.resolution, data.resolution, generator=draw).double()
        logits = d(g(inputs, labels, torch.arange(4)), labels, inputs)
    else:
        logits = d(g(torch.randn(4, recipe.generator.latent_size, generator=draw).double(), labels), labels)
    parameters = [p for network in networks for p in network.parameters()]
    return [logits, *torch.autograd.grad(logits.square().sum(), parameters)]


@pytest.mark.parametrize(
    ("family", "overrides", "before", "now", "copies"),
    [
        ("dcgan", [], 12, 0, 0),
        ("dcgan_light", [], 9, 0, 0),
        ("pix2pix", [], 44, 0, 2),  # the input, and what D is given
        ("pix2pix_resnet", [], 38, 0, 2),
        ("pix2pix", INSTANCE, 44, 12, 24),  # torch's instance norm works on contiguous maps alone
        ("pix2pix_resnet", INSTANCE, 38, 10, 24),
    ],
)
def test_the_order_changes_no_number_and_stays(family, overrides, before, now, copies, tmp_path, monkeypatch):
    recipe, networks = built(family, overrides, tmp_path)
    with Turned() as contiguous:
        expected = trained(recipe, networks)
    monkeypatch.setattr(convolutions, "suits_tensor_cores", lambda device, dtype: True)
    with Turned() as last:
        found = trained(recipe, networks)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (contiguous.inside, contiguous.copies) == (before, 0)
    assert (last.inside, last.copies) == (now, copies)
