"""Kernels that pool and upsample, in Triton's interpreter, against torch's operations in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bigsgan.doctor.kernels import RESIZED, choosing, coarse, laid_out, resized_excess
from bigsgan.models import dual, fused, resizing
from tests.fused import by_turns, compiled, fresh_kernels, interpreting


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    with interpreting("resizing"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["_pool", "_spread", "_split", "_join"])
def test_kernels_compile_for_a_gpu(kernel, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = fresh_kernels("resizing_kernels")
    option = {"_split": "own", "_join": None}.get(kernel, "adds")
    for given in [{option: False}, {option: True}] if option else [{}]:
        assert compiled(getattr(kernels, kernel), dtype, **given, tile_rows=16, tile_columns=64)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name, shape", by_turns(RESIZED, [(2, 5, 6, 4), (1, 65, 2, 10), (3, 32, 4, 12)]))
def test_values_and_derivatives_are_those_of_torch(name, shape):
    """Of parts of a tile, of two tiles across, and of two tiles below each other."""
    assert resized_excess(name, shape, torch.float64, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name, dtype", by_turns(RESIZED, [torch.float32, torch.float16, torch.bfloat16]))
def test_kernels_round_once(name, dtype):
    assert resized_excess(name, (2, 5, 6, 4), dtype, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", RESIZED)
def test_torch_does_not_compute_where_kernels_do(name, monkeypatch):
    x, bias, small = coarse((2, 3, 4, 4), 0), coarse((3,), 1), coarse((2, 3, 2, 2), 2)
    expected = RESIZED[name](x, bias, small)
    for taken in ("avg_pool2d", "interpolate", "relu"):
        monkeypatch.setattr(resizing.F, taken, lambda *arguments, **options: pytest.fail("torch computes"))
    with choosing(True, fused.SIZES):
        found = RESIZED[name](laid_out(x, "channels_last"), bias, small)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("given", ["tangent", "contiguous", "odd"])
def test_torch_computes_what_kernels_do_not_take(name, given):
    """The same values, with tangents if there are any."""
    sides = (2, 3, 5, 4) if given == "odd" and name in ("pooled", "pooled beside") else (2, 3, 4, 4)
    x, bias, small = coarse(sides, 0), coarse((3,), 1), coarse((2, 3, 2, 2), 2)
    direction = coarse(sides, 3)
    calls = []
    for kernels in (False, True):
        at = x if given == "contiguous" else laid_out(x, "channels_last")
        with choosing(kernels, fused.SIZES):
            if given == "tangent":
                carry = dual.begin((at,), direction)
                ended = dual.end(dual.differentiate(lambda h: (RESIZED[name](h, bias, small),), *dual.flat(carry)))
                calls.append(ended)
            else:
                calls.append((RESIZED[name](at, bias, small),))
    for found, expected in zip(*reversed(calls), strict=True):
        assert expected.any()
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("interpreted")
def test_what_is_no_number_stays_so():
    x = laid_out(torch.tensor([[torch.nan, -1.0], [2.0, 0.0]]).expand(1, 2, 2, 2), "channels_last").requires_grad_()
    with choosing(True, fused.SIZES):
        kept, pooled = resizing.rectify_and_pool_average(x)
    (grad,) = torch.autograd.grad(kept.sum(), x)
    torch.testing.assert_close(kept[0, 0], torch.tensor([[torch.nan, 0.0], [2.0, 0.0]]), equal_nan=True)
    assert pooled.isnan().all()
    assert grad[0, 0].tolist() == [[1.0, 0.0], [1.0, 0.0]]
