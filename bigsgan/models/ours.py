"""Which modules are the package's; code from outside may have attributes of the same names."""

from __future__ import annotations

from torch import nn


def is_ours(module: nn.Module) -> bool:
    """Return whether a module's class is the package's."""
    return _is_of_package(type(module))


def has_our_attributes(module: nn.Module) -> bool:
    """Return whether a module's class, or one that it inherits from, is the package's."""
    return any(map(_is_of_package, type(module).__mro__))


def _is_of_package(kind: type) -> bool:
    return kind.__module__.startswith("bigsgan.")
