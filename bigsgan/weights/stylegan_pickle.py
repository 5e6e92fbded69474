"""Reads the pickles of stylegan2-ada-pytorch, stylegan3 and R3GAN, without a foreign class or running foreign code.

Such a file contains a dictionary of networks. Each module in it is a call of ``_reconstruct_persistent_obj`` with a
dictionary that has the source text of its class (which the original executes), the class's name and the instance's
attributes, among them PyTorch's ``_parameters``, ``_buffers`` and ``_modules``. Here that call makes a placeholder with
the attributes, and the rest is dropped. R3GAN's modules are ordinary ones, and become placeholders too.

A pickle can call whatever ``find_class`` returns with any arguments, and set attributes of any object it gets. So all
callables are listed below and safe with any arguments, and all objects are plain containers or refuse new attributes.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor

from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import check_stored
from bigsgan.weights.tensor_file import Inert

_G_ARGUMENTS = ("z_dim", "c_dim", "w_dim", "img_resolution", "img_channels", "mapping_kwargs", "synthesis_kwargs")
_D_ARGUMENTS = (
    *("c_dim", "img_resolution", "img_channels", "architecture", "channel_base", "channel_max"),
    *("num_fp16_res", "conv_clamp", "cmap_dim", "block_kwargs", "mapping_kwargs", "epilogue_kwargs"),
)
"""The originals' arguments in order."""

_MOST_SHARED = 4
"""Networks may share tensors, and a snapshot has four: together they take at most this many times the file's bytes."""


class ForeignNetwork(NamedTuple):
    """A published network."""

    state: dict[str, Tensor]  # parameters and buffers by name, on the host
    # arguments of the original, and stylegan2-ada-pytorch's defaults where stylegan3 has others; values that are not
    # plain Python are placeholders
    init_kwargs: Mapping[str, Any] = {}
    parameters: tuple[str, ...] = ()  # names of parameters as optimizers number them; empty if unknown


class Snapshot(NamedTuple):
    """Contents of a training loop's snapshot."""

    networks: dict[str, ForeignNetwork]  # by name: `G`, `D`, `G_ema` and `augment_pipe`
    training_set: dict[str, Any] | None = None  # settings of the data; None if unknown, as converted from TensorFlow
    nimg: int | None = None  # images seen, in R3GAN's snapshots
    optimizers: Mapping[str, dict[str, Any]] = {}  # state dicts for `G` and `D`, in R3GAN's and GAT's snapshots
    unaugmented: bool = False  # whether it says that there were no augmentations, as converted pickles do too
    args: Mapping[str, Any] = {}  # arguments of the trainer, in GAT's snapshots
    steps: Any = None  # updates made, in GAT's snapshots


def read_snapshot(path: Path) -> Snapshot:
    """Read a pickle of a training loop.

    Raises:
        UserError: The file cannot be read, is of another kind, is damaged, or needs code.
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file).load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("it contains no dictionary")
        return _snapshot(content, path.stat().st_size)
    except _TensorFlowError:
        remedy = "convert it with legacy.py of stylegan2-ada-pytorch or stylegan3 first"
        raise UserError(str(path), None, "is a legacy pickle of TensorFlow, which is not supported", remedy) from None
    except OSError as error:
        raise UserError(str(path), None, f"cannot be read: {reason(error, path)}", "give another file") from None
    except Exception as error:  # a pickle can make its reader raise anything
        problem = f"must be a pickle of StyleGAN or R3GAN that can be read safely: {error}"
        raise UserError(
            str(path), None, problem, "give a snapshot of stylegan2-ada-pytorch, stylegan3 or R3GAN"
        ) from None


def _snapshot(content: dict[Any, Any], num_bytes: int) -> Snapshot:
    networks, most_bytes = {}, _MOST_SHARED * num_bytes
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, _Persistent) and "_modules" in value.attributes:
            networks[name] = _network(value, most_bytes)
            most_bytes -= sum(tensor.nbytes for tensor in networks[name].state.values())
    training_set, nimg = content.get("training_set_kwargs"), content.get("cur_nimg")
    return Snapshot(
        networks,
        training_set if isinstance(training_set, dict) else None,
        nimg if type(nimg) is int and nimg >= 0 else None,
        {name: _optimizer(content[f"{name}_opt_state"]) for name in ("G", "D") if f"{name}_opt_state" in content},
        content.get("augment_pipe", ...) is None,
    )


def _network(module: _Persistent, most_bytes: int) -> ForeignNetwork:
    named = list(_tensors(module))
    if sum(tensor.nbytes for _, _, tensor in named) > most_bytes:  # as one tensor may have many names
        raise pickle.UnpicklingError("its tensors are larger than the file")
    parameters = tuple(name for is_parameter, name, _ in named if is_parameter)
    state = {name: tensor.contiguous() for _, name, tensor in named}
    return ForeignNetwork(state, _arguments(module), parameters)


def _optimizer(saved: Any) -> dict[str, Any]:
    """An optimizer's state dict with its tensors, as far as it has PyTorch's structure."""

    def opened(value: Any) -> Any:
        return value.content if isinstance(value, _Boxed) else value

    state, groups = (saved.get(key) if isinstance(saved, dict) else None for key in ("state", "param_groups"))
    return {
        "param_groups": groups,
        "state": {
            number: {kind: opened(value) for kind, value in values.items()}
            for number, values in _plain(state).items()
            if isinstance(values, dict)
        },
    }


class _TensorFlowError(pickle.UnpicklingError):
    """The pickle contains networks of the original in TensorFlow."""


class _Sealed:
    """An object that a pickle gets but cannot change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes an object after it was made")


class _Persistent(_Sealed):
    """Placeholder for an instance of a class whose source text is in the pickle."""

    __slots__ = ("attributes",)

    def __init__(self, meta: Any = None, *rest: Any) -> None:
        if rest or not isinstance(meta, dict) or not isinstance(meta.get("state"), dict):
            raise pickle.UnpicklingError("an object is not in the known layout")
        self.attributes = meta["state"]


class _Plain(_Persistent):
    """Placeholder for an ordinary module of R3GAN or torch, which a pickle makes without a call and then fills once."""

    __slots__ = ()

    def __init__(self) -> None:
        raise pickle.UnpicklingError("a module is called")

    def __setstate__(self, state: Any) -> None:
        if hasattr(self, "attributes") or not isinstance(state, dict):
            raise pickle.UnpicklingError("an object is not in the known layout")
        self.attributes = {**state, "_init_kwargs": _stage_types(state)}


class _Boxed(_Sealed):
    """Holds a storage or a tensor, because their own ``__setstate__`` trusts its argument."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class _Call(_Sealed):
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _EasyDict(dict):
    """The original's dictionary with attributes, but without the attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes a dictionary's attributes")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._storages: dict[int, tuple[bytes, _Boxed]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("dnnlib.util", "EasyDict"):
            # A pickle makes it through __new__, which needs a class; a new class, so that nothing else uses it.
            return type("EasyDict", (_EasyDict,), {"__slots__": ()})
        if module.startswith("dnnlib.tflib"):
            raise _TensorFlowError
        if module in _PLAIN_MODULES or module.startswith("torch.nn.modules."):
            return type(name, (_Plain,), {"__slots__": ()})  # a new one, as above
        if (module, name) in _TYPES:
            return _Boxed(name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _Call(self._storage if name == "_load_from_bytes" else _ALLOWED[module, name])

    def _storage(self, data: Any) -> _Boxed:
        """Read a storage; the same bytes object gives the same storage again."""
        if id(data) not in self._storages:
            self._storages[id(data)] = data, _storage(data)
        return self._storages[id(data)][1]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of it")


def _storage(data: Any) -> _Boxed:
    """Read a storage with PyTorch's own reader for files that may contain only tensors."""
    if not isinstance(data, bytes):
        raise pickle.UnpicklingError("a storage is not bytes")
    try:
        check_stored(io.BytesIO(data))
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from None
    try:
        storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # torch's message recommends running the code
        raise pickle.UnpicklingError("a storage is damaged or contains code, which is not executed") from None
    if not isinstance(storage, torch.storage.TypedStorage):
        raise pickle.UnpicklingError("a storage contains something else")
    return _Boxed(storage)


def _tensor(box: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Boxed:
    """Make a tensor that must lie within its storage; PyTorch would enlarge the storage instead."""
    storage = box.content if isinstance(box, _Boxed) else None
    if not isinstance(storage, torch.storage.TypedStorage) or not isinstance(size, tuple):
        raise pickle.UnpicklingError("a tensor has no storage or size")
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor has no valid shape")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= storage._size():
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    if math.prod(size) > storage._size():
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    return _Boxed(torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage, offset, size, stride))


_PLAIN_MODULES = ("training.networks", "R3GAN.Networks", "R3GAN.Resamplers", "R3GAN.FusedOperators")
_TYPES = [("torch", name) for name in ("bfloat16", "float16", "float32", "float64")]

_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    ("numpy", "dtype"): Inert,
    ("numpy", "ndarray"): Inert,
    **{
        (f"numpy.{core}.multiarray", name): Inert  # NumPy 2 renamed it
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch_utils.persistence", "_reconstruct_persistent_obj"): _Persistent,
}


def _stage_types(state: dict[Any, Any]) -> dict[str, Any]:
    """The types that an R3GAN network's stages compute in, from its attributes; empty for other modules."""
    modules: Any = state
    for name in ("Model", "MainLayers"):
        children = modules.get("_modules")
        child = children.get(name) if isinstance(children, dict) else None
        if isinstance(child, _Plain):
            modules = child.attributes
        elif name == "MainLayers":  # ``Model`` wraps the network, or is left out
            return {}
    types = (stage.attributes.get("DataType") for stage in modules["_modules"].values())
    names = (kind.content if isinstance(kind, _Boxed) else "float32" for kind in types)
    return {"stage_types": [name if isinstance(name, str) else "unknown" for name in names]}


def _dictionary(module: _Persistent, name: str) -> dict[str, Any]:
    found = module.attributes.get(name)
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"a module has no {name}")
    return found


def _arguments(network: _Persistent) -> dict[str, Any]:
    """Arguments of a network; stylegan3 changed defaults, and can be told by its layers, which keep their sizes."""
    children, places = _dictionary(network, "_modules"), network.attributes.get("_init_args")
    names = _G_ARGUMENTS if "synthesis" in children else _D_ARGUMENTS
    positional = dict(zip(names, places, strict=False)) if isinstance(places, tuple) else {}
    given = {**positional, **_dictionary(network, "_init_kwargs")}
    last = children.get("mapping" if "synthesis" in children else "b4")
    if last is None:  # neither of the two networks: the augmentations
        return given
    layers = _dictionary(last, "_modules").values() if isinstance(last, _Persistent) else ()
    if not given or any(isinstance(layer, _Persistent) and "in_features" in layer.attributes for layer in layers):
        return given
    precision = {"num_fp16_res": 0, "conv_clamp": None}
    if "synthesis" not in children:
        return {**precision, **given}
    nested: dict[str, dict[str, Any]] = {"mapping_kwargs": {"w_avg_beta": 0.995}, "synthesis_kwargs": precision}
    return {**given, **{key: {**value, **_plain(given.get(key))} for key, value in nested.items()}}


def _plain(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tensors(network: _Persistent) -> Iterator[tuple[bool, str, Tensor]]:
    """Parameters (True) and buffers of a module and its children, with PyTorch's names and in its order."""
    seen: set[int] = set()

    def walk(module: Any, prefix: str) -> Iterator[tuple[bool, str, Tensor]]:
        # The walk would never end with a module that is its own child, and hardly ever with repeats at many levels.
        if not isinstance(module, _Persistent) or id(module) in seen:
            raise pickle.UnpicklingError("its modules do not form a tree")
        seen.add(id(module))
        parameters = _dictionary(module, "_parameters")
        for name, tensor in {**parameters, **_dictionary(module, "_buffers")}.items():
            if isinstance(tensor, _Boxed) and isinstance(tensor.content, Tensor):
                yield name in parameters, f"{prefix}{name}", tensor.content
            elif tensor is not None:
                raise pickle.UnpicklingError(f"{prefix}{name} is not a tensor")
        for name, child in _dictionary(module, "_modules").items():
            if child is not None:
                yield from walk(child, f"{prefix}{name}.")

    return walk(network, "")
