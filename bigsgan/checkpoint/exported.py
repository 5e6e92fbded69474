"""Reads a network that `bigsgan export` has written, as a safetensors file or a folder for the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from bigsgan.checkpoint.files import first_not_finite
from bigsgan.checkpoint.reader import SavedValues
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import check_regular, parse_json, read_text

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
"""Files of a folder for the Hub."""


def read_export(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the header and the tensors of an export; a folder has two files, and its header is a tree.

    Raises any error for a file that is none.
    """
    file = _file(path)
    check_regular(file)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata() or {}
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if file != path:
        tree = dict(json.loads(read_text(path / CONFIG_FILE)))
        header = {name: value if isinstance(value, str) else json.dumps(value) for name, value in tree.items()}
    return header, state


def _file(path: Path) -> Path:
    return path / WEIGHTS_FILE if os.path.isdir(path) else path


class Exported:
    """An export of one network, whose weights a run may begin with.

    Attributes:
        path: The file or folder.
        told: Its run's ``recipe``.
        shapes: Shapes of its tensors by name, without layers before the network's own, such as augmentation.
    """

    def __init__(self, field: str, path: Path, kind: str) -> None:
        """Read the file or folder that ``field`` names, to the end; ``kind`` is the network that it must have.

        Raises:
            UserError: It cannot be read, is no export, or has another network, or numbers that are not finite.
        """
        self._field, self.path, self._kind = field, path, kind
        try:
            header, state = read_export(path)
            if not {"network", "recipe"} <= header.keys():
                raise ValueError("its header is that of another program")
            self.told: Mapping[Any, Any] = {"recipe": parse_json(header["recipe"])}
        except Exception as error:  # a foreign file can cause any error
            problem = f"must be what `bigsgan export` has written: {reason(error, path)}"
            raise self._error(problem, "give a safetensors file or a folder for the Hub") from None
        if header["network"] != kind:
            raise self._error(f"has a {header['network']}", f"give an export of the {kind}")
        if bad := first_not_finite(state):
            raise self._error(f"contains Inf or NaN ({bad} of the {kind})", "give another export")
        self.shapes = {name: value.shape for name, value in state.items() if not name.startswith("layers.-")}

    def read(self, network: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Read the state of a network, which may be on the meta device, and the names of buffers that it lacks.

        Raises:
            UserError: The export is of another network.
        """
        wanted, (_, own) = network.state_dict(), read_export(self.path)
        own = {name: value for name, value in own.items() if name in wanted}
        state = {name: value.float() if value.is_floating_point() else value for name, value in own.items()}
        parameters = {name for name, _ in network.named_parameters()}
        lacking = sorted(parameters - state.keys())
        odd = sorted(name for name, value in state.items() if value.shape != wanted[name].shape)
        if lacking or odd:
            problem = f"lacks {lacking[0]}" if lacking else f"has another shape of {odd[0]}"
            raise self._error(f"{problem} of the {self._kind}", "give the recipe of that network by --config")
        self.refuse_others(self._kind, network)
        return state, sorted(wanted.keys() - state.keys())

    def refuse_others(self, entry: str, network: nn.Module) -> None:
        """Refuse tensors for which a network has no place; buffers that are not persistent are accepted.

        Raises:
            UserError: There are such tensors.
        """
        known = network.state_dict().keys() | {name for name, _ in network.named_buffers()}
        if more := sorted(self.shapes.keys() - known):
            raise self._error(f"has {more[0]}, unlike the {entry} of its recipe", "give another export")

    def entry(self, name: str) -> SavedValues:
        """Return its values as those of a checkpoint's entry."""
        return SavedValues(self, name, {}, frozenset())

    def has(self, value: str) -> bool:
        """Return whether it has a value, under its name in a checkpoint."""
        return value.split("/", 2)[2] in self.shapes

    def fill(self, value: str, offset: int, out: Tensor) -> None:
        """Fill ``out`` with a value's elements from ``offset`` on; one tensor at a time is in memory.

        Raises:
            UserError: The file has changed since it was opened.
        """
        try:
            with safe_open(_file(self.path), framework="pt") as opened:
                out.copy_(opened.get_tensor(value.split("/", 2)[2]).flatten()[offset : offset + out.numel()])
        except Exception as error:  # as above
            problem = f"cannot be read any longer: {reason(error, self.path)}"
            raise self._error(problem, "leave it in place until the run has begun") from None

    def _error(self, problem: str, remedy: str) -> UserError:
        return UserError(self._field, str(self.path), problem, remedy)
