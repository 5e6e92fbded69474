"""Sections of networks from outside the package, which a recipe names as ``package.module:function``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points

from pydantic import Field, JsonValue

from bigsgan.config.families.base import GeneratorSection, NetworkSection
from bigsgan.config.sections import Width
from bigsgan.errors import UserError

OUTSIDE = "package.module:function"
"""How the family of such a network is written."""

GROUP = "bigsgan.families"
"""Entry points of installed packages, whose names are families."""

_trusted: set[str] = set()


class UntrustedError(UserError):
    """Only a checkpoint or an exported file names code from outside."""


@functools.cache
def installed() -> Mapping[str, str]:
    """Return ``package.module:function`` of the families that installed packages offer, by name."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def is_outside(family: object) -> bool:
    """Return whether a family is code from outside the package."""
    return isinstance(family, str) and (":" in family or family in installed())


def trust(*families: str) -> None:
    """Allow that these families are imported, because the user has named them, or a recipe that the user gave."""
    _trusted.update(families)


def check_trusted(field: str, family: str) -> None:
    """Refuse to import what only a checkpoint or an exported file names.

    Raises:
        UntrustedError: The user has not named this family.
    """
    if family not in _trusted:
        problem = "is code from outside, which is not imported because a checkpoint or an exported file names it"
        remedy = f"name it yourself: in a recipe that you give, or in bigsgan.load(path, families=[{family!r}])"
        raise UntrustedError(field, family, problem, remedy)


class _Outside(NetworkSection):
    """A function or class from outside the package that makes the network (docs/how-to/your-own-network.md)."""

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
