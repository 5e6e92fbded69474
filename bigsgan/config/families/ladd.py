"""The section of latent adversarial diffusion distillation in a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.noisy import NoisyDiscriminator, Time
from bigsgan.config.sections import NaturalFloat, NaturalInt
from bigsgan.errors import UserError


class LADDDiscriminator(NoisyDiscriminator):
    """Heads on the features of a teacher, which reads images with noise.

    (Sauer et al. 2024, arXiv 2403.12015.) The heads are those of the public code FastGen: each gives an image a logit.
    """

    family: Literal["ladd"] = "ladd"
    convolves: ClassVar[bool] = True
    judged: list[NaturalInt] | None = Field(default=None, min_length=1)
    """Blocks of the teacher, numbered from 0, with a head behind each; by default the middle one. Those after the last
    are left out."""
    trains_teacher: bool = False
    """Train the teacher with the heads, rather than the heads alone."""
    first_time: Time = 0.001
    """Least time t of images with noise, (1 - t) x + t z; of the range up to the greatest, t takes a share of the
    logit-normal distribution."""
    last_time: Time = 0.999
    time_mean: float = 1.0
    """Mean of the share's logit."""
    time_deviation: NaturalFloat = 1.0
    """Its standard deviation."""

    @property
    def freezes(self) -> bool:
        """Whether the teacher is not trained."""
        return not self.trains_teacher

    @property
    def is_transformer(self) -> bool:  # type: ignore[override]
        """Whether blocks are trained."""
        return self.trains_teacher

    @property
    def judged_blocks(self) -> list[int]:
        """Blocks with a head, in their order."""
        return [self.depth // 2] if self.judged is None else sorted(self.judged)

    def check(self, data: Data) -> None:
        """Raise UserError as for its base, if a block is missing or named twice, or if images are too small."""
        super().check(data)
        field = "discriminator.judged"
        if max(self.judged_blocks) >= self.depth:
            problem = f"must be below discriminator.depth={self.depth}"
            raise UserError(field, self.judged, problem, "blocks are numbered from 0")
        if len(set(self.judged_blocks)) < len(self.judged_blocks):
            raise UserError(field, self.judged, "has a block twice", "remove one of them")
        if min(data.network_size.over(self.patch)) < 2:
            problem = f"must leave two patches on each side of {data.network_size}"
            raise UserError("discriminator.patch", self.patch, problem, "choose a smaller one")
