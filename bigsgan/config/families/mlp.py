"""Sections of the plain multi-layer perceptrons."""

from __future__ import annotations

from typing import Literal

from bigsgan.config.families.base import Depth, GeneratorSection, NetworkSection
from bigsgan.config.sections import Width


class MLPGenerator(GeneratorSection):
    """Fully connected generator, the smallest baseline (Goodfellow et al. 2014, arXiv 1406.2661)."""

    has_statistics = False
    of_classes = ("embedding_size",)
    family: Literal["mlp"] = "mlp"
    latent_size: Width = 100
    width: Width = 256
    """Features of each hidden layer."""
    depth: Depth = 3
    """Hidden layers."""
    embedding_size: Width = 32
    """Size of the class embedding."""


class MLPDiscriminator(NetworkSection):
    """Fully connected discriminator, with a projection head if there are classes."""

    convolves = False
    has_statistics = False
    family: Literal["mlp"] = "mlp"
    width: Width = 256
    """Features of each hidden layer."""
    depth: Depth = 3
    """Hidden layers."""
