"""Frozen parameters of which each rank holds a part: what code reads, and what graphs keep."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.checkpoint import saved_buffers
from bigsgan.models.frozen import FrozenPart, Sharing, convert, frozen_parts, share_out, whole_frozen
from bigsgan.models.network import LayerStack
from bigsgan.models.outside import Foreign, _prepared

CPU = torch.device("cpu")
NUM = 5
"""Ranks; the last have none of six numbers."""


class Judge(nn.Module):
    """A frozen backbone of several kinds of layers under a trained head, and a table in the module itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 5, 8), requires_grad=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.silu, batch_first=True)  # attention reads its map's weights
        self.backbone = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.SiLU())
        self.blocks = nn.ModuleList([layer, nn.Linear(8, 8)])
        self.quantized = nn.Linear(3, 2, bias=False)
        self.quantized.weight = nn.Parameter(torch.randint(-5, 5, (2, 3), dtype=torch.int8), requires_grad=False)
        self.backbone.requires_grad_(False)
        self.blocks.requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, images, labels):
        """(N, 4, 5), (N,) -> (N,)."""
        h = self.backbone(images).mT + self.table
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h.mean(1))[:, 0] * self.quantized.weight.float().mean().to(h.dtype) + labels


def by_rank(regathers=True):
    """A network with whole tensors, and the same on each rank; what a rank gathers is looked up by its own part."""
    torch.manual_seed(0)
    whole = _prepared(Judge())
    table = {}
    for name, tensor in whole.named_buffers():
        if tensor.dim() > 1:
            for dtype in {tensor.dtype, torch.bfloat16 if tensor.is_floating_point() else tensor.dtype}:
                flat = tensor.flatten().to(dtype)
                rows = F.pad(flat, (0, -len(flat) % NUM)).view(NUM, -1)
                for row in rows:
                    table[row.view(torch.uint8).numpy().tobytes()] = rows.flatten().view(torch.uint8), name
    gathered = []

    def gather(found, own):
        bytes_, name = table[own.numpy().tobytes()]
        found.copy_(bytes_)
        gathered.append(name)

    stacks = []
    for rank in range(NUM):
        stack = LayerStack([Foreign(copy.deepcopy(whole), "discriminator", is_last=True)])
        share_out(stack, Sharing(rank, NUM, gather, torch.device("cpu"), regathers=regathers))
        stacks.append(stack)
    return LayerStack([Foreign(whole, "discriminator", is_last=True)]), stacks, gathered


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 5, generator=generator).requires_grad_(), torch.zeros(2)


def test_ranks_hold_parts_and_no_other_copies():
    whole, stacks, _ = by_rank()
    named = dict(whole.named_buffers())
    shared = {name for name, tensor in named.items() if tensor.dim() > 1}
    assert len(shared) == 8
    for stack in stacks:
        assert saved_buffers(stack).keys() == named.keys() - shared
        assert frozen_parts(stack).keys() == shared
    for name in shared:
        parts = [frozen_parts(stack)[name] for stack in stacks]
        assert torch.equal(torch.cat([part.own for part in parts]), named[name].flatten())
        numel = named[name].numel()
        size = -(-numel // NUM)
        assert [len(part.values) for part in parts] == [size] * NUM
        assert [part.offset for part in parts] == [min(rank * size, numel) for rank in range(NUM)]


@pytest.mark.parametrize("regathers", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_that_of_whole_tensors(dtype, regathers):
    """Bit for bit, its gradients too, and those of a double backward."""
    whole, stacks, _ = by_rank(regathers)
    found = []
    for stack in (whole, *stacks):
        for parameter in stack.parameters():
            parameter.data = parameter.data.to(dtype)
        images, labels = inputs()
        for layer in stack.modules():
            if hasattr(layer, "exact"):
                layer.exact = True
        logits = stack(images, labels)
        (slope,) = torch.autograd.grad(50 * logits.float().sum(), images, create_graph=True)
        (logits.float().square().sum() + slope.square().sum()).backward()
        found.append([logits, slope, images.grad, *(p.grad for p in stack.parameters())])
    assert found[0][2].abs().max() > 1e-3
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_graphs_keep_no_frozen_tensor():
    _, (stack, *_), gathered = by_rank()
    images, labels = inputs()
    logits = stack(images, labels)
    (layer,) = stack.layers.values()
    assert not layer.frozen_reads._read
    forward = sorted(gathered)
    gathered.clear()
    logits.sum().backward()
    prefix = "layers.0.module."
    # The table and the integers are a mixed module's own, or need no gradient.
    assert {prefix + name for name in forward} == frozen_parts(stack).keys()
    assert set(gathered) == set(forward) - {"table", "quantized.weight"}


@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [False, True])
def test_code_from_outside_computes_as_before_with_numbers_of_another_type(engine, shares):
    """They take half the memory. In float32 the pass is that of weights which bf16 has rounded."""
    torch.manual_seed(0)
    held, rounded = (LayerStack([Foreign(_prepared(Judge()), "discriminator", is_last=True)]) for _ in range(2))
    rounded.load_state_dict(held.state_dict())
    before = {name: tensor.clone() for name, tensor in whole_frozen(rounded).items()}
    for tensor in whole_frozen(rounded).values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
    convert(held, torch.bfloat16)
    assert {t.dtype for t in whole_frozen(held).values()} == {torch.bfloat16, torch.int8}
    assert before.keys() == whole_frozen(held).keys()
    if shares:
        share_out(held, Sharing(0, 1, partial(pytest.fail, "gathered"), CPU))
        assert sum(part.values.nbytes for part in frozen_parts(held).values()) < 2 * sum(
            t.numel() for t in before.values()
        )
    for stack in (held, rounded):
        for parameter in stack.parameters():
            parameter.data = parameter.data.to(engine)
    images, labels = inputs()
    found = [stack(images, labels) for stack in (held, rounded)]
    assert torch.equal(*found)
    assert torch.equal(*(torch.autograd.grad(each.sum(), images)[0] for each in found))


def test_without_gradients_nothing_is_kept():
    _, (stack, *_), gathered = by_rank()
    images, labels = inputs()
    with torch.no_grad():
        stack(images, labels)
    assert gathered


class Careless(nn.Module):
    """Changes in place what its frozen part needs for the backward pass."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)
        self.frozen.forward = self.exponential

    def exponential(self, x):
        return F.linear(x, self.frozen.weight).exp()

    def forward(self, images, labels):
        """(N, 4), (N,) -> (N, 1)."""
        h = self.frozen(images)
        return self.head(h.mul_(2))


def test_a_change_in_place_is_noticed():
    def gather(found, own):
        found.copy_(own.repeat(2))

    stack = LayerStack([Foreign(_prepared(Careless()), "discriminator", is_last=True)])
    share_out(stack, Sharing(0, 2, gather, torch.device("cpu")))
    logits = stack(torch.ones(2, 4, requires_grad=True), torch.zeros(2))
    with pytest.raises(RuntimeError, match="changed in place"):
        logits.sum().backward()


def test_small_tensors_stay_whole():
    torch.manual_seed(0)
    stack = LayerStack([Foreign(_prepared(Judge()), "discriminator", is_last=True)])
    share_out(stack, Sharing(0, 2, partial(pytest.fail, "gathered"), torch.device("cpu"), above=200))
    assert not frozen_parts(stack)


def test_a_plan_shares_tensors_without_memory():
    """Also those that are to lie on the host."""
    tensor = torch.empty(4, 5, device="meta")
    sharing = Sharing(1, 3, lambda found, own: None, torch.device("meta"), on_host=True)
    assert FrozenPart.of(tensor, sharing).values.shape == (7,)


@pytest.mark.parametrize("read", [lambda w: w.conj(), torch.view_as_real], ids=["conjugate", "numbers"])
def test_views_of_other_numbers_keep_their_gradients(read):
    """As of a complex matrix."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64), requires_grad=False)

        def forward(self, x):
            w = read(self.weight)
            found = x.to(w.dtype) @ w if w.dim() == 2 else (x.real @ w.flatten(1).to(x.real.dtype))
            return torch.view_as_real(found).sum() if found.is_complex() else found.sum()

    torch.manual_seed(0)
    whole = _prepared(Product())
    shared = copy.deepcopy(whole)
    sharing = Sharing(0, 1, lambda found, own: found.copy_(own), CPU, regathers=True)
    share_out(LayerStack([Foreign(shared, "generator", is_last=False)]), sharing)
    x = torch.randn(4, 3)
    grads = []
    for network in (whole, shared):
        own = x.clone().requires_grad_()
        network(own).backward()
        grads.append(own.grad)
    torch.testing.assert_close(*grads)
