"""Truncation and guidance of what a generator's mapping network makes of a latent."""

from __future__ import annotations

from torch import nn

from bigsgan.models.gat import Mapping as GATMapping
from bigsgan.models.stylegan2 import Mapping as StyleMapping


def set_psi(network: nn.Module, psi: float | None) -> None:
    """Truncate by psi; None for no truncation."""
    for module in network.modules():
        if isinstance(module, (GATMapping, StyleMapping)):
            module.truncation_psi = 1.0 if psi is None else psi


def set_guidance(network: nn.Module, guidance: float) -> None:
    """Choose how far a GAT's w goes from its mean over the classes; 1 for as far as it is."""
    for module in network.modules():
        if isinstance(module, GATMapping):
            module.guidance = guidance
