"""Kernels of gain, bias and ReLU, in Triton's interpreter, against torch's operations in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from bigsgan.doctor.kernels import choosing, coarse, laid_out, modulation_excess, orders
from bigsgan.models import fused, modulation
from bigsgan.models.modulation import modulate_and_rectify
from tests.fused import by_turns, compiled, fresh_kernels, interpreting


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    with interpreting("modulation"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("dtype, doubles", [("fp32", False), ("bf16", True)])
def test_kernels_compile_for_a_gpu(dtype, doubles, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = fresh_kernels("modulation_kernels")
    assert compiled(kernels._modulate, dtype, doubles=doubles, tile_rows=32, tile_columns=32)
    assert compiled(kernels._differentiate, dtype, doubles=doubles, turns=8, tile_rows=32, tile_columns=32)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("upsamples", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 5, 6, 4), (1, 33, 2, 5), pytest.param((3, 4, 18, 17), marks=pytest.mark.slow)], ids=str
)
def test_values_and_gradients_are_those_of_torch(shape, shared, upsamples, monkeypatch):
    """Of parts of a tile, of two tiles across, and of two programs' sums; with one gain for all samples or for each."""
    with choosing(False):
        modulated = [modulate_and_rectify(coarse(shape, 0), *gains(shape, shared), upsamples)]
    monkeypatch.setattr(modulation.F, "relu", lambda x: pytest.fail("torch computes"))
    with choosing(True, fused.GAINS):
        modulated += [
            modulate_and_rectify(laid_out(coarse(shape, 0), "channels_last"), *gains(shape, shared), upsamples)
        ]
    assert torch.equal(*modulated)
    monkeypatch.undo()
    assert modulation_excess(shape, shared, upsamples, torch.float64, "cpu") <= 1


def gains(shape: tuple[int, ...], shared: bool) -> list[torch.Tensor]:
    return [coarse((1 if shared else shape[0], shape[1]), seed) for seed in (1, 2)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype, upsamples", by_turns([torch.float32, torch.float16, torch.bfloat16], [False, True]))
def test_kernels_round_once(dtype, upsamples):
    assert modulation_excess((2, 5, 6, 4), False, upsamples, dtype, "cpu") <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shared, upsamples", by_turns([False, True], [False, True]))
def test_gradients_of_gradients_are_those_of_torch(shared, upsamples):
    shape, found = (2, 3, 4, 4), []
    for kernels in (True, False):
        with choosing(kernels, fused.GAINS):
            given = [coarse(shape, 0), *gains(shape, shared)]
            found.append(orders(lambda *each: modulate_and_rectify(*each, upsamples), given, "channels_last"))
            leaves = [each.requires_grad_() for each in given]
            y = modulate_and_rectify(laid_out(leaves[0], "channels_last"), *leaves[1:], upsamples)
            grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            found[-1] += torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    assert_close(*found, rtol=1e-12, atol=1e-9)
    assert all(each.any() for each in found[0])


@pytest.mark.usefixtures("interpreted")
def test_what_is_no_number_stays_so():
    x = laid_out(torch.tensor([torch.nan, 2.0, -1.0, 0.5]).expand(1, 3, 2, 4), "channels_last")
    with choosing(True, fused.GAINS):
        y = modulate_and_rectify(x, torch.ones(1, 3), torch.zeros(1, 3))
    assert_close(y[0, 0, 0], torch.tensor([torch.nan, 2.0, 0.0, 0.5]), equal_nan=True)
