"""Convolutions as tensor cores take them, forced upon a CPU in float64: equal to torch's, with second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.models import convolutions
from bigsgan.models.convolutions import convolve, convolve_transposed, laid_out, suits_tensor_cores
from tests.networks import derivatives


@pytest.fixture
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(convolutions, "suits_tensor_cores", lambda device, dtype: True)


NUM = 2
"""Samples. In other convolutions torch takes them for channels: of second derivatives, for the gradient of a weight."""


class Convolutions(TorchDispatchMode):
    """Notes what kernels are given: channels that are not a multiple of 8, maps in another order, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = self.apart = self.biases = self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.note([args[0], result], args[2] is not None)
        if func is torch.ops.aten.convolution_backward.default:
            self.note([*args[:2], result[0]], args[-1][2])
        return result

    def note(self, maps: list[Tensor | None], biased: bool) -> None:
        if len(maps[0]) != NUM:
            return
        self.num += 1
        self.biases += biased
        for x in maps:
            if x is not None:
                self.odd += x.shape[1] % 8 > 0
                self.apart += not x.is_contiguous(memory_format=torch.channels_last)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_tensor_cores_are_a_gpus_for_half_types():
    for device, dtype, wanted in [
        ("cpu", torch.bfloat16, False),
        ("cuda", torch.float32, False),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
    ]:
        assert suits_tensor_cores(torch.device(device), dtype) == wanted


# C_in, C_out, K, stride, padding, groups; then biases that remain passes of their own
CASES = [
    (3, 16, 3, 1, 1, 1, 0),  # an image: the bias rides on a channel of ones
    (3, 16, 1, 1, 0, 1, 0),
    (6, 12, 4, 2, 1, 1, 0),
    (3, 5, 4, 1, 2, 1, 0),  # each tap meets the padding somewhere: the bias is added behind, to what is kept
    (16, 3, 3, 1, 1, 1, 0),  # to an image
    (16, 3, 1, 1, 0, 1, 0),  # a matrix product, as the next
    (16, 24, 1, 1, 0, 1, 0),
    (16, 24, 3, 1, 1, 1, 1),
    (16, 24, 1, 2, 0, 1, 1),
    (16, 8, 3, 1, 1, 2, 1),
    (6, 6, 3, 1, 1, 6, 1),
]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution_is_torchs(case, biased, on_tensor_cores):
    before, after, kernel, stride, padding, groups, left = case
    x, weight = drawn(NUM, before, 6, 8), drawn(after, before // groups, kernel, kernel)
    bias = drawn(after) if biased else None
    leaves = [x, weight, *([] if bias is None else [bias])]
    expected = F.conv2d(x, weight, bias, stride, padding, groups=groups)
    with Convolutions() as seen:
        found = convolve(laid_out(x, x.dtype), weight, bias, stride, padding, groups)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(derivatives(found, leaves), derivatives(expected, leaves), rtol=1e-10, atol=1e-9)
    assert seen.biases == (left if biased else 0)
    assert seen.odd == (2 if groups == 6 else 0)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "case", [(16, 3, 4, 2, 1, 0, 1), (6, 8, 4, 2, 1, 0, 1), (8, 5, 3, 2, 1, 1, 1), (6, 6, 4, 2, 1, 0, 3)]
)
def test_a_transposed_convolution_is_torchs(case, biased, on_tensor_cores):
    before, after, kernel, stride, padding, more, groups = case
    x, weight = drawn(NUM, before, 6, 8), drawn(before, after // groups, kernel, kernel)
    bias = drawn(after) if biased else None
    leaves = [x, weight, *([] if bias is None else [bias])]
    expected = F.conv_transpose2d(x, weight, bias, stride, padding, more, groups)
    found = convolve_transposed(laid_out(x, x.dtype), weight, bias, stride, padding, more, groups)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(derivatives(found, leaves), derivatives(expected, leaves), rtol=1e-10, atol=1e-9)


def test_elsewhere_it_is_torchs_own_call():
    x, weight, bias = torch.randn(2, 3, 6, 8), torch.randn(5, 3, 3, 3), torch.randn(5)
    assert torch.equal(convolve(x, weight, bias, 2, 1), F.conv2d(x, weight, bias, 2, 1))
    weight = torch.randn(3, 5, 4, 4)
    assert torch.equal(convolve_transposed(x, weight, bias, 2, 1), F.conv_transpose2d(x, weight, bias, 2, 1))
    assert laid_out(x, torch.float32) is x
    assert laid_out(x, torch.float64).is_contiguous()


def test_gradients_of_gradients_are_in_order(on_tensor_cores):
    """Whatever order it comes in: what fills up its channels puts it in a convolution's, and so all that follows."""
    images, weight = torch.randn(NUM, 3, 6, 8, requires_grad=True), torch.randn(8, 3, 3, 3)
    with Convolutions() as seen:
        y = convolve(laid_out(images, images.dtype), weight, None, 1, 1)
        (gradient,) = torch.autograd.grad((y * y).sum(), images, create_graph=True)
        assert y.is_contiguous(memory_format=torch.channels_last)
        (gradient.contiguous() * torch.randn(gradient.shape)).sum().backward()
    assert seen.num == 4
    assert (seen.odd, seen.apart) == (0, 0)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_a_rectified_sum(slope):
    x, bias = drawn(2, 3, 4, 5), drawn(3)
    expected = F.leaky_relu(x + bias.view(1, 3, 1, 1), slope)
    found = convolutions.rectify_biased(x, bias, slope)
    assert_close(found, expected, rtol=0, atol=0)
    assert_close(derivatives(found, [x, bias]), derivatives(expected, [x, bias]), rtol=1e-12, atol=1e-12)
