"""Triton kernels in Triton's interpreter, which needs no GPU, against torch's own operations; and who uses them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from bigsgan.config import NETWORKS
from bigsgan.doctor.kernels import (
    FILTERS,
    LAYOUTS,
    LIMIT,
    UNEVEN,
    choosing,
    coarse,
    excess,
    filter_excess,
    network_error,
    rectifier_excess,
)
from bigsgan.doctor.kernels import NETWORKS as WHOLE
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.models import convolutions, dual, fused, noise, r3gan
from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.models.stylegan2_layers import rectify_biased
from tests.fused import by_turns, compiled, fresh_kernels, interpreting
from tests.tiny import TINY_GAMES, tiny_plan, zero

DOUBLE, HALVES = torch.float64, (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    with interpreting("fused", "noise"):
        yield


# --- compiling, before the interpreter runs: Triton 3.4's leaves its own functions in the language ---


@pytest.mark.slow
@pytest.mark.parametrize("dtype, last", [("fp32", False), ("bf16", True)])
def test_kernels_compile_for_a_gpu(dtype, last, tmp_path, monkeypatch):
    """What the interpreter runs need not be what the compiler takes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = fresh_kernels()
    tile = {"tile_rows": 16, "tile_columns": 64, "channels_last": last}
    for up, down in ((1, 1), (2, 1)):
        geometry = {"size": 4, "up": up, "down": down, "before": 1, "flipped": up == 1, "gain": 4.0}
        assert compiled(kernels._resample, dtype, **geometry, **tile)
    assert compiled(kernels._resample, dtype, **geometry, **tile, num_columns=1)  # which Triton makes a constant
    for limit in (None, LIMIT):
        assert compiled(kernels._rectify, dtype, slope=0.2, limit=limit, **tile)
        assert compiled(kernels._slopes, dtype, slope=0.2, limit=limit, tile=1024)


@pytest.mark.slow
@pytest.mark.parametrize("kind, dtype", [("uniform", "fp32"), ("normal", "fp32")])
def test_random_numbers_compile_for_a_gpu(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = fresh_kernels("noise_kernels")
    code = compiled(kernels._draw, dtype, kind=kind, tile_rows=4, tile_columns=256)
    assert code["cubin"]
    for rough in ("sqrt.approx", "lg2.approx", "sin.approx", "cos.approx"):  # Triton's own choice for some functions
        assert rough not in code["ptx"]


# --- values and derivatives ---


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name, layout", by_turns(FILTERS, LAYOUTS))
def test_filters(name, layout):
    assert filter_excess(name, (2, 3, 5, 7), layout, DOUBLE, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_filters_round_once(dtype):
    for name in ("image of G", "skip of D"):
        assert filter_excess(name, (1, 2, 4, 6), "contiguous", dtype, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", [(1, 2, 9, 70), (1, 70, 2, 9)])
def test_maps_of_more_than_one_tile(shape):
    layout = "channels_last" if shape[1] == 70 else "contiguous"
    assert filter_excess("convolution of G", shape, layout, DOUBLE, "cpu") <= 1
    wide = (shape[0], shape[1], 33, 40) if layout == "contiguous" else (1, 1100, 1, 2)
    assert rectifier_excess(LIMIT, wide, layout, DOUBLE, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, *HALVES])
def test_rectifier(limit, layout, dtype):
    assert rectifier_excess(limit, (2, 3, 5, 7), layout, dtype, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_rectifiers_of_other_families(slope, layout):
    inputs = [coarse((2, 3, 5, 7), 7), coarse((3,), 8)]
    assert excess(lambda x, b: convolutions.rectify_biased(x, b, slope), inputs, layout, DOUBLE) <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("resample, layout", by_turns([r3gan.upsample, r3gan.downsample], LAYOUTS))
def test_filters_of_r3gan(resample, layout):
    for dtype in (DOUBLE, torch.bfloat16):
        assert excess(resample, [coarse((2, 3, 6, 8), 7)], layout, dtype) <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_gradients_of_any_order():
    x = torch.randn(1, 2, 4, 4, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(2, dtype=DOUBLE, requires_grad=True)
    taps = torch.randn(4, 4, dtype=DOUBLE)

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = x.square()
        for name in ("image of G", "skip of D"):
            y = FILTERS[name](y, taps)
        return rectify_biased(y, bias, LIMIT).square()

    with choosing(kernels=True):
        assert torch.autograd.gradcheck(function, (x, bias), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (x, bias), fast_mode=True)


def filtering(name, taps):
    return lambda x: FILTERS[name](x, taps)


RESAMPLED = {
    **{name: filtering(name, UNEVEN) for name in FILTERS},
    "R3GAN, up": r3gan.upsample,
    "R3GAN, down": r3gan.downsample,
}


def tangents_of(resample, limit, direction, x, bias):
    """Of a filter and a rectifier between two squares."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (rectify_biased(resample(x.square()), bias, limit).square(),)

    return dual.end(dual.differentiate(function, *dual.flat(dual.begin((x,), direction))))[1]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", RESAMPLED)
def test_the_gradient_of_a_tangent_is_that_of_a_double_backward(name):
    """Of |g|^2 / 2, where g is the gradient at the input of the outputs' sum, and the tangent is along g."""
    x, bias = coarse((1, 2, 4, 4), 7).requires_grad_(), coarse((2,), 8).requires_grad_()
    with choosing(kernels=True):
        outputs = rectify_biased(RESAMPLED[name](x.square()), bias, None).square()
        (grads,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        expected = torch.autograd.grad(grads.square().sum() / 2, (x, bias))
        along = tangents_of(RESAMPLED[name], None, grads.detach(), x, bias)
        found = torch.autograd.grad(along.sum(), (x, bias))
    assert all(float(grad.norm()) > 0 for grad in expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_tangents_and_their_gradients():
    x, bias, taps = (torch.randn(shape, dtype=DOUBLE) for shape in ((1, 2, 4, 4), (2,), (4, 4)))
    direction, resample = torch.randn(x.shape, dtype=DOUBLE), filtering("image of G", taps)

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return rectify_biased(resample(x.square()), bias, LIMIT).square()

    tangent = partial(tangents_of, resample, LIMIT, direction)

    with choosing(kernels=True):
        step = 1e-6
        expected = (function(x + step * direction, bias) - function(x - step * direction, bias)) / (2 * step)
        torch.testing.assert_close(tangent(x, bias), expected, rtol=1e-5, atol=1e-7)
        assert torch.autograd.gradcheck(tangent, (x.requires_grad_(), bias.requires_grad_()), fast_mode=True)


@pytest.mark.usefixtures("interpreted")
def test_the_limit_has_no_slope_and_leaves_what_is_no_number():
    x = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -5.0, -8.0, torch.nan]).view(1, 1, 2, 4).requires_grad_()
    with choosing(kernels=True):
        y = rectify_biased(x, torch.zeros(1), 1.0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    expected = torch.tensor([1.0, 1.0, 0.5, 0.0, -0.2, -1.0, -1.0, torch.nan])
    torch.testing.assert_close(y.flatten(), expected, equal_nan=True)
    torch.testing.assert_close(grad.flatten(), torch.tensor([0.0, 0.0, 1.0, 0.2, 0.2, 0.0, 0.0, 0.0]))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name",
    ["float64", pytest.param("fp16 above", marks=pytest.mark.slow), pytest.param("bf16 above", marks=pytest.mark.slow)],
)
def test_whole_networks(name):
    assert network_error(name, "cpu") <= WHOLE[name][0]


# --- random numbers ---

SEEDS = torch.tensor([0, 3, 2**62 + 12345, 2**63 - 1, -1, 77])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("streams", [range(7, 8), range(0xADA00, 0xADA00 + 6), range(2**32, 2**32 + 1)], ids=str)
@pytest.mark.parametrize("num", [1, 2, 3, 300, pytest.param(1031, marks=pytest.mark.slow)])
def test_random_numbers(kind, streams, num):
    """Of one stream and of many, of tiles that are full and that are not."""
    strided = torch.stack([SEEDS, SEEDS.flip(0)], dim=1)[:, 0]
    plain, drawn = noise.draw(SEEDS, streams, num, kind), fused.kernels("noise").draw(strided, streams, num, kind)
    assert (drawn.shape, drawn.dtype) == (plain.shape, plain.dtype)
    assert drawn.is_contiguous()
    if kind == "normal":
        torch.testing.assert_close(drawn, plain, rtol=4e-7, atol=4e-7)  # numpy's logarithm, sine and cosine
    else:
        assert torch.equal(drawn, plain)
    assert not fused.kernels("noise").draw(SEEDS[:0], streams, num, kind).numel()


@pytest.mark.usefixtures("interpreted")
def test_layers_draw_by_the_kernel(monkeypatch):
    def drawn() -> list[torch.Tensor]:
        augmentation = AugmentationDraws(SEEDS, torch.float32)
        gate, grain = augmentation.gate("scale"), augmentation.normal("grain", 3, 2, 2)
        layers = [noise.normal(SEEDS, 5, (1, 3, 3)), noise.uniform(SEEDS, 5, (7,))]
        return [*layers, gate, grain, augmentation.normal("scale")]

    plain = drawn()
    with choosing(kernels=True, subject=fused.DRAWS), monkeypatch.context() as patch:
        patch.setattr(noise, "_words", lambda *arguments: pytest.fail("torch draws"))
        for own, other in zip(drawn(), plain, strict=True):
            torch.testing.assert_close(own, other, rtol=4e-7, atol=4e-7)


# --- the choice ---


@pytest.fixture
def undecided() -> Iterator[None]:
    for cached in (fused._decide, fused._log_once):
        cached.cache_clear()
    yield
    for cached in (fused._decide, fused._log_once):
        cached.cache_clear()


@pytest.mark.usefixtures("undecided")
def test_on_a_cpu_the_log_says_once_that_torch_computes(caplog):
    with caplog.at_level(logging.INFO, "bigsgan"):
        for dtype in (torch.float32, torch.float16, torch.float32):
            assert not fused.used_for(torch.zeros(1, dtype=dtype))
        assert not fused.used_for(torch.zeros(1, device="meta"))
    message = "filters and rectifiers of feature maps: torch's own operations, as tensors are not on a GPU"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", message)]


@pytest.mark.usefixtures("undecided")
def test_on_a_gpu_whatever_fails_leaves_the_work_to_torch(caplog, monkeypatch):
    def broken(name: str) -> ModuleType:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(fused, "kernels", broken)
    gpu = torch.device("cuda", 0)
    with caplog.at_level(logging.INFO, "bigsgan"):
        found = fused.obstacle(gpu, torch.float32)
    assert found == "the kernels do not work here for torch.float32 (RuntimeError: Failed to find C compiler.)"
    assert [record.getMessage().partition(", as ")[2] for record in caplog.records] == [found]


@pytest.mark.usefixtures("undecided")
def test_an_environment_variable_turns_the_kernels_off(monkeypatch):
    monkeypatch.setattr(fused, "kernels", lambda name: pytest.fail("loaded"))
    monkeypatch.setenv("BIGSGAN_FUSED", "0")
    assert fused.obstacle(torch.device("cuda", 0), torch.float32) == "BIGSGAN_FUSED is 0"


def tier_of(family: str) -> Any:
    """BigGAN's D is compiled in the quick tier, other networks in the slow one, variants in the nightly one."""
    if family.startswith(("biggan_", "dcgan_", "stylegan2_", "pix2pix_")) and family != "biggan_deep":
        return pytest.param(family, marks=pytest.mark.nightly)
    return pytest.param(family, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("network", [pytest.param("generator", marks=pytest.mark.nightly), "discriminator"])
@pytest.mark.parametrize("family", ["biggan", *(tier_of(name) for name in TINY_GAMES)])
def test_a_compiled_network_is_one_graph(tmp_path, family, network):
    """Though whether kernels work is asked, found out and logged in the middle of it."""
    plan = tiny_plan(tmp_path, 1, TINY_GAMES.get(family, []), dict.fromkeys(NETWORKS, zero(0)))
    stack = build_network(plan.recipe, network)
    initialize(stack, 1)
    generator = torch.Generator().manual_seed(2)
    inputs = [
        torch.randn(each.shape, generator=generator)
        if each.is_floating_point()
        else torch.arange(len(each)) % max(1, plan.recipe.data.num_classes)
        for each in meta_inputs(plan, network, 4)
    ]
    torch.compiler.reset()
    compiled = torch.compile(stack, dynamic=False, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), stack(*inputs))
