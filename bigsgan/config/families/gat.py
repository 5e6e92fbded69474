"""GAT's sections of a recipe."""

from __future__ import annotations

from typing import Literal

from bigsgan.config.data import Data
from bigsgan.config.families.transformers import LeveledTransformer, TransformerGenerator
from bigsgan.config.sections import Fraction, Width
from bigsgan.errors import UserError

SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
"""Depth, width and heads of the published sizes."""


class GATNetwork(LeveledTransformer):
    """Keys of both networks."""

    sizes = SIZES
    size: Literal["S", "B", "L", "XL"] | None = None
    """Published depth, width and heads: 12x384x6, 12x768x12, 24x1024x16 or 28x1152x16."""


class GATGenerator(GATNetwork, TransformerGenerator):
    """GAT's generator (arXiv 2509.24935)."""

    family: Literal["gat"] = "gat"


class GATDiscriminator(GATNetwork):
    """GAT's discriminator, with a projection head if there are classes."""

    draws = True
    has_tokens = True
    family: Literal["gat"] = "gat"
    embedding_size: Width = 2048
    """Features that the head projects on the class embedding."""
    min_info: Fraction = 0.125
    """Share of the image that noise leaves in the coarsest level."""
    noise_floor: Fraction = 0.01
    """Share of noise in the finest level; coarser levels have more."""

    def shares_of_noise(self) -> list[float]:
        """Return each level's share of noise, coarse to fine: 1 - min_info^(1 - i / (levels - 1)) + noise_floor."""
        last = self.levels - 1
        return [1 - self.min_info ** (1 - i / last) + self.noise_floor for i in range(self.levels)]

    def check(self, data: Data) -> None:
        """Raise UserError as other transformers do, or if a level's share of noise would exceed 1."""
        super().check(data)
        if self.min_info == 0 or self.min_info < self.noise_floor:
            problem = f"must be greater than 0, and at least noise_floor ({self.noise_floor:g})"
            raise UserError("discriminator.min_info", self.min_info, problem, "give a number such as 0.125")
