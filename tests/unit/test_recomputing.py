"""A recomputed layer as one node of the graph. tests/unit/test_dual.py has it differentiated twice."""

import pytest
import torch
from torch import nn

from bigsgan.doctor.games import DMD2
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, initialize
from tests.tiny import TINY_GAMES, awake, tiny_plan

GAMES = {"biggan": [], **TINY_GAMES, "dmd2": DMD2}
NUM = 4


def passed(tmp_path, network, game, recomputes):
    """Output, gradients and buffers after a pass that moves state."""
    plan = tiny_plan(tmp_path, 1, GAMES[game], {})
    with awake():
        stack = build_network(plan.recipe, network)
        initialize(stack, 3)
    stack.checkpointing, stack.is_closed = recomputes, True
    draw = torch.Generator().manual_seed(5)
    inputs = [torch.ones_like(each, device="cpu") for each in meta_inputs(plan, network, NUM)]
    for each in inputs:
        if each.is_floating_point():
            each.normal_(generator=draw)
    inputs[0].requires_grad_()
    stack(*inputs)  # from which it knows what has gradients
    with moving_state(stack.stateful_layers(), True):
        output = stack(*inputs)
    (output * torch.randn(output.shape, generator=draw)).sum().backward()
    return output, [inputs[0].grad, *(each.grad for each in stack.parameters())], dict(stack.named_buffers())


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("game", GAMES)
def test_recomputed_families_have_the_gradients_of_kept_activations(tmp_path, game, network):
    expected, found = (passed(tmp_path, network, game, recomputes) for recomputes in (False, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Scaled(nn.Module):
    """x * scale^2 and the rest of the carry; ``calls`` counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([3.0]))
        self.tied = self.scale
        self.calls = 0

    def forward(self, x, *rest):
        self.calls += 1
        return x * self.scale * self.tied, *rest


def stack_of(*layers, carry):
    """Layers that are nodes from now on, as a pass of the same kind has told what has gradients."""
    network = LayerStack(list(layers), checkpointing=True)
    network.is_closed = True
    network.fold(*carry)
    for layer in layers:
        layer.calls = 0
    return network


def test_a_tied_parameter_and_what_passes_through():
    """Constants get no gradient path; gradients of what passes by are those of its uses."""
    first, second = Scaled(), Scaled()
    x, constant = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0])
    beside, labels = torch.tensor([7.0], requires_grad=True), torch.tensor([1])
    carry = x, beside, constant, labels
    outputs = stack_of(first, second, carry=carry).fold(*carry)
    assert [each.requires_grad for each in outputs] == [True, True, False, False]
    torch.testing.assert_close([each.item() for each in outputs], [2.0 * 81, 7.0, 5.0, 1])
    (outputs[0] + 2 * outputs[1]).backward()
    assert (x.grad.item(), beside.grad.item()) == (81, 2)
    assert (first.scale.grad.item(), second.scale.grad.item()) == (2 * 2 * 3 * 9, 2 * 2 * 3 * 9)
    assert (first.calls, second.calls) == (2, 2)


def test_hooks_of_a_parameter_run_once():
    layer, x = Scaled(), torch.tensor([2.0])
    layer.scale.register_hook(lambda grad: 2 * grad)
    stack_of(layer, carry=(x,))(x).backward()
    assert layer.scale.grad.item() == 2 * 12


def test_layers_without_parameters_are_recomputed_only_where_they_are_read():
    """As a frozen teacher's, which D's images pass by."""

    class Teacher(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            with torch.no_grad():
                read = x.square()
            return x, read

    x = torch.tensor([2.0], requires_grad=True)
    teacher = Teacher()
    outputs = stack_of(Scaled(), teacher, carry=(x,)).fold(x)
    outputs[0].backward()
    assert (x.grad.item(), teacher.calls) == (9, 1)


def test_layers_are_recomputed_only_for_gradients():
    layer, x = Scaled(), torch.tensor([2.0])
    network = stack_of(layer, carry=(x,))
    with torch.no_grad():
        network(x)
    layer.scale.requires_grad_(False)
    assert not network(x).requires_grad
    assert layer.calls == 2
    layer.scale.requires_grad_(True)
    output = network(x)
    found = [torch.autograd.grad(output, layer.scale, retain_graph=True)[0].item() for _ in range(2)]
    assert found == [12, 12]
    assert layer.calls == 5
    assert layer.scale.grad is None


def test_it_is_differentiated_twice():
    """d/ds (d(x s^2)/dx) = 2 s, through an input that depends on another entry of the carry."""
    layer, x = Scaled(), torch.tensor([2.0], requires_grad=True)
    output, beside = stack_of(layer, carry=(x, x.square())).fold(x, x.square())
    (grad,) = torch.autograd.grad(output + beside, x, create_graph=True)
    assert grad.item() == 9 + 4
    grad.backward()
    assert (layer.scale.grad.item(), x.grad.item()) == (6, 2)


def test_gradients_that_nobody_asks_for_are_not_computed():
    layer, x = Scaled(), torch.tensor([2.0], requires_grad=True)
    calls, grad = [], torch.autograd.grad

    def noting(ends, wanted, *more, **options):
        calls.append(len(wanted))
        return grad(ends, wanted, *more, **options)

    for asked, num in ((x, 1), (layer.scale, 1), ([x, layer.scale], 2)):
        output = stack_of(layer, carry=(x,))(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "grad", noting)
            grad(output, asked)
        assert calls.pop() == num


class Stopped(torch.autograd.Function):
    """x, without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None


def test_nothing_follows_that_has_a_gradient():
    layer, x = Scaled(), torch.tensor([2.0], requires_grad=True)
    Stopped.apply(stack_of(layer, carry=(x,))(x)).backward()
    assert x.grad is None
    assert layer.scale.grad is None


def test_what_follows_from_constants_alone_stays_constant():
    """Beside what has a gradient, as an embedding of labels where D is frozen."""

    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.tensor([[3.0]]), requires_grad=False)

        def forward(self, x, labels):
            return x, self.table[labels]

    x = torch.tensor([2.0], requires_grad=True)
    carry = x, torch.tensor([0])
    for network in (stack_of(Embeds(), carry=carry), stack_of(Embeds(), Scaled(), carry=carry)):
        assert [each.requires_grad for each in network.fold(*carry)] == [True, False]
