"""Exact penalties differentiate gradients: each family's whole discriminator against finite differences, in float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from tests.tiny import TINY_GAMES, awake, tiny_recipe

BIGGAN = {"biggan": ["discriminator={channels: 2, attention: [8]}"]}


QUICK = ("biggan", "stylegan2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in (*BIGGAN, *TINY_GAMES)]
)
def test_discriminators_are_differentiable_twice(family, tmp_path: Path):
    recipe = tiny_recipe(tmp_path, *{**BIGGAN, **TINY_GAMES}[family])
    with awake():
        network = build_network(recipe, "discriminator")
        initialize(network, 1)
    network.double()
    with torch.no_grad():
        for parameter in network.parameters():  # a bias of 0 leaves rectifiers at their kink where their input is 0
            parameter += 0.1 * torch.randn(parameter.shape)
    network.checkpointing = False
    for module in network.modules():
        if hasattr(module, "exact"):
            module.exact = True
    size = recipe.data.side
    images = torch.tanh(torch.randn(4, recipe.judged_channels, size, size)).double().requires_grad_()
    conditions = [torch.arange(4) if recipe.data.num_classes else torch.zeros(4, dtype=torch.int64)]
    if recipe.data.paired:
        conditions.append(torch.randn(4, recipe.data.input_channels, size, size).double())
    if recipe.discriminator_reads_seeds:
        conditions.append(torch.arange(4) * 7919 + 5)
    names = [name for name, _ in network.named_parameters()]

    def logits(x: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(network, state, (x, *conditions))

    inputs = (images, *network.parameters())
    assert logits(*inputs).dtype == torch.float64
    assert torch.autograd.gradcheck(logits, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(logits, inputs, fast_mode=True)
