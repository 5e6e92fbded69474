"""On a GPU: networks in float32 and bf16, once and twice differentiated, against the same in float64 on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bigsgan.config import NETWORKS
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.models import convolutions
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from tests.tiny import FAMILIES, awake, tiny_plan, zero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
CLOSE = 1e-4
"""Relative norm of the difference: float32 has 6e-8, which second derivatives of ten layers make grow."""

NO_WORSE = 2.0
"""Error of what tensor cores are given in its place, to that of torch's own operations in bf16: roundings differ."""

GAMES: dict[str, list[str]] = {"biggan": [], **FAMILIES}


def built(network: str, overrides: list[str], directory: Path) -> tuple[LayerStack, list[Tensor]]:
    """A network and inputs of four samples, float64, on the CPU."""
    plan = tiny_plan(directory, 1, overrides, dict.fromkeys(NETWORKS, zero(0)))
    with awake():
        stack = build_network(plan.recipe, network)
        initialize(stack, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():  # a bias of 0 leaves rectifiers at their kink where their input is 0
            parameter += 0.1 * torch.randn(parameter.shape)
    inputs = [
        torch.randn(meta.shape) if meta.is_floating_point() else torch.zeros(meta.shape, dtype=meta.dtype)
        for meta in meta_inputs(plan, network, 4)
    ]
    stack.checkpointing = False
    return stack.double(), [x.double() if x.is_floating_point() else x for x in inputs]


def gradients(stack: LayerStack, inputs: list[Tensor], penalised: bool) -> list[Tensor]:
    """Of a weighted sum of the outputs, or of the squared norm of its gradient at the first input."""
    first = inputs[0].requires_grad_()
    outputs: Any = stack(*inputs)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device).view(outputs.shape)
    loss = (weights * outputs).sum()
    if penalised:
        (grad,) = torch.autograd.grad(loss, first, create_graph=True)
        loss = grad.square().sum()
    wanted = [p for p in stack.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("family", GAMES)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "network, penalised", [("generator", False), ("discriminator", False), ("discriminator", True)]
)
def test_gradients_are_those_of_float64(family, network, penalised, tmp_path):
    stack, inputs = built(network, GAMES[family], tmp_path)
    expected = torch.cat([g.flatten() for g in gradients(stack, inputs, penalised)])
    stack, inputs = built(network, GAMES[family], tmp_path)
    on_device = [x.to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in inputs]
    found = torch.cat([g.flatten().double().cpu() for g in gradients(stack.to(DEVICE).float(), on_device, penalised)])
    error = float((found - expected).norm() / expected.norm())
    print(f"{family} {network}{' twice' * penalised}: {error:.1e}")
    assert error <= CLOSE


@pytest.mark.parametrize("family", GAMES)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "network, penalised", [("generator", False), ("discriminator", False), ("discriminator", True)]
)
def test_what_tensor_cores_are_given_is_no_worse_than_torchs_own(family, network, penalised, tmp_path, monkeypatch):
    """Attention without weights, channels filled up, biases elsewhere, other orders: in bf16, which rounds it all."""
    exact = ["objective.r1={weight: 1}"] if penalised and "biggan" in family else []
    overrides = [*GAMES[family], *exact]
    stack, inputs = built(network, overrides, tmp_path)
    for tensor in (*stack.parameters(), *(x for x in inputs if x.is_floating_point())):
        tensor.data.copy_(tensor.data.bfloat16())
    state = copy.deepcopy(stack.state_dict())
    expected = torch.cat([g.flatten() for g in gradients(stack, inputs, penalised)])
    errors = []
    for suits in (lambda device, dtype: False, convolutions.suits_tensor_cores):
        monkeypatch.setattr(convolutions, "suits_tensor_cores", suits)
        stack.load_state_dict(state)
        stack.to(DEVICE)
        for module in stack.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.float())
        for parameter in stack.parameters():
            parameter.data = parameter.data.bfloat16()
        on_device = [x.detach().to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in inputs]
        found = torch.cat([g.flatten().double().cpu() for g in gradients(stack, on_device, penalised)])
        errors.append(float((found - expected).norm() / expected.norm()))
    print(f"{family} {network}{' twice' * penalised}: {errors[0]:.1e} and {errors[1]:.1e}")
    assert errors[1] <= NO_WORSE * errors[0]
