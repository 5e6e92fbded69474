"""Truncation and guidance of the styles that a generator's mapping network makes."""

from __future__ import annotations

from torch import nn

from bigsgan.models.gat import Mapping as GATMapping
from bigsgan.models.stylegan2 import Mapping as StyleMapping


def set_psi(network: nn.Module, psi: float | None) -> None:
    """Truncate by psi; None for no truncation."""
    for module in network.modules():
        if isinstance(module, (GATMapping, StyleMapping)):
            module.truncation_psi = 1.0 if psi is None else psi


def set_guidance(network: nn.Module, guidance: float | None) -> None:
    """Scale the distance of w from its mean over the classes; 1 or None leaves w unchanged."""
    for module in network.modules():
        if isinstance(module, GATMapping):
            module.guidance = 1.0 if guidance is None else guidance
