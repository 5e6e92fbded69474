"""R1 and R2: the squared norm of D's gradient at real or at fake images, itself or by a finite difference."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.terms.term import Term
from bigsgan.config.objective import DIFFERENTIATED, Penalty
from bigsgan.engines import MicroBatch
from bigsgan.models.precision import full
from bigsgan.monitor import Statistics


class GradientNorm(Term):
    """weight / 2 * E[|grad|^2], ``every`` times on every ``every``-th step of D; see ``config.objective.Penalty``."""

    def __init__(self, name: str, section: Penalty) -> None:
        """Take ``r1`` or ``r2``."""
        super().__init__(name, "discriminator", (f"{DIFFERENTIATED[name]}_gradients",), section.every, section.every)
        self._section, self._weight, self.shrink = section, section.weight, section.batch_shrink
        self.statistics = (f"penalty/{name}",)

    def begin_update(self, weights: Mapping[str, float]) -> None:
        """Take the scheduled weight, if there is one."""
        self._weight = weights.get(self.name, self._section.weight)

    def value(self, **read: Tensor) -> Tensor:
        """Return weight / 2 times the mean squared norm."""
        return self.of_squares(squared_norms(read[self.reads[0]]))

    def of_squares(self, squares: Tensor) -> Tensor:
        """Return the penalty of squared norms (n,)."""
        return self._weight / 2 * squares.mean()


class FiniteDifference(GradientNorm):
    """The same of ((D(x + sigma e) - D(x)) / sigma)^2, or from x - sigma e; its mean over e is near |grad|^2.

    Now and then it is compared with the exact penalty on one micro-batch, before D trains.
    """

    def __init__(self, name: str, section: Penalty) -> None:
        """Take ``r1`` or ``r2``, with a ``sigma``."""
        assert section.sigma is not None, "a plan's objective has a sigma"
        super().__init__(name, section)
        self._sigma, self._check_every = section.sigma, section.check_every
        if section.check_every:
            self.statistics += (f"penalty/{name}_exact", f"slope/{name}", f"slope/{name}_exact")
        self._ends = f"{name}_ahead", f"{name}_behind" if section.antithetic else DIFFERENTIATED[name]
        self.segments = self._ends[: 1 + section.antithetic]
        self.reads = tuple(f"{segment}_logits" for segment in self._ends)
        self._distance = self._sigma * len(self.segments)  # of the two images, in units of e

    def is_checked(self, d_step: int) -> bool:
        """Whether this step compares it with the exact penalty."""
        return self.is_due(d_step) and bool(self._check_every) and d_step // self.every % self._check_every == 0

    def noise(
        self, draws: SampleDraws, counters: tuple[int, ...], samples: range, real: Tensor, fake: Tensor
    ) -> Tensor:
        """Draw e, of the shape of the images."""
        images = real if DIFFERENTIATED[self.name] == "real" else fake
        return draws.noise(self.name, counters, samples, tuple(images.shape[1:]))

    def added(self, real: MicroBatch, fake: MicroBatch, noise: Tensor | None) -> list[MicroBatch]:
        """Return the images at x + sigma e, and at x - sigma e if it is antithetic."""
        assert noise is not None, "it draws e"
        images, *rest = real if DIFFERENTIATED[self.name] == "real" else fake
        step = self._sigma * noise
        found = [(images + step, *rest)]
        return found if len(self.segments) == 1 else [*found, (images - step, *rest)]

    def value(self, **read: Tensor) -> Tensor:
        """Return weight / 2 times the mean squared slope."""
        return self.of_squares(self._squared_slopes(read))

    def check_logits(self, logits: Mapping[str, Tensor], statistics: Statistics) -> None:
        """Record the squared slopes of a checked micro-batch, given its logits by segment."""
        read = {f"{segment}_logits": found.detach() for segment, found in logits.items()}
        statistics.add(f"slope/{self.name}", self._squared_slopes(read))

    def check_gradients(
        self, images: Mapping[str, Tensor], gradients: Mapping[str, Tensor], statistics: Statistics
    ) -> None:
        """Record the exact penalty, and the exact squared slopes along the finite differences' directions.

        Both slopes are along the same e, so they differ by the effect of sigma, and not by chance.

        Args:
            images: Those of a checked micro-batch, by segment, as D sees them.
            gradients: Those of the logits at these images; at a real image, by the one image.
            statistics: Take them.
        """
        end, start = (self._chosen(segment, images[segment]) for segment in self._ends)
        own = gradients[DIFFERENTIATED[self.name]][:: self.shrink]
        direction = (end - start)[:, : own.shape[1]] / self._distance
        squares = squared_norms(own)
        statistics.add(f"penalty/{self.name}_exact", self.of_squares(squares), len(squares))
        statistics.add(f"slope/{self.name}_exact", (own * direction).sum(dim=(1, 2, 3)).square())

    def _squared_slopes(self, read: Mapping[str, Tensor]) -> Tensor:
        end, start = (self._chosen(end, full(read[name])) for end, name in zip(self._ends, self.reads, strict=True))
        return ((end - start) / self._distance).view(len(start), -1).sum(dim=1).square()

    def _chosen(self, segment: str, found: Tensor) -> Tensor:
        """Return what belongs to the images that it uses: all of its own segments, a part of real or fake ones."""
        return found if segment in self.segments else found[:: self.shrink]


def squared_norms(gradients: Tensor) -> Tensor:
    """(n, C, H, W) -> (n,)."""
    return gradients.square().sum(dim=(1, 2, 3))
