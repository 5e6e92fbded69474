"""Batch norm over ranks, its statistics and its derivatives, against torch's and against equations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config import NETWORKS
from bigsgan.models.batch_norm import AffineBatchNorm, BatchStatistics, ConditionalBatchNorm
from bigsgan.models.build import network_on_meta
from bigsgan.models.layers import moving_state
from bigsgan.models.network import initialize
from tests.tiny import TINY_GAMES, tiny_recipe
from tests.unit.test_layers import randomize


def batch_statistics(average: Callable[[Tensor], Tensor] | None = None, num_ranks: int = 1) -> BatchStatistics:
    layer = BatchStatistics(3)
    initialize(layer, 0)
    layer.average_over_ranks, layer.num_ranks = average, num_ranks
    return layer


PATHS: dict[str, Callable[[], BatchStatistics]] = {
    "one rank": batch_statistics,
    "collective": lambda: batch_statistics(lambda tensor: tensor.clone()),
}


@pytest.mark.parametrize("path", PATHS)
def test_batch_statistics_are_batch_norm(path):
    ours, theirs = PATHS[path](), nn.BatchNorm2d(3, affine=False)
    for step in range(3):
        x, direction = (2 * torch.randn(2, 4, 3, 5, 5) + step).requires_grad_()
        with moving_state([ours], True):
            result = ours(x)
        expected = theirs(x)
        assert_close(result, expected)
        grad, expected_grad = (torch.autograd.grad((y * direction).sum(), x)[0] for y in (result, expected))
        assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
        assert_close(ours.running_mean, theirs.running_mean)
        assert_close(ours.running_var, theirs.running_var)
    x = torch.randn(4, 3, 5, 5)
    assert_close(ours(x), F.batch_norm(x, None, None, training=True))  # not moving, the batch still counts
    ours.eval(), theirs.eval()
    assert_close(ours(x), theirs(x))


def normalize_by_hand(x: Tensor) -> Tensor:
    centered = x - x.mean(dim=(0, 2, 3), keepdim=True)
    return centered / (centered.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()


def grad_of_grad(layer: Callable[[Tensor], Tensor], x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((layer(x).sin() * first).sum(), x, create_graph=True)
    return torch.autograd.grad((grad.square() * second).sum(), x)[0]


@pytest.mark.parametrize("path", PATHS)
def test_batch_statistics_differentiate_twice(path):
    x, first, second = torch.randn(3, 4, 3, 5, 5, dtype=torch.float64)
    expected = grad_of_grad(normalize_by_hand, x, first, second)
    layer = PATHS[path]()
    with moving_state([layer], True):
        found = grad_of_grad(layer, x.float(), first.float(), second.float())
    assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


class Lockstep:
    """``average_over_ranks`` for ranks that are threads: the mean of what each hands in, with the graph of all."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.handed_in: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(num, timeout=20)

    def average(self, rank: int) -> Callable[[Tensor], Tensor]:
        def mean(tensor: Tensor) -> Tensor:
            self.handed_in[rank] = tensor
            self._barrier.wait()
            result = torch.stack([self.handed_in[r] for r in range(self.num)]).mean(dim=0)
            self._barrier.wait()
            return result

        return mean

    def forward(self, layers: list[BatchStatistics], parts: list[Tensor]) -> Tensor:
        with ThreadPoolExecutor(self.num) as pool, moving_state(list(layers), True):
            return torch.cat(list(pool.map(lambda layer, part: layer(part), layers, parts)))


def ranks(num: int) -> tuple[Lockstep, list[BatchStatistics]]:
    lockstep = Lockstep(num)
    return lockstep, [batch_statistics(lockstep.average(rank), num) for rank in range(num)]


@pytest.mark.parametrize("num", [2, 3])
def test_ranks_share_the_statistics_of_the_whole_batch(num):
    lockstep, layers = ranks(num)
    theirs = nn.BatchNorm2d(3, affine=False)
    for step in range(3):
        # Each rank's part has a mean of its own, so that local statistics would be far off.
        x = torch.randn(2 * num, 3, 5, 5) * 2 + torch.arange(2.0 * num).view(-1, 1, 1, 1) + step
        assert_close(lockstep.forward(layers, list(x.chunk(num))), theirs(x), rtol=1e-4, atol=1e-5)
        for layer in layers:
            assert_close(layer.running_mean, theirs.running_mean)
            assert_close(layer.running_var, theirs.running_var)  # unbiased over the samples of all ranks
            assert torch.equal(layer.running_mean, layers[0].running_mean)
    first, second = torch.randn(2, *x.shape)
    found = grad_of_grad(lambda y: lockstep.forward(layers, list(y.chunk(num))), x, first, second)
    expected = grad_of_grad(normalize_by_hand, x.double(), first.double(), second.double())
    assert_close(found, expected.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_mean_far_from_zero_costs_no_digits_once_the_running_mean_is_there():
    lockstep, layers = ranks(2)
    x = torch.randn(8, 3, 8, 8) * 0.05 + torch.tensor([300.0, -1000.0, 0.0]).view(1, 3, 1, 1)
    for _ in range(150):
        lockstep.forward(layers, list(x.chunk(2)))
    found = lockstep.forward(layers, list(x.chunk(2)))
    assert_close(found, normalize_by_hand(x.double()).float(), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("mean, spread", [(30.0, 1e-4), (3000.0, 1e-2), (3000.0, 0.0)])
def test_a_channel_almost_constant_and_far_from_the_running_mean_stays_finite(mean, spread):
    # Rounding makes the difference of the moments negative in about every second of these channels.
    lockstep, layers = ranks(2)
    for _ in range(5):
        for layer in layers:
            initialize(layer, 0)
        x = (mean + torch.rand(3, 1, 1) + spread * torch.randn(8, 3, 8, 8)).requires_grad_()
        result = lockstep.forward(layers, list(x.chunk(2)))
        (grad,) = torch.autograd.grad(result.square().sum(), x)
        assert torch.isfinite(result).all()
        assert torch.isfinite(grad).all()
        assert all((layer.running_var >= 0).all() for layer in layers)


@pytest.mark.parametrize("path", PATHS)
def test_statistics_are_float32_under_bfloat16(path):
    layer = PATHS[path]()
    x = (torch.randn(16, 3, 16, 16) + 20).bfloat16()
    with moving_state([layer], True):
        result = layer(x)
    assert result.dtype == torch.bfloat16
    assert_close(result, normalize_by_hand(x.double()).bfloat16(), rtol=2**-7, atol=1e-3)
    assert layer.running_mean.dtype == torch.float32
    assert_close(layer.running_mean, 0.1 * x.double().mean(dim=(0, 2, 3)).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_statistics_are_float32(path, dtype):
    """Those at the inputs add up to 0 for each channel, but for the rounding of each, whatever comes back."""
    layer, x = PATHS[path](), torch.randn(16, 3, 32, 32, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x), x, 3 + torch.randn(16, 3, 32, 32).to(dtype))
    total, sizes = (values.sum(dim=(0, 2, 3)) for values in (grad.double(), grad.double().abs()))
    assert torch.isfinite(grad).all()
    assert (total.abs() / sizes).max() < 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_derivatives_are_exact_but_for_rounding_under_bfloat16(path):
    """Both derivatives, as in float64, relative to the largest; numbers of bfloat16 have 8 bits."""
    layer, low, weights = PATHS[path](), (torch.randn(16, 3, 8, 8) + 20).bfloat16(), 3 + torch.randn(16, 3, 8, 8)
    layer.exact, found = True, []
    for x, normalize in ((low, layer), (low.double(), normalize_by_hand)):
        x.requires_grad_()
        (grad,) = torch.autograd.grad((normalize(x) * weights.to(x.dtype)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.double().square().sum(), x)
        found.append([value.detach().double() for value in (grad, second)])
    for value, expected in zip(*found, strict=True):
        assert_close(value, expected, rtol=0, atol=2**-6 * expected.abs().max().item())


def test_affine_batch_norm_is_batch_norm():
    ours, theirs = AffineBatchNorm(3), nn.BatchNorm2d(3)
    initialize(ours, 0)
    x, direction = torch.randn(2, 4, 3, 5, 5)
    assert_close(ours(x), theirs(x))  # both start as the identity
    found = []
    for layer in (ours, theirs):
        layer.weight.data, layer.bias.data = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -3.0]])
        result = layer(x)
        found.append([result, *torch.autograd.grad((result * direction).sum(), [layer.weight, layer.bias])])
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    ours.rectifies = True
    assert_close(ours(x), theirs(x).relu())


def test_conditional_batch_norm_scales_and_shifts_each_sample_and_rectifies():
    layer = ConditionalBatchNorm(3, 6)
    initialize(layer, 0)
    randomize(layer.gain)
    randomize(layer.bias)
    x, condition = torch.randn(4, 3, 5, 5), torch.randn(4, 6)
    gain, bias = ((condition @ part.weight.T) / (part.u @ part.weight @ part.v) for part in (layer.gain, layer.bias))
    normalized = F.batch_norm(x, None, None, training=True)
    expected = torch.stack([normalized[i] * (1 + gain[i, :, None, None]) + bias[i, :, None, None] for i in range(4)])
    assert_close(layer(x, condition), expected.relu())
    assert_close(layer(x, condition, upsamples=True), expected.relu().repeat_interleave(2, 2).repeat_interleave(2, 3))


@pytest.mark.slow
def test_compiled_statistics_that_move_have_the_gradient_of_those_that_did_not():
    """Of several ranks, in the form that is compiled; torch 2.14 took the moved ones in the backward pass."""
    torch.compiler.reset()
    x, grads = torch.randn(2, 8, 4, 6, 6).unbind()
    found = []
    for compiles in (False, True):
        layer = BatchStatistics(4)
        layer.running_mean.normal_(generator=torch.Generator().manual_seed(0))
        layer.running_var.fill_(1.0)
        layer.average_over_ranks, layer.num_ranks = lambda tensor: tensor * 1.0, 2
        images = x.clone().requires_grad_(True)
        with moving_state([layer], True):
            (torch.compile(layer, dynamic=False) if compiles else layer)(images).backward(grads)
        found.append(images.grad)
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_tangents_over_ranks_are_those_of_the_whole_batch():
    """And so are their gradients: against finite differences, and a double backward of the equation."""
    num, step = 2, 1e-6
    lockstep, layers = ranks(num)
    layers = [layer.double() for layer in layers]
    x, direction, weight = torch.randn(3, 2 * num, 3, 5, 5, dtype=torch.float64)
    x = (x + torch.arange(2.0 * num).view(-1, 1, 1, 1)).requires_grad_()
    with forward_mode.dual_level():
        whole = lockstep.forward(layers, list(forward_mode.make_dual(x, direction).chunk(num)))
        tangent = forward_mode.unpack_dual(whole).tangent
        (grad,) = torch.autograd.grad((tangent * weight).sum(), x)
    ends = [normalize_by_hand(x.detach() + sign * step * direction) for sign in (1, -1)]
    assert_close(tangent.detach(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    _, expected = torch.autograd.functional.jvp(normalize_by_hand, x, direction, create_graph=True)
    assert_close(tangent, expected, rtol=1e-10, atol=1e-12)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), x)
    assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("game", TINY_GAMES)
def test_a_recipe_knows_which_networks_have_batch_norm(game, tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[game])
    for network in NETWORKS:
        found = any(isinstance(module, BatchStatistics) for module in network_on_meta(recipe, network).modules())
        assert getattr(recipe, network).has_batch_norm == found
