"""Sections of networks from outside the package, which a recipe names as ``package.module:function``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from bigsgan import plugins
from bigsgan.config.families.base import NetworkSection, TimedGenerator
from bigsgan.config.sections import Width

OUTSIDE = "package.module:function"
"""How the family of such a network is written."""


def is_outside(family: object) -> bool:
    """Return whether a family is code from outside the package."""
    return isinstance(family, str) and (":" in family or family in plugins.names("families"))


Names = list[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]]


class _Outside(NetworkSection):
    """A function or class from outside the package that makes the network (docs/how-to/own-network.md)."""

    has_tangents = False
    normalizes_batch = True  # it may
    family: str = OUTSIDE
    arguments: dict[str, JsonValue] = Field(default={})
    """Its arguments, besides those that the recipe gives."""
    seeds: bool = False
    """Its last input is a seed for each sample, (N,) integers."""
    exact: bool = True
    """``false`` allows networks that draw from torch's generators, change buffers or compare samples. Layouts then
    differ."""

    @property
    def compares_images(self) -> bool:
        """Whether its code may do so; ``build_network`` sees whether it has batch norm."""
        return not self.exact

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether its inputs carry a seed for each sample."""
        return self.seeds


class OutsideGenerator(_Outside, TimedGenerator):
    """A generator from outside the package: latents (N, Z), or images, and labels (N,) -> images, and further outputs.

    With pairs of images it reads their inputs.
    """

    network: ClassVar[str] = "generator"
    latent_size: Width | None = None
    """Numbers in a latent, if it reads latents."""
    reads: Literal["latents", "images"] = "latents"
    """It makes images from latents, or from the real images."""
    outputs: Names = Field(default=[])
    """Names of what it returns after the images, for terms of G."""


class OutsideDiscriminator(_Outside):
    """A discriminator from outside the package: images, labels (N,) -> logits (N, ...), and further outputs.

    With pairs of images it reads their inputs too.
    """

    latents: bool = False
    """Behind the labels its inputs are the latents (N, Z) that G made the images from, 0 for real ones."""
    outputs: Names = Field(default=[])
    """Names of what it returns after the logits; terms read ``fake_NAME`` and ``real_NAME``."""
