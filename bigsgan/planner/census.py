"""Counts the memory of a computation on the meta device: the bytes of all storages that exist at each moment."""

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

from bigsgan.models.resizing import is_last


@dataclass(frozen=True)
class Stretch:
    """A part of a computation, moment by moment."""

    live: np.ndarray  # bytes that it holds at each moment, (T,) int64, without those held before it
    arrived: np.ndarray  # elements of parameters whose gradients are complete at each moment, (T,) int64

    @property
    def end(self) -> int:
        """Bytes held at the end."""
        return int(self.live[-1])

    @property
    def peak(self) -> int:
        """Most bytes held at any moment."""
        return int(self.live.max(initial=0))

    def condensed(self) -> Stretch:
        """Keep one moment, the fullest, between each arrival and the next."""
        starts = [0, *(np.flatnonzero(np.diff(self.arrived)) + 1).tolist()]
        return Stretch(np.maximum.reduceat(self.live, starts), self.arrived[starts])

    def of_a_node(self, element: int, given: Iterable[tuple[int, int]]) -> Stretch:
        """The same backward stretch if it lets nothing go that it was given or is to give before its end.

        Gradients of parameters take so many bytes an ``element``. ``given`` are the bytes of each gradient that it
        begins with, and the moment at which it goes.
        """
        live, arrived = self.live + self.arrived * element, np.zeros_like(self.arrived)
        for num_bytes, moment in given:
            live[moment:] += num_bytes
        return Stretch(np.append(live, self.live[-1]), np.append(arrived, self.arrived[-1]))

    def until(self, moment: int) -> Stretch:
        """The first moments of the stretch, up to ``moment``."""
        return Stretch(self.live[:moment], self.arrived[:moment])

    def above(self, held: int, arrived: int = 0) -> Stretch:
        """The same stretch on top of ``held`` bytes and ``arrived`` gradients."""
        return Stretch(self.live + held, self.arrived + arrived)


def join(stretches: Sequence[Stretch]) -> Stretch:
    """Join one or more stretches in their order, unchanged."""
    return Stretch(*(np.concatenate([getattr(s, name) for s in stretches]) for name in ("live", "arrived")))


_SMALL = 10_000
"""Parameters of at most so many elements have negligible second gradients, and shapes that activations may have."""

_ZEROS = torch.ops.aten._efficientzerotensor.default
"""Makes tensors without memory: the tangents of parameters."""

_ADD = torch.ops.aten.add.Tensor
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTIONS = (_CONVOLUTION, torch.ops.aten.convolution_backward.default)


def _copied(tensor: Tensor | None) -> int:
    """Bytes of the copy that a convolution makes of a tensor, unless it is contiguous in one of two orders."""
    if tensor is None or tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return 0
    return tensor.nbytes


class Census(TorchDispatchMode):
    """Counts the storages that operations inside the block make, as long as anything refers to them.

    Storages from before the block do not count. Results of operations count; a kernel's own workspace does not, except
    the copies of tensors that a convolution needs in another order.

    Attributes:
        held: Bytes held now.
        goes_backward: Whether a backward pass is running that will not be differentiated itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self._arrived = 0
        self.goes_backward = False
        self._known: dict[int, tuple[weakref.ref, list[int]]] = {}
        self._shapes: set[torch.Size] = set()
        self._moments: list[tuple[int, int]] = [(0, 0)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and count new storages."""
        copies = sum(map(_copied, args[:3])) if func in _CONVOLUTIONS else 0
        results = self._summed(*args) if func is _ADD else None
        if results is None:
            results = func(*args, **(kwargs or {}))
        if func is _CONVOLUTION and is_last(args[0]):  # kernels keep the order; the meta device does not
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
        """Number of moments since ``take``."""
        return len(self._moments)

    def ignore(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Count storages as 0 bytes; each list returned gets the moment since ``take`` at which its storage goes."""
        return [self._know(tensor.untyped_storage(), 0) for tensor in tensors]

    def ends(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Return a list for each tensor that counts, which gets the moment since ``take`` at which its storage goes."""
        return [self._known[id(tensor.untyped_storage())][1] for tensor in tensors]

    def gradient_arrived(self, numel: int) -> None:
        """Note that the gradient of a parameter is complete."""
        self._arrived += numel
        self._note()

    def expect_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Note the shapes of parameters, as a backward pass adds the gradients of a parameter used twice in place.

        Under a dispatch mode such as this one it does not add in place (torch 2.15, autograd/input_buffer.cpp).
        """
        for parameter in parameters:
            if parameter.numel() > _SMALL:
                self._shapes |= {parameter.shape, parameter.shape[::-1]}  # a linear map's gradient arrives transposed

    def take(self) -> Stretch:
        """The stretch since the last call; it begins with the bytes then held."""
        live, arrived = np.array(self._moments, dtype=np.int64).T
        self._moments = [(self.held, self._arrived)]
        return Stretch(live, arrived)

    def _summed(self, first: Any, second: Any, *_: Any) -> Tensor | None:
        """Add two gradients of a parameter in the place of the first; None for other sums."""
        if not self.goes_backward or torch.is_grad_enabled() or not isinstance(second, Tensor):
            return None
        is_gradient = first.shape == second.shape and first.shape in self._shapes and not first._is_zerotensor()
        return first.add_(second) if is_gradient else None

    def _know(self, storage: torch.UntypedStorage, size: int) -> list[int]:
        """Subtract a storage's size when it goes; the list returned then gets the moment, if the storage is new."""
        end: list[int] = []
        self._known.setdefault(id(storage), (weakref.ref(storage, partial(self._forget, id(storage), size, end)), end))
        return end

    def _forget(self, key: int, size: int, end: list[int], _: Any) -> None:
        del self._known[key]
        self.held -= size
        self._note()
        end.append(self.num_moments - 1)

    def _note(self) -> None:
        self._moments.append((self.held, self._arrived))
