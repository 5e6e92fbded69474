"""Filters against SciPy's polyphase resampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import upfirdn
from torch.testing import assert_close

from bigsgan.models import fir

TAPS = np.array([1.0, 3.0, 3.0, 1.0]) / 8
UNEVEN = np.array([[1.0, 2.0, 5.0, 4.0], [0.0, 1.0, 2.0, 3.0], [7.0, 1.0, 0.0, 2.0], [3.0, 1.0, 4.0, 1.0]])


def standard() -> torch.Tensor:
    return fir.filter_like(torch.empty((), dtype=torch.float64))


def resampled(x: torch.Tensor, up: int, down: int, before: int, length: int) -> torch.Tensor:
    """Each row and column by SciPy: zeros inserted, ``before`` zeros put in front, and ``length`` pixels kept."""

    def one(signal: np.ndarray) -> np.ndarray:
        whole = upfirdn(TAPS, signal, up=up)
        start = len(TAPS) - 1 - before
        kept = np.zeros(length * down)
        available = whole[start : start + length * down]
        kept[: len(available)] = available
        return kept[::down]

    rows = np.apply_along_axis(one, 3, x.numpy())
    return torch.from_numpy(np.apply_along_axis(one, 2, rows))


def test_the_filter_keeps_a_constant():
    assert_close(standard(), torch.from_numpy(np.outer(TAPS, TAPS)), rtol=0, atol=0)


def test_upsampling():
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert_close(fir.upsample(x, standard()), 4 * resampled(x, up=2, down=1, before=2, length=10))
    inner = fir.upsample(torch.ones(1, 1, 6, 6), standard().float())[:, :, 2:-2, 2:-2]
    assert_close(inner, torch.ones_like(inner))


def test_downsampling():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert_close(fir.downsample(x, standard()), resampled(x, up=1, down=2, before=1, length=4))


@pytest.mark.parametrize("padding, length", [(1, 5), (2, 7), (0, 3)])
def test_blurring(padding, length):
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    expected = 4 * resampled(x, up=1, down=1, before=padding, length=length)
    assert_close(fir.blur(x, standard(), padding, gain=4.0), expected)


def test_a_filter_without_symmetry_is_convolved_not_correlated():
    kernel = torch.from_numpy(UNEVEN)
    impulse = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    impulse[0, 0, 3, 3] = 1
    assert_close(fir.blur(impulse, kernel, padding=3)[0, 0, 3:7, 3:7], kernel)
    assert_close(fir.upsample(impulse, kernel)[0, 0, 5:9, 5:9], 4 * kernel)
    down = fir.downsample(impulse[:, :, :6, :6], kernel)[0, 0]
    assert_close(down[1:3, 1:3], kernel[1::2, 1::2])


def test_gradients_of_any_order():
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    kernel = torch.from_numpy(UNEVEN)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (fir.downsample(fir.blur(fir.upsample(x, kernel), kernel, 2), kernel)).square()

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_holds_the_taps_exactly(half):
    assert torch.equal(standard().to(half).double(), standard())
    x = torch.randn(1, 2, 8, 8)
    assert fir.upsample(x.to(half), standard().float()).dtype == half
    assert_close(fir.upsample(x.to(half), standard()).float(), fir.upsample(x, standard().float()), rtol=0, atol=0.03)
