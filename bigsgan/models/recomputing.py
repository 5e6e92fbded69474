"""Activation checkpointing of a layer as one node of the graph (Chen et al. 2016, arXiv 1604.06174).

torch's checkpoint hands each tensor that an operation saves to Python, in the forward pass and in the recomputation;
so it works for any function. A layer whose outputs depend on its inputs and its own parameters alone does not need
that, which saves time of the host (docs/explanation/performance.md, "The host's part").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def recomputed(
    run: Callable[..., Any],
    carry: tuple[Tensor, ...],
    parameters: Iterable[Tensor],
    contexts: Callable[[], tuple[AbstractContextManager, AbstractContextManager]],
    have_gradients: Sequence[bool],
) -> Any:
    """Return what ``run`` makes of the carry, and compute it again in the backward pass.

    It may be differentiated twice, if no input depends on a parameter of the layer. Gradients of the parameters are
    complete together, at the end of the layer's backward pass.

    Args:
        run: The layer: tensors to a tensor or a tuple of them. It draws nothing from torch's generators.
        carry: Its inputs.
        parameters: All parameters that it reads, whole.
        contexts: Makes those of its forward pass and of its recomputations.
        have_gradients: Which of its outputs depend on what requires a gradient.
    """
    if not any(have_gradients):
        return run(*carry)
    trained = [each for each in dict.fromkeys(parameters) if each.requires_grad]
    return _Recomputed.apply(run, contexts(), have_gradients, len(carry), *carry, *trained)


class _Recomputation:
    """Whether a node computes its layer again; torch.compile reads no attribute of a function's class."""

    is_running: ClassVar[bool] = False


def last_sum(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """Return x + gate * branch, the output of a layer, whose number nobody reads while a node recomputes the layer."""
    return _Unread.apply(x, gate, branch) if _Recomputation.is_running else x + gate * branch


class _Unread(torch.autograd.Function):
    """x + gate * branch, of which only the gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
        ctx.save_for_backward(gate, branch)
        ctx.product, ctx.of_x = torch.result_type(gate, branch), x.dtype
        dtype = torch.promote_types(ctx.product, x.dtype)
        return x.new_empty((1,) * x.ndim, dtype=dtype).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate, branch), of_product = ctx.saved_tensors, grad.to(ctx.product)
        needs_gate, needs_branch = ctx.needs_input_grad[1:]
        of_gate = (of_product * branch).sum_to_size(gate.shape).to(gate.dtype) if needs_gate else None
        of_branch = (of_product * gate).to(branch.dtype) if needs_branch else None
        return grad.to(ctx.of_x), of_gate, of_branch


class _Recomputed(torch.autograd.Function):
    """The node: the carry and the trained parameters are its inputs."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], contexts: Any, have_gradients: Sequence[bool], num: int, *inputs: Tensor
    ) -> Any:
        ctx.run, ctx.context, ctx.num = run, contexts[1], num
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        with contexts[0]:
            outputs = run(*inputs[:num])
        pairs = zip(as_tuple(outputs), have_gradients, strict=True)
        ctx.mark_non_differentiable(*(each for each, has_gradient in pairs if not has_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs, twice = list(ctx.saved_tensors), torch.is_grad_enabled()
        with torch.enable_grad(), ctx.context:
            for i, each in enumerate(inputs[: ctx.num]):  # copies, at which the inner graph begins
                inputs[i] = each.view_as(each) if twice else each.detach().requires_grad_(each.requires_grad)
            _Recomputation.is_running = True
            try:
                outputs = as_tuple(ctx.run(*inputs[: ctx.num]))
            finally:
                _Recomputation.is_running = False
        both = zip(outputs, grads, strict=True)
        pairs = [(get_gradient_edge(y), g) for y, g in both if g is not None and y.requires_grad]
        del outputs, both  # nobody reads their numbers
        needs = [node is not None and _is_asked_for(node) for node, _ in ctx.next_functions[-len(inputs) :]]
        if not pairs:  # what follows has no gradient
            return None, None, None, None, *(None for _ in needs)
        wanted = [each for each, is_needed in zip(inputs, needs, strict=True) if is_needed]
        ends, at_ends = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ends, wanted, at_ends, create_graph=twice, allow_unused=True))
        return None, None, None, None, *(next(found) if is_needed else None for is_needed in needs)


def _is_asked_for(node: Any) -> bool:
    """Whether the backward pass that is running needs the gradient at a node, unlike those of other inputs alone."""
    try:
        return torch._C._will_engine_execute_node(node)  # as torch's multi-gradient hooks do
    except RuntimeError:  # a leaf that autograd.grad was given
        return True


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return what a layer returns as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
