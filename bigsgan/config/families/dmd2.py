"""DMD2's section of a recipe."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from bigsgan.config.data import Data
from bigsgan.config.families.base import Guidance
from bigsgan.config.families.noisy import NoisyDiscriminator, Time
from bigsgan.errors import UserError


class DMD2Discriminator(NoisyDiscriminator):
    """A fake score, by whose features a head judges images with noise, beside a teacher that stays as it is.

    (Yin et al. 2024, arXiv 2405.14867.) Both are a DiT that reads times, and begin with the weights of the generator of
    ``init_from.run``, as the student does.
    """

    family: Literal["dmd2"] = "dmd2"
    outputs: ClassVar[list[str]] = ["denoising", "matching"]
    first_time: Time = 0.02
    """Least time t of images with noise, (1 - t) x + t z; t is uniform."""
    last_time: Time = 0.98
    guidance: Guidance = 1.0
    """Scale of classifier-free guidance of the teacher (Ho and Salimans 2022, arXiv 2207.12598). Unless 1, it takes two
    passes."""

    @property
    def freezes(self) -> bool:
        """Its teacher is not trained."""
        return True

    def check(self, data: Data) -> None:
        """Raise UserError as for its base, or if guidance has no effect."""
        super().check(data)
        if self.guidance != 1 and not data.condition_width:
            raise UserError("discriminator.guidance", self.guidance, "must be 1 without labels", "remove it")


def name_in_generator(config: object, name: str) -> str:
    """Return the name of one of D's tensors in the generator that both scores were; no other D calls it differently."""
    if not isinstance(config, DMD2Discriminator):
        return name
    return re.sub(r"^layers\.(\d+)\.real\.", lambda found: f"layers.{int(found[1]) - config.depth - 2}.", name)
