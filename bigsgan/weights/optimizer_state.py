"""The state of another trainer's Adam, under the names of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from bigsgan.errors import counted
from bigsgan.weights.stylegan_pickle import ForeignNetwork

KINDS = ("exp_avg", "exp_avg_sq")
_MOST_STEPS = 1 << 53


class Moments(NamedTuple):
    """Adam's state for a network."""

    steps: int  # updates made
    # by kind, `exp_avg` and `exp_avg_sq`, and by parameter: tensors of the parameter's shape
    values: dict[str, dict[str, Tensor]]


def adam_moments(state_dict: Mapping[str, Any], network: ForeignNetwork, frozen: Collection[str] = ()) -> Moments:
    """Read the state dict of a torch.optim.Adam over ``network.parameters()``, except ``frozen`` ones.

    Raises:
        ValueError: The state dict is of something else; the text says why.
    """
    names, state = network.parameters, state_dict.get("state")
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
        raise ValueError("it does not have exactly one group of parameters")
    numbers = groups[0].get("params")
    trained = {name: number for number, name in enumerate(names) if name not in frozen}
    if not isinstance(state, dict) or numbers != list(range(len(names))) or state.keys() != set(trained.values()):
        raise ValueError(f"it is not for the network's {counted(len(names), 'parameter')}")
    return collected({name: network.state[name] for name in trained}, lambda name, key: state[trained[name]].get(key))


def collected(parameters: Mapping[str, Tensor], find: Callable[[str, str], Any]) -> Moments:
    """Collect Adam's state: ``find`` returns a parameter's ``step``, ``exp_avg`` or ``exp_avg_sq``.

    Raises:
        ValueError: One of them is missing, or is no such state; the text says why.
    """
    values: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    steps = set()
    for name, parameter in parameters.items():
        steps.add(_steps(find(name, "step")))
        for kind in KINDS:
            values[kind][name] = _moment(find(name, kind), parameter, f"{kind} of {name}")
    if len(steps) != 1:
        raise ValueError("its parameters differ in their number of updates")
    if any((moment < 0).any() for moment in values["exp_avg_sq"].values()):
        raise ValueError("a second moment is negative")
    return Moments(steps.pop(), values)


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value that was read is a tensor whose numbers are there, as they are."""
    if not isinstance(value, Tensor) or value.is_quantized or value.is_nested:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _steps(value: Any) -> int:
    is_number = is_plain(value) and value.numel() == 1 and not value.is_complex()
    number = float(value) if is_number else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number < _MOST_STEPS:
        raise ValueError("its number of updates is not known")
    return int(number)


def _moment(value: Any, parameter: Tensor, what: str) -> Tensor:
    if not is_plain(value) or value.shape != parameter.shape or not value.is_floating_point():
        raise ValueError(f"{what} is missing or of another shape")
    if not torch.isfinite(value).all():
        raise ValueError(f"{what} is not finite")
    return value.float().contiguous()
