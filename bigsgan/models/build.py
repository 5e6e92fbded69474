"""Makes the two networks that a recipe describes. A new family adds a line to each table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bigsgan.config import Recipe
from bigsgan.models import biggan, dcgan, mlp, stylegan2
from bigsgan.models.network import LayerStack

_LAYERS: dict[tuple[str, str], Callable[..., list[nn.Module]]] = {
    ("biggan", "generator"): biggan.generator_layers,
    ("biggan", "discriminator"): biggan.discriminator_layers,
    ("dcgan", "generator"): dcgan.generator_layers,
    ("dcgan", "discriminator"): dcgan.discriminator_layers,
    ("mlp", "generator"): mlp.generator_layers,
    ("mlp", "discriminator"): mlp.discriminator_layers,
    ("stylegan2", "generator"): stylegan2.generator_layers,
    ("stylegan2", "discriminator"): stylegan2.discriminator_layers,
}


def build_network(recipe: Recipe, network: str) -> LayerStack:
    """Build one network with uninitialised parameters, on the default device and in the default type.

    Args:
        recipe: A checked recipe.
        network: ``generator`` (latents, labels -> images) or ``discriminator`` (images, labels -> logits).
    """
    section: Any = getattr(recipe, network)
    data = recipe.data
    layers = _LAYERS[section.family, network](section, data.resolution, data.image_channels, data.num_classes)
    stack = LayerStack(layers, recipe.engine(network).activation_checkpointing)
    for layer in stack.spectral_layers():
        layer.orthogonal = getattr(recipe.objective.orthogonal, network)
    return stack


def initial_seed(recipe: Recipe, network: str) -> int:
    """Seed of a network's initial parameters."""
    return recipe.seed if network == "generator" else recipe.seed + 2**32
