"""bigsgan trains generators and discriminators as two separate DeepSpeed engines."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["PretrainedNetwork", "from_pretrained", "load", "push_to_hub"]

_PLACES = {"load": "loading", "from_pretrained": "hub", "push_to_hub": "hub", "PretrainedNetwork": "pretrained"}


def __getattr__(name: str) -> Any:
    """Give what stands in ``__all__``, whose modules import torch, only to whom asks for it (PEP 562)."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"bigsgan.inference.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'bigsgan' has no attribute {name!r}")
