"""What the meta device keeps where it stands for a GPU, counted in tensors as large as the input."""

import pytest
import torch

from bigsgan.models import meta_gpu

SHAPE = (50, 40, 30)


class Kept:
    """Tensors of different storages that the operations of a block keep."""

    def __init__(self) -> None:
        self.seen = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        self.seen[tensor.untyped_storage()._cdata] = tensor  # which keeps the number from being used again
        return tensor

    def large(self):
        """How many are as large as the input."""
        return sum(tensor.shape == SHAPE for tensor in self.seen.values())


# x; with its weight's operations x and the product that the weight scales.
@pytest.mark.parametrize("stands, weighted, expected", [(True, True, 1), (True, False, 1), (False, True, 2)])
def test_a_norm_keeps_its_input(stands, weighted, expected):
    x = torch.empty(SHAPE, device="meta", requires_grad=True)
    weight = torch.empty(SHAPE[-1], device="meta", requires_grad=True) if weighted else None
    kept = Kept()
    with meta_gpu.stands_for_gpu(stands), kept.hooks:
        y = meta_gpu.rms_norm(x, weight, 1e-6)
    assert y.shape == SHAPE
    assert kept.large() == expected
    inputs = [x, weight] if weighted else [x]
    for grad, each in zip(torch.autograd.grad(y.sum(), inputs), inputs, strict=True):
        assert grad.shape == each.shape


# As torch's allocator has it after a backward pass of `FusedRmsNormBackward0` (2.11): x, the gradient, x over its root
# mean square, and the gradient times the weight.
@pytest.mark.parametrize("weighted, expected", [(True, 4), (False, 3)])
def test_the_record_of_its_backward_pass(weighted, expected):
    x, grad = (torch.empty(SHAPE, device="meta", requires_grad=True) for _ in range(2))
    weight = torch.empty(SHAPE[-1], device="meta", requires_grad=True) if weighted else None
    kept = Kept()
    with meta_gpu.stands_for_gpu(True), kept.hooks:
        y = meta_gpu.rms_norm(x, weight, 1e-6)
        (first,) = torch.autograd.grad(y, [x], grad, create_graph=True)
    assert kept.large() == expected
    second = torch.autograd.grad(first.square().sum(), [x, grad])
    assert [each.shape for each in second] == [SHAPE, SHAPE]
