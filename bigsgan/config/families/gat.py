"""GAT's sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, GeneratorSection, NetworkSection
from bigsgan.config.sections import Fraction, Width
from bigsgan.errors import UserError

SIZES: Mapping[str, tuple[int, int, int]] = {
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}
"""Depth, width and heads of the published sizes."""


class GATNetwork(NetworkSection):
    """Keys of both networks: transformer blocks over patches of the images."""

    without_half = "bf16=false"
    size: Literal["S", "B", "L", "XL"] | None = None
    """A published size, which gives depth, width and heads: 12 x 384 x 6, 12 x 768 x 12, 24 x 1024 x 16 or
    28 x 1152 x 16."""
    depth: Depth = 12
    """Blocks; a multiple of ``levels``."""
    width: Width = 768
    """Features of a token."""
    heads: Width = 12
    """Of each block's attention."""
    patch: Literal[1, 2, 4, 8] = 2
    """Pixels a side of a token's patch."""
    levels: Annotated[int, Field(ge=2, le=16)] = 4
    """Images that G makes of a sample from coarse to fine, after equal shares of its blocks, and D judges together."""
    bf16: bool = False
    """Compute matrix products in bf16 on float32 weights, and sums, norms and logits in float32, as the published code
    does; without effect in a bf16 or fp16 engine."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_size(cls, given: Any) -> Any:
        size = given.get("size") if isinstance(given, dict) else None
        if not isinstance(size, str) or size not in SIZES:
            return given
        own = dict(zip(("depth", "width", "heads"), SIZES[size], strict=True))
        other = {key: given[key] for key, value in own.items() if given.get(key, value) != value}
        for key, value in other.items():
            settings = " ".join(f"{cls.network}.{each}={own[each]}" for each in other)
            remedy = f"set {settings}, or remove {cls.network}.size"
            raise UserError(f"{cls.network}.{key}", value, f"must be {own[key]} with {cls.network}.size={size}", remedy)
        return {**given, **own}

    @property
    def images_per_sample(self) -> int:
        """One a level."""
        return self.levels

    @property
    def own_width(self) -> int:
        """Of all blocks."""
        return self.width

    @property
    def computes_in(self) -> str | None:
        """Of matrix products."""
        return "bf16" if self.bf16 else None

    def check(self, data: Data) -> None:
        """Raise UserError if patches do not divide the image, or heads the width."""
        network = self.network
        if data.side % self.patch:
            problem = f"must divide the {data.side} pixels of a side"
            raise UserError(f"{network}.patch", self.patch, problem, "choose a divisor, or change data.resolution")
        if self.width % (4 * self.heads):
            problem = f"must be a multiple of 4 for each of the {self.heads} heads"
            remedy, detail = (
                f"set {network}.width={-(-self.width // (4 * self.heads)) * 4 * self.heads}",
                ("rows and columns of a patch rotate pairs of features"),
            )
            raise UserError(f"{network}.width", self.width, problem, remedy, detail)
        if self.depth % self.levels:
            problem = f"must be a multiple of {network}.levels ({self.levels})"
            remedy = f"set {network}.depth={-(-self.depth // self.levels) * self.levels}, or change levels"
            raise UserError(f"{network}.depth", self.depth, problem, remedy)


class GATGenerator(GATNetwork, GeneratorSection):
    """GAT's generator (arXiv 2509.24935)."""

    truncates_w = True
    has_guidance = True
    family: Literal["gat"] = "gat"
    latent_size: Width = 64
    embedding_size: Width = 64
    """Size of the class embedding beside the latent; ignored without classes."""


class GATDiscriminator(GATNetwork):
    """GAT's discriminator, with a projection head where there are classes."""

    draws = True
    family: Literal["gat"] = "gat"
    embedding_size: Width = 2048
    """Features that the head projects on the class's embedding; ignored without classes."""
    min_info: Fraction = 0.125
    """Share of the images that is left of the coarsest level beside noise."""
    noise_floor: Fraction = 0.01
    """Noise of the finest level, which all levels have more of."""

    def shares_of_noise(self) -> list[float]:
        """Of noise in each level's image, from coarse to fine: 1 - min_info^(1 - i / (levels - 1)) + noise_floor."""
        last = self.levels - 1
        return [1 - self.min_info ** (1 - i / last) + self.noise_floor for i in range(self.levels)]

    def check(self, data: Data) -> None:
        """Raise UserError also if a level would be more than all noise."""
        super().check(data)
        if self.min_info == 0 or self.min_info < self.noise_floor:
            problem = f"must be greater than 0, and at least noise_floor ({self.noise_floor:g})"
            raise UserError("discriminator.min_info", self.min_info, problem, "give a number such as 0.125")
