"""First values of parameters and buffers, drawn on the CPU whatever their device and type."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bigsgan.errors import UserError
from bigsgan.models.ours import has_our_attributes

Module = TypeVar("Module", bound=nn.Module)
Generators = Callable[[str], torch.Generator]
"""Returns the random generator of a parameter or buffer, by its name in its module."""


_LARGE = 2**30
"""Products of rows, columns and the smaller of both from which a matrix is made orthogonal on its parameter's device.

On 16 cores the 388 TFLOP of two networks of 8 billion parameters take several minutes, on a rank with one core hours.
"""


@torch.no_grad()
def draw_normal(tensor: Tensor, generator: torch.Generator, std: float = 1.0) -> None:
    """Fill a parameter or buffer with normal numbers of mean 0, drawn in float32 whatever its type."""
    drawn = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.copy_(drawn.normal_(0, std, generator=generator))


def draw_orthogonal(shape: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return an orthogonal matrix (rows, columns) as torch's ``orthogonal_`` makes it, bit for bit on a CPU.

    The numbers are drawn on the CPU. Large matrices are decomposed on ``device``, and stay there.
    """
    rows, columns = shape
    drawn = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
    drawn = drawn.to(device if rows * columns * min(shape) >= _LARGE else "cpu")
    q, r = torch.linalg.qr(drawn.t() if rows < columns else drawn)
    del drawn
    q *= r.diagonal().sign()
    return (q.t() if rows < columns else q).contiguous()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let torch, numpy and Python draw inside the block from generators that follow from this one, on the CPU."""
    seed = int(torch.randint(2**32, (), generator=generator))
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would change those of GPUs
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def tensors_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers, with their names below ``prefix``."""
    yield from module.named_parameters(prefix, recurse=False)
    yield from module.named_buffers(prefix, recurse=False)


def named_fillable(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their names as ``named_modules`` does, but none below those with ``fills_parts``."""
    below = {id(part) for each in network.modules() if _fills_parts(each) for part in each.modules()}
    for name, module in network.named_modules():
        if _fills_parts(module) or id(module) not in below:
            yield name, module


def with_memory(module: Module, device: torch.device | str) -> Module:
    """Give a module new memory on a device; tensors that its modules share stay shared, unlike after ``to_empty``."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for stored in holders:
            for name, tensor in stored.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((stored, name))
    module.to_empty(device=device)
    for (first, name), *others in places.values():
        for stored, other in others:
            stored[other] = first[name]
    return module


def make_buffer(module: nn.Module, name: str) -> None:
    """Let a parameter of a module be a buffer, which no engine trains."""
    parameter = module.get_parameter(name)
    delattr(module, name)
    module.register_buffer(name, parameter.data)


def parts_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, and those below it that it may fill, with their names: all but those with an ``initialize``."""
    yield prefix, module
    for name, part in module.named_children():
        if _fills_parts(module) or not _initializes(part):
            yield from parts_of(part, f"{prefix}.{name}" if prefix else name)


def _fills_parts(module: nn.Module) -> bool:
    return has_our_attributes(module) and hasattr(module, "fills_parts")


def _initializes(module: Any) -> bool:
    """Whether a module fills its own parameters from generators; one from outside may have a method of this name."""
    method = getattr(module, "initialize", None)
    if not callable(method) or has_our_attributes(module):
        return callable(method)
    return [*inspect.signature(method).parameters] == ["generators"]


def filler(module: Any) -> Callable[[Generators], None] | None:
    """Return what fills a module's parameters and buffers: its ``initialize``, or torch's ``reset_parameters``."""
    if _initializes(module):
        found: Callable[[Generators], None] = module.initialize
        return found
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return None if reset is None else lambda generators: _reset(module, reset, generators("reset_parameters"))


def _reset(module: nn.Module, reset: Callable[[], None], generator: torch.Generator) -> None:
    """Call ``reset`` while the module's tensors are float32 on the CPU, whose generator is the same on all machines."""
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for _, part in parts_of(module):
        holders: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for stored in holders:
            places += [(stored, name, tensor) for name, tensor in stored.items() if tensor is not None]
    copies: dict[int, Tensor] = {}
    for _, _, tensor in places:
        copy = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(copy, copy.is_floating_point()) if is_parameter else copy
    try:
        for stored, name, tensor in places:
            stored[name] = copies[id(tensor)]
        with drawing_from(generator):
            reset()
        changed = [(tensor, stored[name]) for stored, name, tensor in places]
    finally:
        for stored, name, tensor in places:
            stored[name] = tensor
    for tensor, value in changed:
        tensor.copy_(value)


def spoil(tensor: Tensor) -> None:
    """Fill a tensor with what no initialization leaves there: NaN, the least integer, or a truth value of 2."""
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(2)
    else:
        tensor.fill_(torch.nan if _has_nan(tensor) else torch.iinfo(tensor.dtype).min)


def is_spoilt(tensor: Tensor) -> bool:
    """Return whether a tensor still has a number from ``spoil``."""
    if tensor.dtype == torch.bool:
        return bool((tensor.view(torch.uint8) == 2).any())
    return bool((tensor.isnan() if _has_nan(tensor) else tensor == torch.iinfo(tensor.dtype).min).any())


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def refuse_unfilled(names: Sequence[str]) -> None:
    """Refuse parameters and buffers that nothing fills.

    Raises:
        UserError: There are such names.
    """
    if names:
        remedy = "let its module fill it in initialize(generators) or, with torch's generator, in reset_parameters()"
        detail = f"so do {', '.join(names[1:])}" if names[1:] else ""
        raise UserError(names[0], None, "lacks an initial value", remedy, detail)
