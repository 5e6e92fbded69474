"""Spectral normalization's kernels in Triton's interpreter, against torch's operations in float64; who uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.doctor.kernels import choosing
from bigsgan.models import fused, spectral
from bigsgan.models.layers import SpectralConv2d, SpectralEmbedding, SpectralLayer, SpectralLinear, moving_state
from tests.fused import compiled, fresh_kernels, interpreting

LAYERS = {
    "filters": lambda: SpectralConv2d(5, 7, 3),
    "pixels": lambda: SpectralConv2d(6, 4, 1),
    "map": lambda: SpectralLinear(9, 3),
    "table": lambda: SpectralEmbedding(11, 4),
    "many rows": lambda: SpectralLinear(3, 2600),
    "many columns": lambda: SpectralConv2d(480, 2, 3),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
LARGE = ("many rows", "many columns")  # which take the interpreter a second or two
CELLS = [
    pytest.param(name, dtype, marks=pytest.mark.slow if dtype == torch.float32 else pytest.mark.nightly)
    if name in LARGE
    else pytest.param(name, dtype)
    for name in LAYERS
    for dtype in ROUNDING
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    with interpreting("spectral"):
        yield


def made(name: str, dtype: torch.dtype) -> SpectralLayer:
    """A layer with drawn weights and vectors after one step: of random vectors, the sum that is sigma may cancel."""
    layer = LAYERS[name]()
    generator = torch.Generator().manual_seed(0)
    layer.initialize(lambda _: generator)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        u, v = spectral.iterated(layer.as_matrix(layer.weight), layer.u, layer.eps)
        layer.u.copy_(u)
        layer.v.copy_(v)
    layer.weight.data = layer.weight.data.to(dtype)
    if dtype == torch.float64:
        layer.double()
    return layer


def reference(weight: Tensor, u: Tensor, v: Tensor, moving: bool, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """weight / sigma, u and v, in float64."""
    matrix = torch.block_diag(*weight.flatten(1).chunk(groups))
    if moving:
        v = F.normalize(matrix.detach().T @ u, dim=0)
        u = F.normalize(matrix.detach() @ v, dim=0)
    return weight / (u @ matrix @ v), u, v


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).norm() <= tolerance * expected.norm())


# --- compiling, before the interpreter runs ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["filters", "pixels", "map", "groups"])
def test_a_compiled_layer_goes_back_through_the_vectors_of_its_own_pass(name):
    """Far from the truth, so that one step more of the power iteration in the backward pass would show."""
    layer = SpectralConv2d(4, 4, 3, groups=2) if name == "groups" else LAYERS[name]()
    generator = torch.Generator().manual_seed(0)
    layer.double()
    with torch.no_grad():
        for tensor in (layer.weight, layer.u, layer.v):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        layer.u.div_(layer.u.norm())
    expected = layer.weight.detach().clone().requires_grad_(True)
    normalized, u, v = reference(expected, layer.u, layer.v, True, layer.groups)
    grad = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
    (normalized * grad).sum().backward()
    with moving_state([layer], True):
        found = torch.compile(layer.normalized_weight, fullgraph=True)()
    (found * grad).sum().backward()
    assert close(found, normalized, 1e-12)
    assert close(layer.u, u, 1e-12)
    assert close(layer.v, v, 1e-12)
    assert close(layer.weight.grad, expected.grad, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_compile_for_a_gpu(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = fresh_kernels("spectral_kernels")
    sizes = {"chunk": 512, "tile": 32, "wide": 128}
    assert compiled(kernels._multiply_rows, dtype, **sizes)["cubin"]
    assert compiled(kernels._multiply_columns, dtype, **sizes)["cubin"]
    for last in (False, True):
        for code in (
            compiled(kernels._divide, dtype, last=last, block=1024),
            compiled(kernels._sum_products, dtype, last=last, block=1024, turns=16),
            compiled(kernels._differentiate, dtype, last=last, block=1024, turns=16),
        ):
            assert code["cubin"]
            assert "div.full" not in code["ptx"]
    for moves, ends in ((True, False), (True, True), (False, True)):
        assert compiled(kernels._finish, "fp32", moves=moves, ends=ends, block=2048)["cubin"]


# --- values and derivatives ---


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("moving", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, dtype", CELLS)
def test_values_and_gradients(name, moving, dtype):
    layer, tolerance = made(name, dtype), ROUNDING[dtype]
    exact = layer.weight.detach().double().requires_grad_()
    expected, u, v = reference(exact, layer.u.double(), layer.v.double(), moving)
    with choosing(True, fused.NORMS), moving_state([layer], moving):
        found = layer.normalized_weight()
    assert found.dtype == dtype
    assert close(found.detach(), expected.detach(), tolerance)
    assert close(
        layer.sigma, (exact / expected).flatten()[0].detach(), ROUNDING[torch.promote_types(dtype, torch.float32)]
    )
    for buffer, vector in ((layer.u, u), (layer.v, v)):
        assert buffer.dtype == torch.promote_types(dtype, torch.float32)
        assert close(buffer, vector, 2e-6)
    direction = torch.randn(found.shape, dtype=torch.float64).to(dtype)
    for layout in (torch.contiguous_format, torch.channels_last)[: 1 + (found.dim() == 4)]:
        (own,) = torch.autograd.grad(found, layer.weight, direction.contiguous(memory_format=layout), retain_graph=True)
        (plain,) = torch.autograd.grad(expected, exact, direction.double(), retain_graph=True)
        assert own.is_contiguous()
        assert own.dtype == dtype
        assert close(own, plain, tolerance)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["filters", pytest.param("map", marks=pytest.mark.slow)])
def test_gradients_of_the_second_order(name):
    layer = made(name, torch.float64)

    def function(weight: Tensor) -> Tensor:
        return spectral.normalized(weight, layer.u, layer.v, False, layer.eps)[0].square()

    assert torch.autograd.gradcheck(function, layer.weight, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, layer.weight, fast_mode=True)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_recomputation_finds_the_same_bits():
    for name in LAYERS:
        layer = made(name, torch.float32)
        with choosing(True, fused.NORMS):
            with moving_state([layer], True):
                first = layer.normalized_weight()
            assert torch.equal(layer.normalized_weight(), first)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_vectors_that_move_leave_those_of_earlier_passes():
    """A pass that moved has copies for its gradient; one that did not learns that its vectors are gone."""
    layer = made("filters", torch.float32)
    with choosing(True, fused.NORMS):
        with moving_state([layer], True):
            first = layer.normalized_weight()
            expected = torch.autograd.grad(first.square().sum(), layer.weight, retain_graph=True)
            layer.normalized_weight()
        assert torch.equal(torch.autograd.grad(first.square().sum(), layer.weight)[0], expected[0])
        still = layer.normalized_weight()
        with moving_state([layer], True):
            layer.normalized_weight()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            still.sum().backward()


@pytest.mark.usefixtures("interpreted")
def test_filters_have_their_channels_last():
    with choosing(True, fused.NORMS):
        weight = made("filters", torch.float32).normalized_weight()
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_who_uses_them(monkeypatch):
    with choosing(True, fused.NORMS):
        assert spectral.used_for(torch.ones(3, 4))
        assert not spectral.used_for(torch.ones(3, 4).T)
        assert not spectral.used_for(torch.ones(3, 4, device="meta"))
        grouped = SpectralConv2d(4, 4, 3, groups=2)
        generator = torch.Generator().manual_seed(0)
        grouped.initialize(lambda _: generator)
        monkeypatch.setattr(spectral, "normalized", lambda *arguments: pytest.fail("of a block-diagonal matrix"))
        grouped.normalized_weight()
    assert fused.obstacle(torch.device("cpu"), torch.float32, fused.NORMS) == "tensors are not on a GPU"
