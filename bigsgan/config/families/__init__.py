"""The recipe's ``generator`` and ``discriminator`` sections: one pair of classes for each model family.

Architecture tables live here, independent of torch, so that a recipe is checked before torch is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from bigsgan.config.families.autoencoder import AutoencoderDiscriminator, AutoencoderGenerator
from bigsgan.config.families.base import NetworkSection, NoDiscriminator
from bigsgan.config.families.biggan import BigGANDiscriminator, BigGANGenerator
from bigsgan.config.families.biggan_deep import BigGANDeepDiscriminator, BigGANDeepGenerator
from bigsgan.config.families.cat import CATDiscriminator, CATGenerator
from bigsgan.config.families.cyclegan import CycleGANDiscriminator, CycleGANGenerator
from bigsgan.config.families.dcgan import DCGANDiscriminator, DCGANGenerator
from bigsgan.config.families.dit import DiTDiscriminator, DiTGenerator
from bigsgan.config.families.dmd2 import DMD2Discriminator
from bigsgan.config.families.features import FeaturesDiscriminator, FeaturesGenerator
from bigsgan.config.families.gat import GATDiscriminator, GATGenerator
from bigsgan.config.families.ladd import LADDDiscriminator
from bigsgan.config.families.mlp import MLPDiscriminator, MLPGenerator
from bigsgan.config.families.outside import OUTSIDE, OutsideDiscriminator, OutsideGenerator, is_outside
from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator
from bigsgan.config.families.r3gan import R3GANDiscriminator, R3GANGenerator
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator

FAMILIES: Mapping[str, tuple[type[NetworkSection], type[NetworkSection]]] = {
    "autoencoder": (AutoencoderGenerator, AutoencoderDiscriminator),
    "biggan": (BigGANGenerator, BigGANDiscriminator),
    "biggan_deep": (BigGANDeepGenerator, BigGANDeepDiscriminator),
    "cat": (CATGenerator, CATDiscriminator),
    "cyclegan": (CycleGANGenerator, CycleGANDiscriminator),
    "dcgan": (DCGANGenerator, DCGANDiscriminator),
    "dit": (DiTGenerator, DiTDiscriminator),
    "features": (FeaturesGenerator, FeaturesDiscriminator),
    "gat": (GATGenerator, GATDiscriminator),
    "mlp": (MLPGenerator, MLPDiscriminator),
    "pix2pix": (Pix2PixGenerator, Pix2PixDiscriminator),
    "r3gan": (R3GANGenerator, R3GANDiscriminator),
    "stylegan2": (StyleGAN2Generator, StyleGAN2Discriminator),
}
"""The only list of the package's families. ``bigsgan/models/<family>.py`` makes the layers of a family."""

_SECTIONS = {**FAMILIES, OUTSIDE: (OutsideGenerator, OutsideDiscriminator)}


def family_of(section: Any) -> Any:
    """Return what selects a section's class: its family, by default BigGAN, or that it is from outside the package."""
    get = section.get if isinstance(section, dict) else functools.partial(getattr, section)
    family = get("family", "biggan")
    return OUTSIDE if is_outside(family) else family


def _any_of(sections: Mapping[str, type[NetworkSection]]) -> Any:
    """Return the type of a section whose class follows from its family."""
    tagged = tuple(Annotated[section, Tag(family)] for family, section in sections.items())
    return Annotated[Union[tagged], Discriminator(family_of)]  # noqa: UP007 - `|` cannot join a tuple of types


if TYPE_CHECKING:
    AnyGenerator = NetworkSection
    AnyDiscriminator = NetworkSection
else:
    AnyGenerator = _any_of({family: sections[0] for family, sections in _SECTIONS.items()})
    _alone = {"dmd2": DMD2Discriminator, "ladd": LADDDiscriminator, "none": NoDiscriminator}
    AnyDiscriminator = _any_of({family: sections[1] for family, sections in _SECTIONS.items()} | _alone)
