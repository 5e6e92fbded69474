"""Counts the memory of each layer of a network, forward and backward, on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bigsgan.engines.pipeline.partition import TensorSpec
from bigsgan.models import dual
from bigsgan.models.frozen import frozen_parts
from bigsgan.models.network import LayerStack, frozen_tensors
from bigsgan.planner.census import Census, Stretch

Mode = Literal["train", "judge", "train with tangents"]
"""Gradients of the parameters, or of the first input with the parameters frozen."""

_META = torch.device("meta")


class Entry(NamedTuple):
    """One tensor of the carry that a layer returns."""

    sent: int  # its bytes
    size: int  # those of its storage; 0 if another entry has the same
    alias: int | None  # which entry of the carry that came in shares its storage; None for one of its own
    kept: bool  # whether the layer's graph keeps it for the backward pass
    gradient: int  # bytes of its gradient; 0 where it has none


class LayerTape(NamedTuple):
    """One layer on one micro-batch."""

    # which entries of the carry that came in its graph keeps for the backward pass, by the moment of `backward` at
    # which it lets go of them; None for the others
    keeps_in: tuple[int | None, ...]
    outs: tuple[Entry, ...]  # what it returns
    kept: int  # bytes beyond both that its graph keeps
    plain: Stretch  # the forward pass without a graph; what it returns is held at its end
    forward: Stretch  # with a graph
    # as much of that as a checkpointed layer repeats, which ends when all that the backward pass reads is there
    # (torch.utils.checkpoint's early stop)
    recomputed: Stretch
    # from the gradients of what it returns to those of what came in, which are held at its end. It begins with `kept`
    # and those of `outs` that are kept.
    backward: Stretch
    saves: bool  # whether its graph keeps any tensor, so that a checkpointed layer is computed again
    has_parameters: bool
    given: tuple[tuple[int, int], ...]  # bytes of each gradient that `backward` begins with, and when it goes


def trace_layers(
    network: LayerStack,
    inputs: Sequence[Tensor],
    mode: Mode,
    segments: int,
    ahead: int = 0,
    predicting: Callable[[nn.Module], nn.Module] | None = None,
) -> list[LayerTape]:
    """Trace layers on the meta device without activation checkpointing, one after the other.

    Tangents, or gradients where the parameters are frozen, begin behind the layers ``ahead``. ``predicting`` wraps the
    last layer.
    """
    network.requires_grad_(mode != "judge")
    carry = [_Carried.of(tensor, False) for tensor in inputs]
    known: dict[Any, tuple[LayerTape, list[_Carried]]] = {}
    tapes: list[LayerTape] = []
    for i in range(len(network.layers)):
        part = network.part(i, i + 1)
        if mode == "judge" and i == ahead:
            carry[0] = carry[0]._replace(tracked=True)
        if mode == "train with tangents" and i == ahead:
            entered = tuple(carried.empty() for carried in carry)
            tangents = dual.flat(dual.begin(entered, torch.empty_like(entered[0])))[len(carry) :]
            carry = [*carry, *(_Carried.of(tensor, False) for tensor in tangents)]
            if tapes:
                begun = [Entry(tensor.nbytes, tensor.nbytes, None, False, 0) for tensor in tangents]
                tapes[-1] = tapes[-1]._replace(outs=(*tapes[-1].outs, *begun))
        if mode == "train with tangents" and i >= ahead:
            part = part.wrapped(dual.DualLayer)
        if predicting is not None and i == len(network.layers) - 1:
            part = part.wrapped(predicting)
        key = _signature(part), tuple(carry)
        if key not in known:
            known[key] = _trace_layer(part, carry, segments)
        tape, carry = known[key]
        tapes.append(tape)
    return tapes


class _Carried(NamedTuple):
    """A tensor between two layers, how it lies in memory, and whether gradients pass there."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    tracked: bool

    @classmethod
    def of(cls, tensor: Tensor, tracked: bool) -> _Carried:
        """Describe a tensor."""
        return cls(tensor.shape, torch.empty_like(tensor).stride(), tensor.dtype, tracked)

    def empty(self) -> Tensor:
        """Make such a tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _signature(part: LayerStack) -> Any:
    """Equal for layers that compute the same on other parameters."""
    found = []
    for layer in part.layers.values():
        for name, module in layer.named_modules():
            own = {key: repr(value) for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found.append((name, type(module), *own.items(), *((key, t.shape, t.dtype) for key, t in tensors)))
    return tuple(found)


def _trace_layer(part: LayerStack, came_in: Sequence[_Carried], segments: int) -> tuple[LayerTape, list[_Carried]]:
    """Trace one layer, and say what it returns."""
    census = Census()
    with watched(part, census):
        carry = [carried.empty() for carried in came_in]
        census.ignore(carry)
        with census, torch.no_grad():
            outs = part.fold(*carry, segments=segments)
            plain = census.take()
        del carry, outs
        census.take()
        received: list[Tensor] = []
        carry = [carried.empty() for carried in came_in]
        for i, carried in enumerate(came_in):
            if carried.tracked:
                carry[i] = _Source.apply(carry[i].requires_grad_(), received)
        ends = census.ignore(carry)
        saved = [1]  # and the moments at which something is saved for the backward pass

        def pack(tensor: Tensor) -> Tensor:
            saved.append(census.num_moments)
            return tensor

        with census, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outs = part.fold(*carry, segments=segments)
        forward = census.take()
        found = [_Carried.of(tensor, tensor.requires_grad) for tensor in outs]
        ins = [weakref.ref(t.untyped_storage()) for t in carry]
        entries = _entries(outs, carry)
        references = [weakref.ref(t.untyped_storage()) for t in outs]
        given: list[tuple[int, list[int]]] = []

        def watch(gradients: Sequence[Tensor]) -> None:
            sizes = [each.untyped_storage().nbytes() for each in gradients]
            given.extend(zip(sizes, census.ends(gradients), strict=True))

        sink = _Sink.apply(watch, *(t for t in outs if t.requires_grad)) if any(c.tracked for c in found) else None
        del carry, outs
        is_kept = [ref() is not None for ref in ins]
        entries = [e._replace(kept=ref() is not None) for e, ref in zip(entries, references, strict=True)]
        kept = census.held - sum(entry.size for entry in entries if entry.kept and entry.alias is None)
        census.take()
        if sink is not None:
            with census:
                census.goes_backward = True
                sink.backward()
        backward = census.take()
    last = len(backward.live) - 1
    keeps_in = tuple((end[0] if end else last) if kept_in else None for kept_in, end in zip(is_kept, ends, strict=True))
    recomputed, saves = forward.until(max(saved)), len(saved) > 1
    has_parameters = any(True for _ in part.parameters())
    gone = tuple((num_bytes, end[0]) for num_bytes, end in given if end)
    tape = LayerTape(keeps_in, tuple(entries), kept, plain, forward, recomputed, backward, saves, has_parameters, gone)
    return tape, found


def _entries(outs: Sequence[Tensor], carry: Sequence[Tensor]) -> list[Entry]:
    came_in = {id(t.untyped_storage()): number for number, t in reversed(list(enumerate(carry)))}
    entries, seen = [], set()
    for tensor in outs:
        key = id(tensor.untyped_storage())
        size = 0 if key in seen else tensor.untyped_storage().nbytes()
        gradient = tensor.nbytes if tensor.requires_grad else 0
        entries.append(Entry(tensor.nbytes, size, came_in.get(key), False, gradient))
        seen.add(key)
    return entries


@contextmanager
def watched(network: nn.Module, census: Census) -> Iterator[None]:
    """Let a census know, inside the block, when gradients of parameters are complete, and take them away then."""

    def take_gradient(parameter: Tensor) -> None:
        parameter.grad = None
        census.gradient_arrived(parameter.numel())

    parts = [part.values for part in frozen_parts(network).values()]
    census.ignore([*network.parameters(), *network.buffers(), *frozen_tensors(network), *parts])
    census.expect_gradients(network.parameters())
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(take_gradient) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Source(torch.autograd.Function):
    """A tensor in the middle of a graph, which goes on to a place that holds the gradients that arrive."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: list[Tensor]) -> Tensor:
        ctx.received = received
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.received.append(grad)
        return None, None


class _Sink(torch.autograd.Function):
    """A scalar that holds none of the tensors it depends on; their gradients appear when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, watch: Callable[[Sequence[Tensor]], None], *tensors: Tensor) -> Tensor:
        ctx.watch, ctx.specs = watch, [TensorSpec(t.shape, t.dtype) for t in tensors]
        return torch.zeros((), device=_META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made = [spec.empty(_META) for spec in ctx.specs]
        ctx.watch(made)
        return None, *made
