"""Keys of discriminators that judge images with noise by a diffusion transformer of another run."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.families.dit import DiTNetwork
from bigsgan.config.sections import PositiveFloat
from bigsgan.errors import UserError

Time = Annotated[float, Field(gt=0, lt=1)]


class NoisyDiscriminator(DiTNetwork):
    """A DiT that reads times, and begins with the weights of the generator of ``init_from.run``."""

    draws: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = False
    copies_generator: ClassVar[bool] = True
    times: ClassVar[bool] = True
    time_scale: PositiveFloat = 1000.0
    """As in the generator."""
    first_time: Time
    """Least time t of images with noise, (1 - t) x + t z."""
    last_time: Time
    """Greatest time."""

    def check(self, data: Data) -> None:
        """Raise UserError as for all transformers, or if there is no time between the first and the last."""
        super().check(data)
        if self.first_time >= self.last_time:
            problem, remedy = f"must be below discriminator.last_time={self.last_time:g}", "change one of the two"
            raise UserError("discriminator.first_time", self.first_time, problem, remedy)
