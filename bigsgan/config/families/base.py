"""What the sections of all model families have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bigsgan.config.sections import Data, Section, Width

Depth = Annotated[int, Field(gt=0, le=64)]
"""Layers or blocks in a row; a number beyond it is a slip."""


class NetworkSection(Section):
    """One network of a family.

    Attributes:
        family: Name of the family, which tells the sections apart.
        draws: Whether the network draws numbers of its own, such as noise; its inputs then carry a seed a sample.
        has_styles: Whether its first layer leaves style vectors, which path length regularisation differentiates by.
        paired: Whether it reads input images: G in place of latents, D beside the images that it judges.
    """

    draws: ClassVar[bool] = False
    has_styles: ClassVar[bool] = False
    paired: ClassVar[bool] = False
    family: str

    @property
    def computes_in_bf16(self) -> bool:
        """Whether some layers compute in bf16 whatever the engine's precision."""
        return False

    def check(self, data: Data) -> None:
        """Raise UserError where the section does not fit the data."""

    def check_micro_batch(self, size: int, num_parts: int = 1) -> None:
        """Raise UserError where the network cannot take ``size`` images at a time, of a batch in so many parts."""


class GeneratorSection(NetworkSection):
    """A generator of images from latents."""

    latent_size: Width
    """Numbers in a latent."""
