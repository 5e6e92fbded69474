"""Makes the two networks that a recipe describes. A new family adds a line to each table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bigsgan.config import Recipe
from bigsgan.models import biggan, biggan_deep, dcgan, mlp, pix2pix, r3gan, stylegan2
from bigsgan.models.augment import augmentation_layer
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.layers import SelfAttention
from bigsgan.models.network import LayerStack

_LAYERS: dict[tuple[str, str], Callable[..., list[nn.Module]]] = {
    ("biggan", "generator"): biggan.generator_layers,
    ("biggan", "discriminator"): biggan.discriminator_layers,
    ("biggan_deep", "generator"): biggan_deep.generator_layers,
    ("biggan_deep", "discriminator"): biggan_deep.discriminator_layers,
    ("dcgan", "generator"): dcgan.generator_layers,
    ("dcgan", "discriminator"): dcgan.discriminator_layers,
    ("mlp", "generator"): mlp.generator_layers,
    ("mlp", "discriminator"): mlp.discriminator_layers,
    ("pix2pix", "generator"): pix2pix.generator_layers,
    ("pix2pix", "discriminator"): pix2pix.discriminator_layers,
    ("r3gan", "generator"): r3gan.generator_layers,
    ("r3gan", "discriminator"): r3gan.discriminator_layers,
    ("stylegan2", "generator"): stylegan2.generator_layers,
    ("stylegan2", "discriminator"): stylegan2.discriminator_layers,
}


def build_network(recipe: Recipe, network: str) -> LayerStack:
    """Build one network with uninitialised parameters, on the default device and in the default type.

    Args:
        recipe: A checked recipe.
        network: ``generator`` (latents or input images, labels -> images) or ``discriminator`` (images, labels ->
            logits).
    """
    section: Any = getattr(recipe, network)
    data = recipe.data
    condition = data.input_channels if section.paired else data.num_classes
    layers = _LAYERS[section.family, network](section, data.resolution, data.image_channels, condition)
    before: list[nn.Module] = []
    if network == "discriminator" and recipe.augmentation:
        before.append(augmentation_layer(recipe.augmentation))
    stack = LayerStack([*before, *layers], recipe.engine(network).activation_checkpointing, first=-len(before))
    for layer in stack.spectral_layers():
        layer.orthogonal = getattr(recipe.objective.orthogonal, network)
    for module in stack.modules():
        if isinstance(module, (BatchStatistics, SelfAttention)):
            module.exact = network == "discriminator" and recipe.objective.differentiates_twice
    return stack


def initial_seed(recipe: Recipe, network: str) -> int:
    """Seed of a network's initial parameters."""
    return recipe.seed if network == "generator" else recipe.seed + 2**32
