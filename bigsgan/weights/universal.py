"""Reads a network of DeepSpeed's universal checkpoint, which `bigsgan export` or ds_to_universal.py has written.

    DIR/latest_universal                            text file: the tag's name
    DIR/TAG/zero/NAME/fp32.pt                       weights, and buffers of ZeRO 1 and 2
    DIR/TAG/zero/NAME/exp_avg.pt, exp_avg_sq.pt     Adam's state
    DIR/TAG/zero/NAME/step.pt                       Adam's updates; of ZeRO 3 in zero/optimizer_state.pt
    DIR/TAG/*mp_rank_00_model_states.pt             buffers, and what a trainer has added, such as a recipe

A value is a tensor under ``param``; of ZeRO 3 it is the tensor itself, flat. This is the format of deepspeed 0.19.8
(checkpoint/ds_to_universal.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigsgan.checkpoint import saved_buffers
from bigsgan.checkpoint.exported import Exported
from bigsgan.checkpoint.files import first_not_finite
from bigsgan.errors import UserError, reason
from bigsgan.weights.optimizer_state import Moments, collected, is_plain
from bigsgan.weights.tensor_file import read_content

_FEW = 3
_CONVERT = "convert it by `python -m deepspeed.checkpoint.ds_to_universal`, with --inject_missing_state"


class Universal(NamedTuple):
    """A network that was read."""

    state: dict[str, Tensor]  # parameters, and the buffers that are known
    moments: Moments | None  # Adam's state
    without_moments: str  # why there is none
    unknown: list[str]  # buffers that the checkpoint lacks


class Folder:
    """A universal checkpoint of one network.

    Attributes:
        told: What its trainer has added: bigsgan's ``recipe`` and ``nimg``, if bigsgan exported it.
    """

    def __init__(self, option: str, path: Path) -> None:
        """Find the checkpoint that ``option`` names: the directory of a tag, or the one around it.

        Raises:
            UserError: There is none.
        """
        self._option, self._path = option, path
        try:
            self._zero = self._find() / "zero"
            self._entries = sorted(entry.name for entry in self._zero.iterdir() if entry.is_dir())
            states = sorted(self._zero.parent.glob("*mp_rank_00_model_states.pt"))
        except OSError as error:
            raise self._error(f"cannot be read: {reason(error, path)}", "give a directory") from None
        content = read_content(option, states[0]) if states else {}
        self.told: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}

    def read(self, kind: str, network: nn.Module) -> Universal:
        """Read a network, which may be on the meta device; messages call it ``kind``.

        Raises:
            UserError: The checkpoint is of another network, or a file cannot be read.
        """
        parameters, buffers = dict(network.named_parameters()), saved_buffers(network)
        found = _without_prefix(self._entries, parameters.keys() | buffers.keys())
        lacking, others = parameters.keys() - found.keys(), found.keys() - parameters.keys() - buffers.keys()
        if lacking or others:
            problem = f"lacks {_few(lacking)} of the {kind}" if lacking else f"has {_few(others)}, unlike the {kind}"
            detail = f"it has {_few(others)}" if lacking and others else ""
            raise self._error(problem, "give the recipe of that network by --config", detail)
        state = {name: self._value(kind, found[name], "fp32", like) for name, like in parameters.items()}
        wholes = _without_prefix(self._of_model(), buffers.keys())
        for name, like in buffers.items():
            if name in found:
                state[name] = self._value(kind, found[name], "fp32", like)
            elif name in wholes:
                state[name] = self._fitting(kind, name, wholes[name], like)
        if bad := first_not_finite(state):
            raise self._error(f"contains Inf or NaN ({bad} of the {kind})", "give an earlier checkpoint")
        unknown = sorted(buffers.keys() - state.keys())
        try:
            return Universal(state, self._moments(found, {name: state[name] for name in parameters}), "", unknown)
        except ValueError as error:
            return Universal(state, None, str(error), unknown)

    def _find(self) -> Path:
        path, latest = self._path, self._path / "latest_universal"
        named = latest.read_text(errors="replace").strip() if latest.is_file() else ""
        beside = [path / named] if named and Path(named).name == named else path.iterdir()
        tags = [tag for tag in (path, *sorted(beside)) if (tag / "zero").is_dir()]
        if not tags or (len(tags) > 1 and tags[0] != path):
            problem, detail = "must be a universal checkpoint of DeepSpeed", "it has no directory `zero`"
            if tags:
                detail = f"it has {len(tags)} of them and no latest_universal"
            raise self._error(problem, "give the directory of a tag" if tags else _CONVERT, detail)
        return tags[0]

    def _of_model(self) -> dict[str, Any]:
        """Values by name in the model's own file: buffers, and weights of lower precision."""
        module, buffers = self.told.get("module"), self.told.get("buffers")
        parts = [part for part in (module, buffers) if isinstance(part, dict)]
        return {name: value for part in parts for name, value in part.items() if isinstance(name, str)}

    def _value(self, kind: str, entry: str, file: str, like: Tensor) -> Tensor:
        return self._fitting(kind, entry, self._content(entry, file), like)

    def _content(self, entry: str, file: str) -> Any:
        content = read_content(self._option, self._zero / entry / f"{file}.pt")
        return content.get("param") if isinstance(content, Mapping) else content

    def _fitting(self, kind: str, entry: str, value: Any, like: Tensor) -> Tensor:
        """Return a value in float32, in the shape of the network's."""
        if not is_plain(value) or value.is_complex():
            raise self._error(f"has no tensor for {entry}", "give another checkpoint")
        if like.is_floating_point() and not value.is_floating_point():
            raise self._error(f"has {entry} of {value.dtype}, which is no weight", "give another checkpoint")
        shape = self._shapes().get(entry, like.shape) if value.dim() == 1 and like.dim() != 1 else value.shape
        problem, wanted = "", tuple(like.shape)
        if tuple(shape) != wanted:
            problem = f"has {entry} of {tuple(shape)}, where the {kind} has {wanted}"
        elif value.numel() != like.numel():  # flat, and not as long as its shape says
            problem = f"has {value.numel()} numbers of {entry}, where the {kind} has {like.numel()}, {wanted}"
        if problem:
            raise self._error(problem, "give the recipe of that network by --config")
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        return value.detach().to(dtype).reshape(like.shape).contiguous()

    def _shapes(self) -> dict[str, Any]:
        """Shapes of the trainer's parameters: values of ZeRO 3 are flat."""
        groups = self.told.get("param_shapes")
        groups = groups if isinstance(groups, list) else [groups]
        shapes = (pair for group in groups if isinstance(group, Mapping) for pair in group.items())
        return {name: shape for name, shape in shapes if isinstance(shape, torch.Size | tuple | list)}

    def _moments(self, found: Mapping[str, str], parameters: Mapping[str, Tensor]) -> Moments:
        common = cache(self._common_step)

        def find(name: str, key: str) -> Any:
            if not (self._zero / found[name] / f"{key}.pt").is_file():
                return common() if key == "step" else None
            value, like = self._content(found[name], key), parameters[name]
            is_flat = is_plain(value) and value.dim() == 1 and value.numel() == like.numel()
            return value.view(like.shape) if is_flat and key != "step" else value

        return collected(parameters, find)

    def _common_step(self) -> Any:
        path = self._zero / "optimizer_state.pt"
        content: Any = read_content(self._option, path) if path.is_file() else None
        for key in ("optimizer_state_dict", "state", 0, "step"):
            content = content.get(key) if isinstance(content, Mapping) else None
        return content

    def _error(self, problem: str, remedy: str, detail: str = "") -> UserError:
        return UserError(self._option, str(self._path), problem, remedy, detail)


def open_network(source: str, option: str, path: Path, kind: str) -> Folder | Exported:
    """Open what ``option`` names: a universal checkpoint, or for ``source`` bigsgan an export of a ``kind``.

    Raises:
        UserError: It is something else.
    """
    return Folder(option, path) if source == "universal" else Exported(option, path, kind)


def read_network(found: Folder | Exported, kind: str, network: nn.Module) -> Universal:
    """Read a network, which may be on the meta device, from either.

    Raises:
        UserError: It is of another network, or a file cannot be read.
    """
    if isinstance(found, Folder):
        return found.read(kind, network)
    state, unknown = found.read(network)
    return Universal(state, None, "an export has no state of it", unknown)


def _without_prefix(names: Iterable[str], wanted: Iterable[str]) -> dict[str, Any]:
    """Return names, or a dictionary's values, by name without the prefix of the modules around the network."""
    found = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    wanted = set(wanted)
    while found and not found.keys() & wanted and len({name.partition(".")[0] for name in found}) == 1:
        found = {name.partition(".")[2]: value for name, value in found.items()}
    return found


def _few(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    shown = [first, *more[: _FEW - 1]]
    return ", ".join(shown) + (f" and {len(more) + 1 - len(shown)} more" if len(more) >= _FEW else "")
