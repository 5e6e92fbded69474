"""Divides a network's parameters into the groups of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.sections import Optimizer
from bigsgan.errors import UserError, counted
from bigsgan.models.build import network_on_meta

Groups: TypeAlias = list[dict[str, Any]]
"""Of parameters, each with options of its own, as torch's optimizers take them."""

NUMBER = "parameter_group"
"""Option of those that have a learning rate of their own: which of the recipe's groups they are."""


def divided(section: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> Groups:
    """Divide a network's parameters, given by name: by the recipe's groups, and into those that decay and do not.

    Those of no group come first. Parameters stay in order, and no group is empty.
    """
    found: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        decays = section.weight_decay_on == "all" or len(whole_shape(parameter)) > 1
        found.setdefault((_number(section, name), not decays), []).append(parameter)
    groups: Groups = []
    for (number, is_constant), own in sorted(found.items(), key=lambda item: item[0]):
        options = ({NUMBER: number} if number >= 0 else {}) | ({"weight_decay": 0.0} if is_constant else {})
        groups.append({"params": own, **options})
    return groups


def grouped(parameters: Iterable[nn.Parameter], at_a_time: int) -> list[list[nn.Parameter]]:
    """Divide parameters, in order, into groups of at most ``at_a_time`` elements; a larger parameter is a group."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        room -= parameter.numel()
        if room < 0:
            groups.append([])
            room = at_a_time - parameter.numel()
        groups[-1].append(parameter)
    return groups


def described(recipe: Recipe) -> list[str]:
    """Return a line for each of the recipe's groups: how many parameters it takes.

    Raises:
        UserError: A group takes none.
    """
    return [line for network in NETWORKS for line in _described(recipe, network)]


def _described(recipe: Recipe, network: str) -> list[str]:
    section: Optimizer = getattr(recipe.optimizer, network)
    named = list(network_on_meta(recipe, network).named_parameters()) if section.groups else []
    lines = []
    for number, group in enumerate(section.groups):
        field = f"optimizer.{network}.groups.{number}.parameters"
        own = [parameter for name, parameter in named if _number(section, name) == number]
        if not own:
            taken = any(_fits(name, group.parameters) for name, _ in named)
            problem = f"is of no parameter of {network}" + (" that an earlier group leaves" if taken else "")
            names = ", ".join(name for name, _ in named[:8])
            raise UserError(field, group.parameters, problem, "give a pattern of their names", f"such as {names}")
        numel = sum(parameter.numel() for parameter in own)
        lines.append(f"{field}={group.parameters}: {counted(len(own), 'parameter')}, {numel:,} numbers")
    return lines


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return a parameter's shape, also where ZeRO 3, whose own shapes are of shards, has sharded it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _number(section: Optimizer, name: str) -> int:
    """Return the number of the first of the recipe's groups that a parameter fits; -1 if none."""
    fitting = (number for number, group in enumerate(section.groups) if _fits(name, group.parameters))
    return next(fitting, -1)


def _fits(name: str, pattern: str) -> bool:
    """Return whether a parameter's name, or its end after a dot, fits a pattern."""
    return fnmatchcase(f".{name}", f"*.{pattern}")
