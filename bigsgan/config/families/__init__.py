"""The recipe's ``generator`` and ``discriminator`` sections: one pair of classes for each model family.

Architecture tables live here, independent of torch, so that a recipe is checked before torch is imported. A new family
adds a file, and a line to each union.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from bigsgan.config.families.biggan import BigGANDiscriminator, BigGANGenerator
from bigsgan.config.families.biggan_deep import BigGANDeepDiscriminator, BigGANDeepGenerator
from bigsgan.config.families.dcgan import DCGANDiscriminator, DCGANGenerator
from bigsgan.config.families.mlp import MLPDiscriminator, MLPGenerator
from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator
from bigsgan.config.families.r3gan import R3GANDiscriminator, R3GANGenerator
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator


def family_of(section: Any) -> Any:
    """Return the name of a section's family, which selects its class; the default is BigGAN."""
    if isinstance(section, dict):
        return section.get("family", "biggan")
    return getattr(section, "family", "biggan")


AnyGenerator = Annotated[
    Annotated[BigGANGenerator, Tag("biggan")]
    | Annotated[BigGANDeepGenerator, Tag("biggan_deep")]
    | Annotated[DCGANGenerator, Tag("dcgan")]
    | Annotated[MLPGenerator, Tag("mlp")]
    | Annotated[Pix2PixGenerator, Tag("pix2pix")]
    | Annotated[R3GANGenerator, Tag("r3gan")]
    | Annotated[StyleGAN2Generator, Tag("stylegan2")],
    Discriminator(family_of),
]
AnyDiscriminator = Annotated[
    Annotated[BigGANDiscriminator, Tag("biggan")]
    | Annotated[BigGANDeepDiscriminator, Tag("biggan_deep")]
    | Annotated[DCGANDiscriminator, Tag("dcgan")]
    | Annotated[MLPDiscriminator, Tag("mlp")]
    | Annotated[Pix2PixDiscriminator, Tag("pix2pix")]
    | Annotated[R3GANDiscriminator, Tag("r3gan")]
    | Annotated[StyleGAN2Discriminator, Tag("stylegan2")],
    Discriminator(family_of),
]
