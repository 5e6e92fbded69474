"""CAT's sections of a recipe."""

from __future__ import annotations

from typing import Literal

from bigsgan.config.data import Data
from bigsgan.config.families.transformers import LeveledTransformer, TransformerGenerator
from bigsgan.config.sections import Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size

SIZES = {"B": (12, 768, 12), "M": (24, 768, 12), "H": (32, 1280, 16)}
"""Depth, width and heads of those published sizes for which they are known."""


class CATNetwork(LeveledTransformer):
    """Keys of both networks."""

    sizes = SIZES
    size: Literal["B", "M", "H"] | None = None
    """Published depth, width and heads: 12x768x12, 24x768x12 or 32x1280x16. The published D is always B."""


class CATGenerator(CATNetwork, TransformerGenerator):
    """CAT's generator (arXiv 2605.26449)."""

    family: Literal["cat"] = "cat"
    shift: bool = True
    """Blocks and heads also shift features by w, as the published sizes suggest."""


class CATDiscriminator(CATNetwork):
    """CAT's discriminator, which judges each image at its own size and apart from the others."""

    has_tokens = True
    family: Literal["cat"] = "cat"
    embedding_size: Width = 2048
    """Features that the head projects on the class embedding."""

    def sizes_of(self, size: Size) -> list[Size]:
        """Return the size at which each level is judged, from coarse to fine; the last is the image's."""
        return [size.over(1 << (self.levels - 1 - i)) for i in range(self.levels)]

    def check(self, data: Data) -> None:
        """Raise UserError as other transformers do, or if patches do not divide the coarsest level's image."""
        super().check(data)
        coarsest = self.patch << (self.levels - 1)
        if not data.network_size.is_multiple_of(coarsest):
            problem = f"must be fewer with discriminator.patch={self.patch} and images of {data.network_size}"
            remedy = "lower levels of both networks or discriminator.patch, or change data.resolution"
            detail = f"each coarser image has half the sides, so that these must be a multiple of {coarsest}"
            raise UserError("discriminator.levels", self.levels, problem, remedy, detail)
