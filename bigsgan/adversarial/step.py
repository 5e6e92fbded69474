"""One adversarial update: two engines that meet only at the image.

    fakes = G.infer(latents)                               no graph
    D.train([real, fakes], d_loss)                         D's update
    G.train_through(latents, fake -> dL/d(fake) from D)    backward of sum(fake * dL/d(fake)); G's update

The chain rule cut at one tensor, so it is exact; D's parameters and gradients are untouched by G's update.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from bigsgan.adversarial.latents import LatentSource, Slice
from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.config.sections import Objective
from bigsgan.data import LabelledImages
from bigsgan.engines import Engine, MicroBatch
from bigsgan.monitor import Statistics


class RealSource(Protocol):
    """Where real images come from: the micro-batches of the next discriminator phase."""

    def next_phase(self) -> list[LabelledImages]:
        """Return this rank's micro-batches and advance."""
        ...


class LearningRates(NamedTuple):
    """Learning rates of one update."""

    generator: float
    discriminator: float


class AdversarialStep:
    """Callable that makes one generator update and the discriminator updates before it."""

    def __init__(
        self,
        generator: Engine,
        discriminator: Engine,
        section: Objective,
        reals: RealSource,
        latents: LatentSource,
        slices: dict[str, Slice],
        statistics: Statistics,
    ) -> None:
        self.generator, self.discriminator = generator, discriminator
        self._section, self._reals, self._latents, self._slices = section, reals, latents, slices
        self._statistics = statistics
        self._d_objective = DiscriminatorObjective(section, statistics)
        self._g_objective = GeneratorObjective(section, statistics)

    def __call__(self, update: int, lr: LearningRates) -> None:
        """Make update number ``update`` (from 0)."""
        for d_step in range(self._section.d_steps):
            reals = self._reals.next_phase()
            latents = self._latents.phase("discriminator", (update, d_step), self._slices["discriminator"])
            self._discriminator_phase(update, d_step, reals, latents, lr.discriminator)
        if not self._section.reuse_fakes:
            latents = self._latents.phase("generator", (update,), self._slices["generator"])
        self._generator_phase(reals, latents, lr.generator)

    def _discriminator_phase(
        self, update: int, d_step: int, reals: list[LabelledImages], latents: list[MicroBatch], lr: float
    ) -> None:
        self._d_objective.schedule(update * self._section.d_steps + d_step)
        fakes = self.generator.infer(latents)
        noise = {
            name: self._latents.noise(name, (update, d_step), self._slices["discriminator"], fakes[0].shape[1:])
            for name in self._d_objective.perturbed
        }
        batches = [
            self._d_objective.batch(real, (fake, labels), {name: values[j] for name, values in noise.items()})
            for j, (real, fake, (_, labels)) in enumerate(zip(reals, fakes, latents, strict=True))
        ]
        self.discriminator.train(batches, self._d_objective, lr)
        self._record("discriminator", self.discriminator)

    def _generator_phase(self, reals: list[LabelledImages], latents: list[MicroBatch], lr: float) -> None:
        def image_grads(j: int, fakes: Tensor) -> Tensor:
            real = reals[j] if self._g_objective.pairs else None
            batch = self._g_objective.batch(real, (fakes, latents[j][1]))
            return self.discriminator.input_grads(batch, self._g_objective)[-len(fakes) :]

        self.generator.train_through(latents, image_grads, lr)
        self.discriminator.observe_seam(self.generator.applied)
        self._record("generator", self.generator)

    def _record(self, name: str, engine: Engine) -> None:
        if not engine.applied:  # the norm of a skipped update is infinite
            return
        if isinstance(engine.grad_norm, Tensor):
            self._statistics.add(f"grad_norm/{name}", engine.grad_norm.detach())
        else:
            self._statistics.add_host(f"grad_norm/{name}", engine.grad_norm)
