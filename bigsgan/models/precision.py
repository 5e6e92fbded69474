"""The precision of networks that are not trained: float32 on a CPU, the trained one on other devices."""

from __future__ import annotations

import torch
from torch import nn


def compute_as_suits(network: nn.Module, device: torch.device | str) -> None:
    """Let a network that is not trained compute in float32 on a CPU, where half precision is many times slower.

    On other devices its layers keep the precision of their training.
    """
    if torch.device(device).type != "cpu":
        return
    for module in network.modules():
        for attribute, value in (("half_type", None), ("bf16", False)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
