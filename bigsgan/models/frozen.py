"""Frozen parameters: buffers, of which each rank may hold a part, and gather a tensor whole each time code reads it.

Shapes: P numbers of a tensor, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bigsgan.models.initial import make_buffer
from bigsgan.models.layers import StatefulLayer
from bigsgan.models.network import LayerStack
from bigsgan.models.ours import has_our_attributes

_Module = TypeVar("_Module", bound=nn.Module)

_SHAPES = "_bigsgan_frozen"
"""Name in a module's dictionary of the shapes of its frozen tensors."""
_TYPES = "_bigsgan_frozen_types"
"""Name there of the types in which code reads those that ``convert`` has given others."""


def has_frozen(network: nn.Module) -> bool:
    """Whether ``freeze`` has made buffers of parameters of a network."""
    return any(map(_names, network.modules()))


def num_frozen(network: nn.Module) -> int:
    """Numbers of its parameters of which ``freeze`` has made buffers."""
    shapes = (shape for module in network.modules() for shape in vars(module).get(_SHAPES, {}).values())
    return sum(math.prod(shape) for shape in shapes)


def whole_frozen(network: nn.Module) -> dict[str, Tensor]:
    """Return frozen tensors by name, except those of which a rank holds a part. Skipped updates do not restore them."""
    found: dict[str, Tensor] = {}
    for prefix, module in network.named_modules():
        whole = dict(module._buffers)  # without parts
        found |= {f"{prefix}.{name}".lstrip("."): whole[name] for name in _names(module) if name in whole}
    return found


Gather = Callable[[Tensor, Tensor], None]
"""Fills the first tensor with what is the second on each rank, in the order of the ranks."""


def freeze(module: nn.Module, name: str) -> None:
    """Let a parameter of a module be a buffer, which no engine trains and no forward pass changes."""
    make_buffer(module, name)
    vars(module).setdefault(_SHAPES, {})[name] = tuple(module.get_buffer(name).shape)


def freeze_all(network: _Module) -> _Module:
    """Do so with all parameters of a network, and return it."""
    for module in network.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            freeze(module, name)
    return network


def without_frozen(network: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a network's buffers, by name, that may change."""
    frozen = whole_frozen(network)
    return {name: buffer for name, buffer in buffers.items() if name not in frozen}


def convert(network: LayerStack, dtype: torch.dtype) -> None:
    """Hold frozen floats in another type, in which layers of ours compute; code from outside reads them as before."""
    for layer in network.layers.values():
        as_made = hasattr(layer, "types_differ")
        for module in layer.modules():
            if _keeps_reading(module) or (has_our_attributes(module) and getattr(module, "is_float32", False)):
                continue
            for name in _names(module):
                tensor = module.get_buffer(name)
                if tensor.is_floating_point():
                    setattr(module, name, tensor.to(dtype))
                    if as_made and tensor.dtype != dtype:
                        vars(layer)["types_differ"] = True
                        vars(module).setdefault(_TYPES, {})[name] = tensor.dtype


def types_as_made(module: nn.Module) -> dict[str, torch.dtype]:
    """Types in which code from outside reads the tensors of a module, without those below, that have another."""
    return vars(module).get(_TYPES, {})


def _names(module: nn.Module) -> Collection[str]:
    return vars(module).get(_SHAPES, ())


def _keeps_reading(module: nn.Module) -> bool:
    """Whether a module keeps what it reads."""
    return isinstance(module, (StatefulLayer, nn.RNNBase))


class Sharing(NamedTuple):
    """How ranks share frozen tensors."""

    rank: int
    num_ranks: int
    gather: Gather
    device: torch.device  # where tensors are gathered
    on_host: bool = False  # whether the parts lie in the host's memory
    above: int = 0  # tensors of at most so many numbers stay whole
    # whether backward passes gather tensors again, rather than keep them from the forward pass
    regathers: bool = True


class FrozenPart(NamedTuple):
    """This rank's part of a frozen tensor."""

    values: Tensor  # (ceil(P / R),), padded at the tensor's end
    shape: torch.Size
    offset: int  # in the flat tensor
    dtype: torch.dtype  # in which code reads it

    @classmethod
    def of(cls, tensor: Tensor, sharing: Sharing, dtype: torch.dtype | None = None) -> FrozenPart:
        """Copy the part; code reads the tensor in its own type unless another is given."""
        size = -(-tensor.numel() // sharing.num_ranks)
        values, offset = tensor.new_zeros(size), min(sharing.rank * size, tensor.numel())
        own = tensor.flatten()[offset : offset + size]
        values[: len(own)].copy_(own)
        if sharing.on_host and not values.is_meta:
            values = values.cpu().pin_memory() if values.device.type == "cuda" else values.cpu()
        return cls(values, tensor.shape, offset, dtype or tensor.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the tensor."""
        return len(self.values) == self.shape.numel()

    @property
    def own(self) -> Tensor:
        """The values without padding; a live view."""
        return self.values[: max(0, min(len(self.values), self.shape.numel() - self.offset))]


class _Again(NamedTuple):
    """What a graph keeps of a frozen tensor, or of a view of it."""

    part: FrozenPart
    dtype: torch.dtype
    view: tuple[Any, Any, Any]  # size, strides, and first element


class Reads:
    """Reads of a layer's frozen tensors.

    Attributes:
        dtype: Of floats; None for that of each part. It holds until it is set again, as backward passes may recompute.
    """

    dtype: torch.dtype | None = None

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._read: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by storage
        self._open: list[AbstractContextManager] = []

    def __repr__(self) -> str:
        """The same for layers that are."""
        return type(self).__name__

    def read(self, part: FrozenPart) -> Tensor:
        """Return a tensor whole. All ranks do so together."""
        dtype = self.dtype if self.dtype is not None and part.values.is_floating_point() else part.dtype
        tensor: Any = self._gathered(part, dtype).view(part.shape)
        tensor.frozen_part, tensor.frozen_version = part, tensor._version
        self._read[tensor.untyped_storage()._cdata] = tensor
        return tensor

    @torch.no_grad()
    def _gathered(self, part: FrozenPart, dtype: torch.dtype) -> Tensor:
        own = part.values.to(self._sharing.device, non_blocking=True).to(dtype)
        if self._sharing.num_ranks == 1:
            return own
        whole = own.new_empty(len(own) * self._sharing.num_ranks)
        self._sharing.gather(whole.view(torch.uint8), own.view(torch.uint8))  # whatever a backend knows of types
        return whole[: part.shape.numel()]

    def open(self, *_: Any) -> None:
        """Begin a forward pass, whose graph is to keep no frozen tensor."""
        self._open.append(saved_tensors_hooks(self._pack, self._unpack))
        self._open[-1].__enter__()

    def close(self, *_: Any) -> None:
        """End it."""
        self._open.pop().__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Any:
        found: Any = self._read.get(tensor.untyped_storage()._cdata)
        is_view = found is not None and tensor.dtype == found.dtype and not (tensor.is_conj() or tensor.is_neg())
        if not is_view or found._version != found.frozen_version:  # or it was changed in place since
            return tensor, tensor._version
        return _Again(found.frozen_part, found.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Again):
            return self._gathered(kept.part, kept.dtype).as_strided(*kept.view)
        tensor, version = kept
        if tensor._version != version:  # which torch does not compare where there are hooks
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} was changed in place before its backward pass")
        return tensor  # type: ignore[no-any-return]


class _Shared(dict[str, Any]):
    """A module's buffers, with those besides that are gathered when the module reads them as its attributes."""

    def __init__(self, whole: Mapping[str, Any], parts: dict[str, FrozenPart], reads: Reads) -> None:
        super().__init__(whole)
        self.parts, self._reads = parts, reads

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.parts

    def __missing__(self, name: str) -> Tensor:
        return self._reads.read(self.parts[name])


def share_out(network: LayerStack, sharing: Sharing) -> None:
    """Let this rank hold its parts alone of a network's frozen tensors, but for vectors. Ranks hold the same before.

    They are no longer among its buffers; see ``frozen_parts``. Where a whole module is frozen, its graphs do not keep
    them. A module that recomputes itself keeps the other tensors that these modules save for the backward pass.
    """
    for layer in network.layers.values():
        _share_out(layer, sharing)


def _share_out(layer: nn.Module, sharing: Sharing) -> None:
    reads = Reads(sharing)
    for module in layer.modules():
        named = {name: module.get_buffer(name) for name in _names(module)}
        taken = {name: tensor for name, tensor in named.items() if tensor.dim() > 1 and tensor.numel() > sharing.above}
        if not taken or _keeps_reading(module):
            continue
        whole = {name: buffer for name, buffer in module._buffers.items() if name not in taken}
        parts = {
            name: FrozenPart.of(tensor, sharing, types_as_made(module).get(name)) for name, tensor in taken.items()
        }
        vars(layer)["frozen_reads"] = reads
        vars(module)["_buffers"] = _Shared(whole, parts, reads)
        if sharing.regathers and not any(True for _ in module.parameters()):
            # Of a trained parameter such a graph would keep what ZeRO 3 has gathered.
            module.register_forward_pre_hook(reads.open)
            module.register_forward_hook(reads.close, always_call=True)


def frozen_parts(network: nn.Module) -> dict[str, FrozenPart]:
    """Return this rank's parts of frozen tensors by name."""
    named = ((prefix, module._buffers) for prefix, module in network.named_modules())
    return {
        f"{prefix}.{name}": part
        for prefix, buffers in named
        if isinstance(buffers, _Shared)
        for name, part in buffers.parts.items()
    }
