"""R3GAN's sections of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import BOTTOM, Depth, GeneratorSection, NetworkSection, bottom_of, check_doubled
from bigsgan.config.sections import NaturalInt, Width
from bigsgan.errors import UserError, counted
from bigsgan.images.size import Size


class R3GANNetwork(NetworkSection):
    """Keys of both networks: stages of residual blocks, one for each resolution from 4x4 on.

    The lists give the stages from coarse to fine, for the discriminator too.
    """

    without_half = "bf16_stages=0"
    has_statistics = False
    of_classes = ("embedding_size",)
    widths: list[Width] = Field(min_length=1)
    """Channels of each stage."""
    cardinalities: list[Width] = Field(min_length=1)
    """Groups of each stage's 3x3 convolutions."""
    blocks: list[Depth] = Field(min_length=1)
    """Residual blocks of each stage."""
    expansion: Depth = 2
    """Channels inside a block, divided by its stage's width."""
    bf16_stages: NaturalInt = 0
    """Finest stages that compute in bf16 with float32 weights; without effect in a bf16 or fp16 engine."""

    @property
    def computes_in(self) -> str | None:
        """The half type of the finest stages, if any compute in it."""
        return "bf16" if self.bf16_stages else None

    def check(self, data: Data) -> None:
        """Raise UserError if the lists do not fit the resolution or each other."""
        network, num, size = self.network, len(self.widths), data.network_size
        if size != Size(BOTTOM, BOTTOM):  # which is one stage alone
            check_doubled(data, "R3GAN")
        wanted = (size.nominal // BOTTOM).bit_length()
        if num != wanted:
            problem = f"must have {counted(wanted, 'entry')}, one for each resolution from {bottom_of(size)} to {size}"
            remedy, detail = "add or remove entries", f"{counted(num, 'stage')} double it {counted(num - 1, 'time')}"
            raise UserError(f"{network}.widths", self.widths, problem, remedy, detail)
        for key, values in (("cardinalities", self.cardinalities), ("blocks", self.blocks)):
            if len(values) != num:
                problem = f"must have {counted(num, 'entry')}, as {network}.widths"
                raise UserError(f"{network}.{key}", values, problem, "give one for each stage")
        for width, groups in zip(self.widths, self.cardinalities, strict=True):
            if width * self.expansion % groups:
                problem = f"must divide {network}.widths times {network}.expansion"
                detail = f"{groups} does not divide a block's {width * self.expansion} channels"
                raise UserError(f"{network}.cardinalities", self.cardinalities, problem, "choose divisors", detail)
        if self.bf16_stages > num:
            problem, remedy = f"must be at most {num}, the number of stages", "give a smaller number"
            raise UserError(f"{network}.bf16_stages", self.bf16_stages, problem, remedy)


class R3GANGenerator(R3GANNetwork, GeneratorSection):
    """R3GAN's generator (Huang et al. 2024, arXiv 2501.05441)."""

    family: Literal["r3gan"] = "r3gan"
    latent_size: Width = 64
    embedding_size: Width = 64
    """Size of the class embedding."""


class R3GANDiscriminator(R3GANNetwork):
    """R3GAN's discriminator, with a projection head if there are classes."""

    family: Literal["r3gan"] = "r3gan"
    embedding_size: Width = 768
    """Features that the head projects on the class embedding."""
