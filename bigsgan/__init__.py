"""bigsgan trains generators and discriminators as two separate DeepSpeed engines."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Give ``bigsgan.load``, whose module imports torch, only to whom asks for it (PEP 562)."""
    if name == "load":
        return importlib.import_module("bigsgan.inference.loading").load
    raise AttributeError(f"module 'bigsgan' has no attribute {name!r}")
