"""bigsgan trains generators and discriminators as two separate DeepSpeed engines."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["from_pretrained", "load", "push_to_hub"]  # PretrainedNetwork needs the extra hub

_PLACES = {"load": "loading", "from_pretrained": "hub", "push_to_hub": "hub", "PretrainedNetwork": "pretrained"}


def __getattr__(name: str) -> Any:
    """Import the names of ``_PLACES``, whose modules import torch, when they are asked for (PEP 562)."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"bigsgan.inference.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'bigsgan' has no attribute {name!r}")
