"""Counts the memory of a computation on the meta device, by the storages that come and go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Use:
    """A module's parameters are needed from moment ``start`` of a stretch on, and not any more at moment ``stop``."""

    start: int
    stop: int
    parameters: tuple[int, ...]  # their places among the network's


@dataclass(frozen=True)
class Stretch:
    """A part of a computation, moment by moment."""

    live: np.ndarray  # bytes that it holds at each moment, (T,) int64, beyond what was there before
    arrived: np.ndarray  # elements of parameters whose gradients are complete by then, (T,) int64
    uses: tuple[Use, ...] = ()  # of parameters, in order of their starts

    @property
    def end(self) -> int:
        """Bytes that are held when it is over."""
        return int(self.live[-1])

    @property
    def peak(self) -> int:
        """Most bytes that it holds at any moment."""
        return int(self.live.max(initial=0))

    def condensed(self) -> Stretch:
        """The most that is held between one arrival, beginning or end of a use and the next."""
        marks = {0, *(np.flatnonzero(np.diff(self.arrived)) + 1).tolist()}
        marks |= {moment for use in self.uses for moment in (use.start, use.stop) if moment < len(self.live)}
        starts = sorted(marks)
        places = {mark: place for place, mark in enumerate([*starts, len(self.live)])}
        uses = tuple(Use(places[u.start], places[u.stop], u.parameters) for u in self.uses)
        return Stretch(np.maximum.reduceat(self.live, starts), self.arrived[starts], uses)

    def until(self, moment: int) -> Stretch:
        """Its first moments."""
        return Stretch(self.live[:moment], self.arrived[:moment], tuple(u for u in self.uses if u.start < moment))

    def above(self, held: int, arrived: int = 0) -> Stretch:
        """The same on top of ``held`` bytes and ``arrived`` gradients."""
        return Stretch(self.live + held, self.arrived + arrived, self.uses)

    def renumbered(self, offset: int) -> Stretch:
        """The same in a network in which ``offset`` parameters come before."""
        uses = tuple(Use(u.start, u.stop, tuple(p + offset for p in u.parameters)) for u in self.uses)
        return Stretch(self.live, self.arrived, uses)


def join(stretches: Sequence[Stretch]) -> Stretch:
    """One or more after each other, each as it is."""
    starts = np.cumsum([0, *(len(stretch.live) for stretch in stretches)]).tolist()
    uses = tuple(
        Use(use.start + start, use.stop + start, use.parameters)
        for start, stretch in zip(starts, stretches, strict=False)
        for use in stretch.uses
    )
    live, arrived = (np.concatenate([getattr(s, name) for s in stretches]) for name in ("live", "arrived"))
    return Stretch(live, arrived, uses)


_SMALL = 10_000
"""Elements of parameters whose second gradient does not matter; their shapes may be those of activations."""

_ZEROS = torch.ops.aten._efficientzerotensor.default
"""Which have no memory: the tangents of parameters."""

_ADD = torch.ops.aten.add.Tensor
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTIONS = (_CONVOLUTION, torch.ops.aten.convolution_backward.default)


def _copied(tensor: Tensor | None) -> int:
    """Bytes of the copy that a convolution makes of a tensor unless it lies in one of two orders."""
    if tensor is None or tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return 0
    return tensor.nbytes


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


class Census(TorchDispatchMode):
    """Counts the storages that operations inside the block make, as long as anything refers to them.

    What was made before the block does not count. Of an operation the results count, and not what a kernel holds while
    it computes them, but for copies of tensors that a convolution needs in another order.

    Attributes:
        held: Bytes that are held now.
        goes_backward: Whether a backward pass runs that nothing will be differentiated through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self._arrived = 0
        self.goes_backward = False
        self._known: dict[int, weakref.ref] = {}
        self._shapes: set[torch.Size] = set()
        self._moments: list[tuple[int, int]] = [(0, 0)]
        self._uses: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and take note of what is new."""
        copies = sum(map(_copied, args[:3])) if func in _CONVOLUTIONS else 0
        results = self._summed(*args) if func is _ADD else None
        if results is None:
            results = func(*args, **(kwargs or {}))
        if func is _CONVOLUTION and _is_channels_last(args[0]):  # kernels keep the order, which is forgotten here
            results = results.contiguous(memory_format=torch.channels_last)
        if func is _ZEROS:
            self.ignore([results])
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and id(storage := result.untyped_storage()) not in self._known:
                self._know(storage, storage.nbytes())
                self.held += storage.nbytes()
                self._note()
        if copies:
            self._moments.append((self.held + copies, self._arrived))
            self._note()
        return results

    @property
    def num_moments(self) -> int:
        """Since ``take``."""
        return len(self._moments)

    def ignore(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Take storages as there already; what is returned gets, for each, the moment since ``take`` when it goes."""
        return [self._know(tensor.untyped_storage(), 0) for tensor in tensors]

    def gradient_arrived(self, numel: int) -> None:
        """Take note that the gradient of a parameter is complete."""
        self._arrived += numel
        self._note()

    def begin_use(self, parameters: tuple[int, ...]) -> list[Any]:
        """Take note that parameters are needed from now on."""
        self._note()
        use = [len(self._moments) - 1, None, parameters]
        self._uses.append(use)
        return use

    def end_use(self, use: list[Any]) -> None:
        """Take note that they are not needed any more."""
        self._note()
        use[1] = len(self._moments) - 1

    def expect_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Know the shapes of parameters: a backward pass adds up the gradients of one that was used twice in place.

        It does not in the sight of a dispatch mode such as this (torch 2.15, autograd/input_buffer.cpp).
        """
        for parameter in parameters:
            if parameter.numel() > _SMALL:
                self._shapes |= {parameter.shape, parameter.shape[::-1]}  # a linear map's gradient arrives transposed

    def take(self) -> Stretch:
        """What happened since the last call, of which it begins with what is held."""
        live, arrived = np.array(self._moments, dtype=np.int64).T
        uses = tuple(Use(u[0], len(live) if u[1] is None else u[1], u[2]) for u in self._uses)
        self._moments, self._uses = [(self.held, self._arrived)], []
        return Stretch(live, arrived, uses)

    def _summed(self, first: Any, second: Any, *_: Any) -> Tensor | None:
        """The sum of two gradients of a parameter in the place of the first; None for other sums."""
        if not self.goes_backward or torch.is_grad_enabled() or not isinstance(second, Tensor):
            return None
        is_gradient = first.shape == second.shape and first.shape in self._shapes and not first._is_zerotensor()
        return first.add_(second) if is_gradient else None

    def _know(self, storage: torch.UntypedStorage, size: int) -> list[int]:
        """Count a storage off when it goes; what is returned gets the moment, if the storage was not known before."""
        end: list[int] = []
        self._known.setdefault(id(storage), weakref.ref(storage, partial(self._forget, id(storage), size, end)))
        return end

    def _forget(self, key: int, size: int, end: list[int], _: Any) -> None:
        del self._known[key]
        self.held -= size
        self._note()
        end.append(self.num_moments - 1)

    def _note(self) -> None:
        self._moments.append((self.held, self._arrived))
