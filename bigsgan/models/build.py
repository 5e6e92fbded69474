"""Makes the two networks that a recipe describes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigsgan.config import Recipe
from bigsgan.config.data import Data
from bigsgan.config.families.base import NetworkSection
from bigsgan.config.families.outside import is_outside
from bigsgan.config.penalties import compares_images
from bigsgan.models import gat
from bigsgan.models.augment import augmentation_layer
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.cyclegan import Translations
from bigsgan.models.layers import TwiceDifferentiable
from bigsgan.models.network import FromCosines, LastImage, LayerStack
from bigsgan.models.outside import outside_layers
from bigsgan.models.steps import InSteps


def build_network(recipe: Recipe, network: str) -> LayerStack:
    """Build one network with uninitialized parameters, on the default device and in the default type.

    A ``generator`` makes images from latents or input images, and labels; a ``discriminator`` makes logits from images
    and labels.
    """
    section: Any = getattr(recipe, network)
    data = recipe.data
    condition = data.input_channels if section.paired or section.joins_domains else data.condition_width
    if section.family == "none":
        layers: list[nn.Module] = []
    elif is_outside(section.family):
        layers = outside_layers(recipe, network)
        modules = (module for layer in layers for module in layer.modules())
        is_part = network == "discriminator" and recipe.objective.batch_shrink > 1
        if is_part and any(isinstance(module, BatchStatistics) for module in modules):
            raise compares_images(recipe.objective, section.family)
    else:
        layers = maker(section)(section, data.network_size, data.channels, condition)
    if network == "discriminator" and recipe.objective.teacher:
        layers[-1].teacher = gat.TeacherHead(section, recipe.objective.teacher)
    before: list[nn.Module] = []
    if network == "discriminator" and recipe.augmentation:
        before.append(augmentation_layer(recipe.augmentation, data.channels, section.draws))
    stack = LayerStack([*before, *layers], recipe.engine(network).activation_checkpointing, first=-len(before))
    stack.is_closed = has_closed_layers(recipe, network)
    for layer in stack.spectral_layers():
        layer.orthogonal = getattr(recipe.objective.orthogonal, network)
    for module in stack.modules():
        if isinstance(module, TwiceDifferentiable):
            module.exact = network == "discriminator" and bool(recipe.objective.exact_penalties)
        if isinstance(module, Translations):
            module.makes_same = "same" in recipe.outputs
    return stack


def has_closed_layers(recipe: Recipe, network: str) -> bool:
    """Return ``LayerStack.is_closed`` of a network whose parameters are whole.

    A layer from outside may leave a tensor with a graph in an attribute; compiled ones are few operations to torch.
    """
    return not is_outside(getattr(recipe, network).family) and recipe.engine(network).compile == "none"


def maker(section: NetworkSection) -> Callable[..., list[nn.Module]]:
    """Return the function of a family's module that makes the layers of a section's network."""
    module: Any = importlib.import_module(f"bigsgan.models.{section.family}")
    found: Callable[..., list[nn.Module]] = getattr(module, f"{section.network}_layers")
    return found


def network_on_meta(recipe: Recipe, network: str) -> LayerStack:
    """Build one network on the meta device: shapes and types, without memory."""
    with torch.device("meta"):
        return build_network(recipe, network)


def with_images(recipe: Recipe, generator: LayerStack) -> LayerStack:
    """Return the same generator, with the same layers, that returns only the last image of a sample, no other output.

    One that reads times goes through all its steps.
    A codec without weights is undone; with another codec, the generator returns latents.
    """
    codec, more = recipe.data.codec, list[nn.Module]()
    section: Any = recipe.generator
    if section.reads_times:
        generator = LayerStack([InSteps(generator, section)])
    if recipe.generator.images_per_sample > 1 or recipe.outputs or recipe.data.joins_domains:
        more.append(LastImage(recipe.shown_channels))
    if codec.kind == "dct":
        more.append(FromCosines(codec.block, codec.scale or 1.0))
    return LayerStack([*generator.layers.values(), *more], generator.checkpointing) if more else generator


def example_labels(data: Data, num: int) -> torch.Tensor:
    """Return labels as the data may have them, (num,) int64 or (num, K) float32: its classes or numbers in turn.

    Of tokens, (num, T, W + 1), the first is null if some may be, and the others have 1, 2, ... of T.
    """
    if data.conditions_are_tokens:
        most, width = data.condition_shape
        lengths = (torch.arange(num) + (not data.may_be_null)) % (most + 1)
        return (torch.arange(most) < lengths[:, None])[..., None].repeat(1, 1, width).float()
    places = torch.arange(num) % max(data.condition_width, 1)
    return torch.zeros(num, data.condition_width).scatter_(1, places[:, None], 1.0) if data.has_vectors else places


def null_labels(data: Data, num: int) -> torch.Tensor:
    """Return labels of class 0, (num,) int64, or null vectors (num, K) or tokens (num, T, W + 1) float32."""
    return torch.zeros(num, *data.condition_shape) if data.has_vectors else torch.zeros(num, dtype=torch.int64)


def initial_seed(recipe: Recipe, network: str) -> int:
    """Return the seed of a network's initial parameters."""
    return recipe.seed if network == "generator" else recipe.seed + 2**32
