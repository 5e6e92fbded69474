"""Sections of networks from outside the package, which a recipe names as ``package.module:function``."""

from __future__ import annotations

from pydantic import Field, JsonValue

from bigsgan import plugins
from bigsgan.config.families.base import GeneratorSection, NetworkSection
from bigsgan.config.sections import Width

OUTSIDE = "package.module:function"
"""How the family of such a network is written."""


def is_outside(family: object) -> bool:
    """Return whether a family is code from outside the package."""
    return isinstance(family, str) and (":" in family or family in plugins.names("families"))


class _Outside(NetworkSection):
    """A function or class from outside the package that makes the network (docs/how-to/own-network.md)."""

    has_tangents = False
    family: str = OUTSIDE
    arguments: dict[str, JsonValue] = Field(default={})
    """What it is called with, by name, besides those of ``latent_size``, ``num_classes``, ``resolution`` and
    ``image_channels`` that its signature names."""
    exact: bool = True
    """Whether a run on several ranks must be the same as on one. ``false`` allows networks that draw from torch's
    generators or change buffers when they compute, or compare a batch's samples, and then no layout equals another."""


class OutsideGenerator(_Outside, GeneratorSection):
    """A generator from outside the package: latents (N, Z), labels (N,) -> images."""

    latent_size: Width


class OutsideDiscriminator(_Outside):
    """A discriminator from outside the package: images, labels (N,) -> logits (N, ...)."""
