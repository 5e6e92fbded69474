"""DMD2's section of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.base import Guidance
from bigsgan.config.families.dit import DiTNetwork
from bigsgan.config.sections import PositiveFloat
from bigsgan.errors import UserError

Time = Annotated[float, Field(gt=0, lt=1)]


class DMD2Discriminator(DiTNetwork):
    """A fake score, by whose features a head judges images with noise, beside a teacher that stays as it is.

    (Yin et al. 2024, arXiv 2405.14867.) Both are a DiT that reads times, and begin with the weights of the generator of
    ``init_from.run``, as the student does.
    """

    family: Literal["dmd2"] = "dmd2"
    draws: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = False
    copies_generator: ClassVar[bool] = True
    outputs: ClassVar[list[str]] = ["denoising", "matching"]
    times: ClassVar[bool] = True
    time_scale: PositiveFloat = 1000.0
    """As in the generator."""
    first_time: Time = 0.02
    """Least time t of images with noise, (1 - t) x + t z; t is uniform."""
    last_time: Time = 0.98
    """Greatest time."""
    guidance: Guidance = 1.0
    """Scale of classifier-free guidance of the teacher (Ho and Salimans 2022, arXiv 2207.12598). Unless 1, it takes two
    passes."""

    @property
    def freezes(self) -> bool:
        """Its teacher is not trained."""
        return True

    def check(self, data: Data) -> None:
        """Raise UserError as for all transformers, or if times or guidance have no effect."""
        super().check(data)
        if self.first_time >= self.last_time:
            problem, remedy = f"must be below discriminator.last_time={self.last_time:g}", "change one of the two"
            raise UserError("discriminator.first_time", self.first_time, problem, remedy)
        if self.guidance != 1 and not data.condition_width:
            raise UserError("discriminator.guidance", self.guidance, "must be 1 without labels", "remove it")


def name_in_generator(config: object, name: str) -> str:
    """Return the name of one of D's tensors in the generator that both scores were; no other D calls it differently."""
    if not isinstance(config, DMD2Discriminator):
        return name
    return re.sub(r"^layers\.(\d+)\.real\.", lambda found: f"layers.{int(found[1]) - config.depth - 2}.", name)
