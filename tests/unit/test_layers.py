"""Spectral norm, orthogonal regularization, attention and upsampling, against torch's layers and written formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from bigsgan.models import initial
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.initial import draw_orthogonal
from bigsgan.models.layers import (
    SelfAttention,
    SpectralConv2d,
    SpectralEmbedding,
    SpectralLayer,
    SpectralLinear,
    moving_state,
)
from bigsgan.models.network import initialize
from bigsgan.models.resizing import upsample_nearest

SPECTRAL: dict[str, Callable[[], tuple[SpectralLayer, Any, Tensor]]] = {
    "conv3": lambda: (SpectralConv2d(3, 5, 3), nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 6, 6)),
    "linear": lambda: (SpectralLinear(7, 5), nn.Linear(7, 5), torch.randn(4, 7)),
    "embedding": lambda: (SpectralEmbedding(6, 4), nn.Embedding(6, 4), torch.tensor([0, 5, 5, 2])),
}


@torch.no_grad()
def randomize(layer: SpectralLayer) -> None:
    """Give a weight that is not orthogonal, with vectors that are not singular but keep sigma away from 0."""
    for parameter in layer.parameters():
        parameter.normal_()
    layer.v.copy_(F.normalize(torch.randn_like(layer.v), dim=0))
    nearest = F.normalize(layer.weight.flatten(1) @ layer.v, dim=0)
    layer.u.copy_(F.normalize(nearest + F.normalize(torch.randn_like(layer.u), dim=0) / 2, dim=0))


@pytest.mark.parametrize("kind", SPECTRAL)
def test_spectral_layers_compute_as_torchs_parametrization(kind):
    ours, theirs, x = SPECTRAL[kind]()
    randomize(ours)
    with moving_state([ours], True):
        result = ours(x)
    theirs.load_state_dict(dict(ours.named_parameters()))
    parametrizations.spectral_norm(theirs)
    norm, original = theirs.parametrizations.weight[0], theirs.parametrizations.weight.original
    norm._u.copy_(ours.u), norm._v.copy_(ours.v)
    theirs.eval()  # reuses its vectors
    expected = theirs(x)
    assert_close(result, expected)
    direction = torch.randn_like(result)
    (result * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_close(ours.weight.grad, original.grad)
    if ours.bias is not None:
        assert_close(ours.bias.grad, theirs.bias.grad)


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("kind", SPECTRAL)
def test_power_iteration_is_torchs_on_the_transposed_matrix(kind, iterations):
    # torch moves u first and we v first, so that its iteration of the transposed matrix is ours with u and v exchanged.
    ours, _, x = SPECTRAL[kind]()
    randomize(ours)
    rows, columns = ours.weight.flatten(1).shape
    theirs: Any = nn.Linear(rows, columns, bias=False)
    theirs.weight = nn.Parameter(ours.weight.detach().flatten(1).T.clone())
    parametrizations.spectral_norm(theirs)
    norm = theirs.parametrizations.weight[0]
    norm._u.copy_(ours.v), norm._v.copy_(ours.u)
    for _ in range(iterations):
        with moving_state([ours], True):
            ours(x)
        expected = theirs.weight
    assert_close(ours.v, norm._u)
    assert_close(ours.u, norm._v)
    assert_close(ours.normalized_weight().flatten(1), expected.T)


@pytest.mark.parametrize("kind", [*SPECTRAL, "batch"])
def test_state_moves_only_where_it_may(kind):
    layer, x = (BatchStatistics(3), torch.randn(2, 3, 4, 4)) if kind == "batch" else SPECTRAL[kind]()[::2]
    initialize(layer, 0)
    if isinstance(layer, SpectralLayer):
        randomize(layer)
    before = [buffer.clone() for buffer in layer.buffers()]
    layer(x)
    with torch.no_grad():
        layer(x)
    layer.eval()
    layer(x)
    layer.train()
    with moving_state([layer], False):
        layer(x)
    with pytest.raises(ZeroDivisionError), moving_state([layer], True):
        raise ZeroDivisionError
    layer(x)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    with moving_state([layer], True), torch.no_grad():  # standing statistics
        layer(x)
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


@pytest.mark.parametrize("kind", SPECTRAL)
def test_sigma_is_float32_under_bfloat16(kind):
    layer, _, x = SPECTRAL[kind]()
    randomize(layer)
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    with moving_state([layer], True):
        assert layer(x).dtype == torch.bfloat16
    assert layer.u.dtype == layer.v.dtype == torch.float32
    weight = layer.weight.detach().double()
    sigma = layer.u.double() @ weight.flatten(1) @ layer.v.double()
    assert_close(layer.u.norm(), torch.tensor(1.0))  # not rounded to 8 bits
    # Equal but for quotients that lie within float32's rounding of the middle between two bfloat16 numbers.
    same = layer.normalized_weight() == (weight / sigma).bfloat16()
    assert same.float().mean() > 0.95


@pytest.mark.parametrize("kind", SPECTRAL)
def test_recomputation_moves_nothing_and_changes_no_gradient(kind):
    layer, _, x = SPECTRAL[kind]()
    randomize(layer)
    start = [buffer.clone() for buffer in layer.buffers()]
    found = []
    for recompute in (False, True):
        layer.u.copy_(start[0]), layer.v.copy_(start[1])
        with moving_state([layer], True):
            result = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        grads = torch.autograd.grad(result.square().sum(), list(layer.parameters()))
        found.append([result, *grads, layer.u.clone(), layer.v.clone()])
    assert_close(found[1], found[0], rtol=0, atol=0)
    matrix = layer.weight.detach().flatten(1)
    v = F.normalize(matrix.T @ start[0], dim=0)  # one iteration, not two
    assert_close(layer.v, v)
    assert_close(layer.u, F.normalize(matrix @ v, dim=0))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (6, 90)])
def test_an_orthogonal_matrix_is_torchs(shape):
    """Bit for bit, and in the memory order of a weight."""
    expected = torch.nn.init.orthogonal_(torch.empty(shape), generator=torch.Generator().manual_seed(7))
    found = draw_orthogonal(shape, torch.Generator().manual_seed(7), torch.device("cpu"))
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_only_large_matrices_are_made_orthogonal_elsewhere(monkeypatch):
    """The meta device shows where; numbers are drawn on the CPU all the same."""
    monkeypatch.setattr(initial, "_LARGE", 36)
    generator, meta = torch.Generator(), torch.device("meta")
    assert draw_orthogonal((3, 3), generator, meta).device.type == "cpu"
    before = generator.get_state()
    assert draw_orthogonal((3, 4), generator, meta).device.type == "meta"
    assert not torch.equal(generator.get_state(), before)


def orthogonal_penalty(weight: Tensor, strength: float) -> Tensor:
    matrix = weight.flatten(1)
    return strength * (matrix @ matrix.T * (1 - torch.eye(len(matrix)))).square().sum()


@pytest.mark.parametrize("kind", SPECTRAL)
def test_orthogonal_regularization_adds_its_gradient(kind):
    layer, _, x = SPECTRAL[kind]()
    randomize(layer)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    (expected,) = torch.autograd.grad(orthogonal_penalty(layer.weight, 0.03), layer.weight)
    layer.orthogonal, layer.gradient_scale = 0.03, 0.5
    for _ in range(2):  # two micro-batches, each scaled by half, are one penalty
        (0.5 * layer(x).square().sum()).backward()
    assert expected.norm() > 0.1
    assert_close(layer.weight.grad, plain + expected)


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (7, 7)])
def test_orthogonal_regularization_of_wide_and_tall_weights(shape):
    layer = SpectralLinear(shape[1], shape[0])
    randomize(layer)
    (expected,) = torch.autograd.grad(orthogonal_penalty(layer.weight, 0.03), layer.weight)
    layer.orthogonal = 0.03
    assert_close(torch.autograd.grad(0 * layer(torch.ones(1, shape[1])).sum(), layer.weight)[0], expected)


def test_orthogonal_regularization_takes_the_smaller_product():
    layer = SpectralLinear(2, 10**6)  # W W^T would take 4 TB
    layer.weight.data.normal_()
    layer.weight.data[1:] = 0
    layer.u.zero_(), layer.v.zero_()
    layer.u[0] = layer.v[0] = 1
    layer.orthogonal = 0.03
    (grad,) = torch.autograd.grad(0 * layer(torch.ones(1, 2)).sum(), layer.weight)
    assert_close(grad, torch.zeros_like(grad))  # of a single filter


def test_orthogonal_regularization_beside_a_gradient_penalty_counts_once():
    layer = SpectralLinear(7, 5)
    randomize(layer)
    x = torch.randn(4, 7, requires_grad=True)

    def loss():
        logits = layer(x).square().sum(dim=1)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return logits.mean() + slope.square().sum()

    expected = torch.autograd.grad(loss() + orthogonal_penalty(layer.weight, 0.1), layer.weight)[0]
    layer.orthogonal = 0.1
    assert_close(torch.autograd.grad(loss(), layer.weight)[0], expected)


def test_the_gradient_of_attentions_weights_lies_as_they_do(monkeypatch):
    """Transposed, softmax's backward pass copies it: 17 GB of an update of BigGAN-128 at 256 images."""
    layer = SelfAttention(16)
    initialize(layer, 0)
    found = []

    def softmax(scores, dim):
        weights = torch.nn.functional.softmax(scores, dim)
        weights.register_hook(lambda grad: found.append((grad.stride(), weights.stride())))
        return weights

    monkeypatch.setattr(torch, "softmax", softmax)
    with torch.no_grad():
        layer.gamma.fill_(1.0)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        layer(torch.randn(2, 16, 8, 8).to(memory_format=memory_format)).sum().backward()
    assert found == [((64 * 16, 16, 1),) * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compiled_upsampling_scatters_nothing(memory_format):
    """A scattered sum adds atomically on a GPU, in an order that differs from run to run."""
    torch.compiler.reset()
    x = torch.randn(2, 8, 5, 6).to(memory_format=memory_format)
    grads = torch.randn(2, 8, 10, 12).to(memory_format=memory_format)

    def pass_through(upsample):
        images = x.clone().requires_grad_(True)
        outputs = upsample(images * 2)
        outputs.backward(grads)
        return outputs.detach(), images.grad

    (outputs, found), code = run_and_get_code(pass_through, torch.compile(upsample_nearest, dynamic=False))
    expected, wanted = pass_through(lambda images: F.interpolate(images, scale_factor=2))
    assert len(code) == 2  # forward and backward
    assert not any("index_put" in each for each in code)
    assert torch.equal(outputs, expected)
    assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert outputs.is_contiguous(memory_format=memory_format)
    _, stock = run_and_get_code(
        pass_through, torch.compile(lambda images: F.interpolate(images, scale_factor=2), dynamic=False)
    )
    assert any("index_put" in each for each in stock)


def test_narrow_attention_has_a_channel_where_an_eighth_would_be_none():
    layer = SelfAttention(4)
    assert layer.query.weight.shape[0] == layer.key.weight.shape[0] == 1
