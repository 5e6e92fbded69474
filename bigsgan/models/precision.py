"""The precision of networks that are not trained: float32 on a CPU, their own elsewhere."""

from __future__ import annotations

import torch
from torch import nn


def compute_as_suits(network: nn.Module, device: torch.device | str) -> None:
    """Let a network that is not trained compute in float32 on a CPU, which half precision slows down many times.

    Elsewhere its layers keep the precision that they were trained with.
    """
    if torch.device(device).type != "cpu":
        return
    for module in network.modules():
        for attribute, value in (("half_type", None), ("bf16", False)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
