"""The autoencoder's sections of a recipe."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import Depth, NetworkSection
from bigsgan.config.families.pix2pix import Pix2PixDiscriminator
from bigsgan.config.sections import Fraction, PositiveFloat, PositiveInt, Section, Width
from bigsgan.errors import UserError


class Revival(Section):
    """Codes that are hardly used begin anew at random latents of the batch (arXiv 2005.00341, section 3.1)."""

    below: Annotated[float, Field(gt=0, lt=1)] = 0.03
    """Average uses below which a code is replaced, as a share of even use."""
    most: PositiveInt = 1024
    """Most codes replaced after an update; the least used come first."""


class CodebookAverages(Section):
    """Codes follow moving averages of the latents nearest to them, over the whole batch, which begin with even use (van
    den Oord et al. 2017, appendix A.1)."""

    decay: Fraction = 0.99
    """Share of the old averages that an update keeps."""
    revival: Revival | None = None


class Bottleneck(Section):
    """How the encoder's output becomes latents."""

    kind: Literal["kl", "vq", "fsq", "lfq", "none"] = "kl"
    """``kl`` draws them from normal distributions (Kingma and Welling 2014, arXiv 1312.6114), ``vq`` takes the nearest
    of learned codes (van den Oord et al. 2017, arXiv 1711.00937), ``fsq`` rounds each channel to a few levels (Mentzer
    et al. 2023, arXiv 2309.15505), ``lfq`` to its sign (Yu et al. 2023, arXiv 2310.05737)."""
    num_codes: Annotated[int, Field(gt=1, le=2**20)] = 16384
    """Codes of ``vq``."""
    normalized: bool = True
    """Divide ``vq``'s codes and latents by their norms (Yu et al. 2021, arXiv 2110.04627)."""
    ema: CodebookAverages | None = None
    kmeans_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Steps of k-means (Lloyd 1982) over the first batch's latents, whose [centres](../how-to/image-games.md#codes)
    replace ``vq``'s codes after its update. A centre that no latent is near stays."""
    temperature: PositiveFloat | None = None
    """Of the softmax of minus the squared distances to ``vq``'s or ``lfq``'s codes, for ``objective.codebook.entropy``.
    With ``lfq``, up to nine channels count together (Zhao et al. 2024, arXiv 2406.07548)."""
    levels: list[Annotated[int, Field(ge=2, le=256)]] = Field(default=[8, 5, 5, 5], min_length=1)
    """Levels of each channel of ``fsq``."""


_OF_CODES = "num_codes", "normalized", "ema", "kmeans_steps", "temperature"
_KEYS = {"vq": _OF_CODES, "fsq": ("levels",), "lfq": ("temperature",)}
_QUANTIZED = ["encoded", "quantized", "codes"]
_OUTPUTS = {"kl": ["moments"], "vq": _QUANTIZED, "lfq": _QUANTIZED}


_MOST_SIGNS = 20
"""Most channels of ``lfq``: a million codes."""


class AutoencoderGenerator(NetworkSection):
    """Makes images again from latents that it makes of them: the autoencoder of Stable Diffusion and of VQGAN.

    (Rombach et al. 2022, arXiv 2112.10752; Esser et al. 2021, arXiv 2012.09841.) Images come without classes.
    """

    network: ClassVar[str] = "generator"
    reads: ClassVar[str] = "images"
    has_tangents: ClassVar[bool] = False
    family: Literal["autoencoder"] = "autoencoder"
    channels: Width = 128
    """Channels of the finest feature map."""
    multipliers: list[Annotated[int, Field(gt=0, le=64)]] = Field(default=[1, 2, 4, 4], min_length=1, max_length=8)
    """Channels of each level, fine to coarse, divided by ``channels``; each but the first halves the sides."""
    num_blocks: Depth = 2
    """Residual blocks of a level of the encoder; the decoder has one more."""
    attention: list[Annotated[int, Field(ge=0, lt=8)]] = Field(default=[])
    """Levels with self-attention after each block, 0 the finest; the middle always has it."""
    norm_groups: Width = 32
    """Groups of channels that are normalized together."""
    latent_channels: Width = 4
    """Channels of the latents."""
    encoder_channels: Width | None = None
    """Channels between the encoder and the map to latents, and behind the latents; by default ``latent_channels``."""
    bottleneck: Bottleneck = Bottleneck()
    frozen: Literal["none", "encoder", "decoder"] = "none"
    """Part that keeps the weights of ``init_from``; codes then stay too."""

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether latents are drawn, or the places of latents where codes begin, at first or anew."""
        section = self.bottleneck
        return section.kind == "kl" or bool(section.kmeans_steps or (section.ema and section.ema.revival))

    @property
    def outputs(self) -> list[str]:
        """Names of what it returns after the images."""
        return _OUTPUTS.get(self.bottleneck.kind, []) + ["entropies", "shares"] * bool(self.bottleneck.temperature)

    @property
    def freezes(self) -> bool:
        """Whether a part keeps its weights."""
        return self.frozen != "none"

    @property
    def num_codes(self) -> int:
        """Number of values that the latents of a pixel may have; 0 if they are not quantized."""
        section = self.bottleneck
        sizes = {"vq": section.num_codes, "fsq": math.prod(section.levels), "lfq": 2**self.latent_channels}
        return sizes.get(section.kind, 0)

    @property
    def learns_codes(self) -> bool:
        """Whether codes move by their gradients."""
        return self.bottleneck.kind == "vq" and self.bottleneck.ema is None and not self.freezes

    @property
    def factor(self) -> int:
        """How many times shorter the sides of latents are than those of images."""
        return 1 << (len(self.multipliers) - 1)

    def input_sides(self, data: Data) -> tuple[int, int]:
        """Sides that the levels halve."""
        return self.factor, self.factor

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data, or its keys each other."""
        name, kind = "generator.bottleneck", self.bottleneck.kind
        others = [key for keys in _KEYS.values() for key in keys if key not in _KEYS.get(kind, ())]
        self.bottleneck.refuse_changed(name, others, f"kind={kind}")
        if self.frozen == "decoder" and self.bottleneck.ema:
            problem, detail = "must be null with generator.frozen=decoder", "codes would move"
            raise UserError(f"{name}.ema", f"decay={self.bottleneck.ema.decay}", problem, "set it to null", detail)
        if kind == "lfq" and self.latent_channels > _MOST_SIGNS:
            problem, remedy = f"must be at most {_MOST_SIGNS} with kind=lfq", "give fewer, or kind: fsq"
            raise UserError("generator.latent_channels", self.latent_channels, problem, remedy, "codes are counted")
        if kind == "fsq" and len(self.bottleneck.levels) != self.latent_channels:
            problem, remedy = f"must be {len(self.bottleneck.levels)}, as many as {name}.levels", "change either"
            raise UserError("generator.latent_channels", self.latent_channels, problem, remedy)
        odd = [self.channels * m for m in self.multipliers if self.channels * m % self.norm_groups]
        if odd:
            problem = f"must divide the channels of each level, such as {odd[0]}"
            raise UserError("generator.norm_groups", self.norm_groups, problem, "give another number of groups")
        if self.attention and max(self.attention) >= len(self.multipliers):
            problem = f"must be levels from 0 to {len(self.multipliers) - 1}, as multipliers have"
            raise UserError("generator.attention", self.attention, problem, "remove the others")
        if not data.network_size.is_multiple_of(self.factor):
            problem = f"must be a multiple of {self.factor}, by which the {len(self.multipliers)} levels divide it"
            remedy = f"set data.resolution={data.network_size.nearest_multiple_of(self.factor).text}"
            raise UserError("data.resolution", data.resolution.value, problem, f"{remedy}, or give fewer multipliers")


class AutoencoderDiscriminator(Pix2PixDiscriminator):
    """PatchGAN of images alone: a logit for each patch, or pixel (Isola et al. 2017, arXiv 1611.07004)."""

    paired: ClassVar[bool] = False
    family: Literal["autoencoder"] = "autoencoder"  # type: ignore[assignment]
