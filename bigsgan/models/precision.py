"""Precision: statistics are in float32, as are networks that are not trained, if they are on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def full(x: Tensor) -> Tensor:
    """Return ``x`` in float32; float64 stays, as gradients are checked in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute_in_float32(network: nn.Module) -> None:
    """Let all layers of a network that is not trained compute in float32."""
    for module in network.modules():
        for attribute, value in (("half_type", None), ("bf16", False)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
