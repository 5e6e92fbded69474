"""Checks that layers from outside fit layouts: stages, which need tangents, and modules that gather parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from bigsgan.errors import UserError, reason
from bigsgan.models import dual
from bigsgan.models.network import LayerStack

NUM = 4
"""Samples that layers are tried with."""

Carry = tuple[Tensor, ...]


def named(layer: LayerStack) -> str:
    """Return the number of the only layer of a network, and its class."""
    (found,) = layer.layers.values()
    return f"{next(iter(layer.layers))} ({type(getattr(found, 'module', found)).__name__})"


def check_tangents(field: str, family: str, layer: LayerStack, carry: Carry) -> None:
    """Refuse a layer that cannot carry tangents, or whose tangents cannot be differentiated."""
    carry = tuple(each.clone().requires_grad_() if each.is_floating_point() else each for each in carry)
    first = next(each for each in carry if each.is_floating_point())
    try:
        tangents = layer.train().fold_dual(dual.begin(carry, torch.ones_like(first))).tangents
        sum(each.sum() for each in tangents).backward()  # type: ignore[union-attr]
    except RuntimeError as error:
        problem = "has operations that exact penalties in pipeline stages, in forward mode, cannot differentiate"
        remedy = "set form=finite_difference of the penalty, which a term of your own lacks, or pipeline_stages=1"
        raise UserError(field, family, problem, remedy, f"{named(layer)}: {reason(error)}") from error


@contextmanager
def _counted_gradients() -> Iterator[list[bool]]:
    """Note each gradient that code inside the block takes by ``torch.autograd.grad``; by other ways is not seen."""
    taken, grad = list[bool](), torch.autograd.grad

    def noting(*args: Any, **more: Any) -> Any:
        taken.append(True)
        return grad(*args, **more)

    torch.autograd.grad = noting  # type: ignore[assignment]
    try:
        yield taken
    finally:
        torch.autograd.grad = grad  # type: ignore[assignment]


@torch.no_grad()
def refuse_routing(network: str, family: str, layer: LayerStack, carry: Carry, gathers: bool) -> None:
    """Refuse a layer that takes gradients, or where ranks gather together one that calls a module for some samples.

    Mixtures of experts do the latter.
    """
    called: list[str] = []
    for name, module in layer.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    layer.train(False)
    everywhere: list[str] | None = None
    field, whole = f"{network}.family", f"keep parameters whole: ZeRO 0 to 2, engines.{network}.frozen.sharded=false"
    for some in (slice(0, None, 2), slice(1, None, 2), slice(NUM // 2), slice(NUM // 2, None)):
        called.clear()
        with _counted_gradients() as taken:
            layer.fold(*(each[some] for each in carry))
        if taken:
            problem = "cannot take gradients in its forward pass where modules gather parameters"
            raise UserError(field, family, problem, whole, named(layer))
        everywhere = list(called) if everywhere is None else everywhere
        if gathers and (different := [a or b for a, b in zip_longest(called, everywhere) if a != b]):
            problem = "cannot call other modules for other samples where ranks gather parameters together"
            raise UserError(field, family, problem, f"call all of them, or {whole}", f"{different[0]} is one")
