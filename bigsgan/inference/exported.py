"""Reads a network that `bigsgan export` has written, as a safetensors file or a folder for the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bigsgan.checkpoint.files import first_not_finite
from bigsgan.errors import UserError, reason
from bigsgan.inference.loading import read_export
from bigsgan.runtime.paths import parse_json
from bigsgan.weights.universal import Universal


class Exported:
    """An export of one network.

    Attributes:
        told: Its run's ``recipe``.
    """

    def __init__(self, option: str, path: Path) -> None:
        """Read the file or folder that ``option`` names.

        Raises:
            UserError: It cannot be read, or is no export.
        """
        self._option, self._path = option, path
        try:
            self._header, self._state = read_export(path)
            self.told: Mapping[Any, Any] = {"recipe": parse_json(self._header["recipe"])}
        except Exception as error:  # a foreign file can cause any error
            problem = f"must be what `bigsgan export` has written: {reason(error, path)}"
            raise self._error(problem, "give a safetensors file or a folder for the Hub") from None

    def read(self, kind: str, network: nn.Module) -> Universal:
        """Read a network, which may be on the meta device; messages call it ``kind``.

        Raises:
            UserError: The export is of another network.
        """
        wanted = network.state_dict()
        if self._header.get("network") != kind:
            raise self._error(f"has a {self._header.get('network')}", f"give an export of the {kind}")
        own = {name: value for name, value in self._state.items() if name in wanted}
        state = {name: value.float() if value.is_floating_point() else value for name, value in own.items()}
        parameters = {name for name, _ in network.named_parameters()}
        lacking = sorted(parameters - state.keys())
        odd = sorted(name for name, value in state.items() if value.shape != wanted[name].shape)
        if lacking or odd:
            problem = f"lacks {lacking[0]}" if lacking else f"has another shape of {odd[0]}"
            raise self._error(f"{problem} of the {kind}", "give the recipe of that network by --config")
        if bad := first_not_finite(state):
            raise self._error(f"contains Inf or NaN ({bad} of the {kind})", "give another export")
        unknown = sorted(wanted.keys() - state.keys())
        return Universal(state, None, "an export has no state of it", unknown)

    def _error(self, problem: str, remedy: str) -> UserError:
        return UserError(self._option, str(self._path), problem, remedy)
