"""Which modules have the package's attributes; code from outside may have others of the same names."""

from __future__ import annotations

from torch import nn


def is_ours(module: nn.Module) -> bool:
    """Return whether a module's class, or one that it inherits from, is the package's."""
    return any(base.__module__.startswith("bigsgan.") for base in type(module).__mro__)
