"""bigsgan trains generators and discriminators as two separate DeepSpeed engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigsgan.config import Recipe
    from bigsgan.errors import UserError
    from bigsgan.inference.hub import from_pretrained, push_to_hub
    from bigsgan.inference.loading import load
    from bigsgan.trainer import Trainer, train
    from bigsgan.training.reports import Report

__version__ = "0.1.0"
__all__ = ["Recipe", "Report", "Trainer", "UserError", "from_pretrained", "load", "push_to_hub", "train"]

_PLACES = {
    "Recipe": "bigsgan.config",
    "Report": "bigsgan.training.reports",
    "Trainer": "bigsgan.trainer",
    "UserError": "bigsgan.errors",
    "from_pretrained": "bigsgan.inference.hub",
    "load": "bigsgan.inference.loading",
    "push_to_hub": "bigsgan.inference.hub",
    "train": "bigsgan.trainer",
    "PretrainedNetwork": "bigsgan.inference.pretrained",  # needs the extra hub
}


def __getattr__(name: str) -> Any:
    """Import the names of ``_PLACES``, most of whose modules import torch, when they are asked for (PEP 562)."""
    if name in _PLACES:
        module = _PLACES[name]
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'bigsgan' has no attribute {name!r}")
