"""Precision: statistics are in float32; on a CPU layers in fp16 too, and networks that are not trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigsgan.models.ours import has_our_attributes


def full(x: Tensor) -> Tensor:
    """Return ``x`` in float32; float64 stays, as gradients are checked in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def avoid_fp16_on_a_cpu(network: nn.Module, on_gpu: bool) -> None:
    """Let layers that compute in fp16 of their own compute in float32, unless the network is trained on a GPU.

    fp16, which published networks have, is many times slower on a CPU. bf16 stays: CPUs have instructions for it.
    """
    for module in filter(has_our_attributes, network.modules()):
        if not on_gpu and getattr(module, "half_type", None) is torch.float16:
            setattr(module, "half_type", None)  # noqa: B010 - mypy knows only tensors and modules of a module


def compute_in_float32(network: nn.Module) -> None:
    """Let all layers of a network that is not trained compute in float32."""
    for module in filter(has_our_attributes, network.modules()):
        for attribute, value in (("half_type", None), ("bf16", False)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
