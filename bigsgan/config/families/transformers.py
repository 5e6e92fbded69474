"""Keys that the sections of transformers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, GeneratorSection, NetworkSection
from bigsgan.config.sections import Width
from bigsgan.errors import UserError


class TransformerBlocks(NetworkSection):
    """Keys of transformer blocks.

    Attributes:
        sizes: Depth, width and heads of the published sizes, from which a family's own key ``size`` chooses.
    """

    without_half = "bf16=false"
    convolves = False
    has_statistics = False
    of_classes: ClassVar[tuple[str, ...]] = ("embedding_size",)
    is_transformer = True
    sizes: ClassVar[Mapping[str, tuple[int, int, int]]] = {}
    depth: Depth = 12
    """Transformer blocks."""
    width: Width = 768
    """Features of a token."""
    heads: Width = 12
    """Attention heads of a block."""
    bf16: bool = False
    """Matrix products in bf16 with float32 weights; sums, norms and logits in float32, as published. Without effect in
    a bf16 or fp16 engine."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_size(cls, given: Any) -> Any:
        size = given.get("size") if isinstance(given, dict) else None
        if not isinstance(size, str) or size not in cls.sizes:
            return given
        own = dict(zip(("depth", "width", "heads"), cls.sizes[size], strict=True))
        other = {key: given[key] for key, value in own.items() if given.get(key, value) != value}
        for key, value in other.items():
            settings = " ".join(f"{cls.network}.{each}={own[each]}" for each in other)
            remedy = f"set {settings}, or remove {cls.network}.size"
            raise UserError(f"{cls.network}.{key}", value, f"must be {own[key]} with {cls.network}.size={size}", remedy)
        return {**given, **own}

    @property
    def own_width(self) -> int:
        """Width of all blocks."""
        return self.width

    @property
    def computes_in(self) -> str | None:
        """The half type of matrix products, if they have one."""
        return "bf16" if self.bf16 else None

    def check(self, data: Data) -> None:
        """Raise UserError if heads do not divide the width."""
        super().check(data)
        network = self.network
        if self.width % (4 * self.heads):
            problem = f"must be a multiple of 4 for each of the {self.heads} heads"
            remedy = f"set {network}.width={-(-self.width // (4 * self.heads)) * 4 * self.heads}"
            detail = "rows and columns of a patch are told by pairs of features"
            raise UserError(f"{network}.width", self.width, problem, remedy, detail)


class TransformerNetwork(TransformerBlocks):
    """Keys of both networks: transformer blocks over patches of the images."""

    patch: Literal[1, 2, 4, 8] = 2
    """Pixels a side of a token's patch."""

    def check(self, data: Data) -> None:
        """Raise UserError if patches do not divide the image, or heads the width."""
        if not data.network_size.is_multiple_of(self.patch):
            problem = f"must divide the sides of {data.network_size}"
            raise UserError(f"{self.network}.patch", self.patch, problem, "choose a divisor, or change data.resolution")
        super().check(data)


class LeveledTransformer(TransformerNetwork):
    """Keys of both networks where G makes several images of a sample, and D judges them together."""

    levels: Annotated[int, Field(ge=2, le=16)] = 4
    """Images of a sample, coarse to fine, which G makes after equal shares of its blocks."""

    @property
    def images_per_sample(self) -> int:
        """One image a level."""
        return self.levels


class TransformerGenerator(LeveledTransformer, GeneratorSection):
    """Keys of a generator whose blocks are modulated by a mapping network's output for latent and class."""

    truncates_w = True
    has_guidance = True
    latent_size: Width = 64
    embedding_size: Width = 64
    """Size of the class embedding."""

    def check(self, data: Data) -> None:
        """Raise UserError as for both networks, or if levels do not divide the blocks."""
        super().check(data)
        if self.depth % self.levels:
            problem = f"must be a multiple of generator.levels ({self.levels})"
            remedy = f"set generator.depth={-(-self.depth // self.levels) * self.levels}, or change levels"
            raise UserError("generator.depth", self.depth, problem, remedy)
