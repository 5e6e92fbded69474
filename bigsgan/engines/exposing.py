"""Differentiates a network's outputs by one of its parameters, in passes that may keep no other graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bigsgan.errors import UserError

FIELD = "objective.adversarial.adaptive.parameter"
"""The recipe's key."""

_LARGEST, _LEAST = 2.0**-6, 1e-30
"""Of a gradient at images: the largest element where it is pulled back, so that fp16 holds a sum over a million pixels;
and what all but zeros exceed."""


def parameter_at(network: nn.Module, ending: str, whose: str = "G") -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the parameter's name in it.

    Args:
        network: The whole network, or a part of it.
        ending: The last parts of the parameter's name, such as ``decoder.conv_out.weight``.
        whose: What the network is, for a message.

    Raises:
        UserError: No parameter's name ends so, or several do.
    """
    holders = dict(network.named_parameters(remove_duplicate=False))
    names = list(holders)
    found = [name for name in names if name == ending or name.endswith(f".{ending}")]
    if len(found) != 1:
        problem = f"is of several parameters of {whose}" if found else f"is of no parameter of {whose}"
        remedy = "give more of its name" if found else "give the end of a parameter's name"
        shown = ", ".join((found or names)[-8:])
        raise UserError(FIELD, ending, problem, remedy, f"such as {shown}")
    if sum(holders[found[0]] is each for each in holders.values()) > 1:
        remedy = "name a parameter that one module uses"
        raise UserError(FIELD, ending, f"is shared by several modules of {whose}", remedy)
    path, _, name = found[0].rpartition(".")
    return network.get_submodule(path), name


class Exposure:
    """What a pass has left of a network with an exposed parameter.

    Attributes:
        later: By identity, the parameters of the modules that it has called since, among them the exposed one's.
        num_bytes: Bytes of what those of these that have no parts have read.
    """

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._copy: Tensor | None = None
        self.later = dict[int, nn.Parameter]()
        self.num_bytes = 0

    @property
    def copy(self) -> Tensor:
        """The copy of the parameter that the network's outputs depend on.

        Raises:
            UserError: The pass has not called the module that holds the parameter.
        """
        if self._copy is None:
            problem, remedy = "belongs to a module that G does not call", "name a parameter of another"
            raise UserError(FIELD, self._ending, problem, remedy)
        return self._copy

    def begin(self, module: nn.Module, parameter: Tensor, inputs: Sequence[Any]) -> Tensor:
        """Begin the graph, on the first call, at a copy of the parameter, and return that."""
        torch.set_grad_enabled(True)  # until the end of the pass
        if self._copy is None:
            self._copy = parameter.detach().clone().requires_grad_()
            self.note(module, inputs)
        return self._copy

    def note(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        """Take note of a module that is about to be called."""
        if self._copy is not None:
            self.later |= {id(each): each for each in module.parameters(recurse=False)}
            if next(module.children(), None) is None:
                self.num_bytes += sum(each.nbytes for each in inputs if isinstance(each, Tensor))


def gradients(images: Tensor, parameter: Tensor, grads: Tensor) -> list[Tensor]:
    """Return the gradients by an exposed parameter, float32, for each part of a loss.

    Each part is scaled by a power of two of its own, so that half types neither overflow nor lose small numbers.

    Args:
        images: Those of a pass, (n, C, H, W).
        parameter: The parameter, or the copy of it that the images depend on.
        grads: The gradients of the parts at the images, side by side, (n, parts * C, H, W).
    """
    found = []
    for part in grads.split(images.shape[1], dim=1):
        scale = torch.exp2((_LARGEST / part.abs().amax().clamp(min=_LEAST)).log2().floor())
        (grad,) = torch.autograd.grad(images, parameter, part * scale, retain_graph=True)
        found.append(grad.float() / scale)
    return found


@contextmanager
def exposed(network: nn.Module, ending: str, holder: tuple[nn.Module, str] | None = None) -> Iterator[Exposure]:
    """Let a pass inside the block have one graph only: from a copy of a parameter, where its module is called, on.

    ``holder`` is what ``parameter_at`` has returned of them.
    """
    module, name = holder or parameter_at(network, ending)
    forward, before, found = module.forward, vars(module).get("forward"), Exposure(ending)

    def with_copy(*args: Any, **more: Any) -> Any:
        parameter = module._parameters[name]
        assert parameter is not None, "the parameter has been found"
        module._parameters[name] = found.begin(module, parameter, args)  # type: ignore[assignment]
        try:
            return forward(*args, **more)
        finally:
            module._parameters[name] = parameter

    module.forward = with_copy  # type: ignore[method-assign]
    handle = register_module_forward_pre_hook(found.note)
    try:
        with torch.no_grad():
            yield found
    finally:
        handle.remove()
        del module.forward
        if before is not None:
            module.forward = before
