"""One adversarial update: two engines that meet only at the image.

    fakes = G.infer(latents)                               no graph
    D.train([real, fakes], d_loss)                         D's update
    fakes = G.forward(latents)
    grads = D.input_grads(fakes, g_loss)                   dL/d(fakes)
    G.backward(grads)                                      backward of sum(fakes * dL/d(fakes)); G's update

The chain rule cut at one tensor, so it is exact; D's parameters and gradients are untouched by G's update. Each line
asks for a phase; what an engine makes of it, and when, is its own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from bigsgan.adversarial.latents import LatentSource, Slice
from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective, statistic_names
from bigsgan.config.sections import Objective
from bigsgan.data import LabelledImages
from bigsgan.engines import Engine, MicroBatches, OnDemand, Rates
from bigsgan.monitor import Statistics

_Draws = tuple[str, tuple[int, ...]]
_Reals = Callable[[], list[LabelledImages]]


class RealSource(Protocol):
    """Where real images come from: the micro-batches of the next discriminator phase."""

    def next_phase(self) -> list[LabelledImages]:
        """Return this replica's micro-batches and advance. Only asked on ranks that read D's inputs."""
        ...


class HandOver(Protocol):
    """The way of images from the ranks where G's outputs arise to those that read D's inputs, and of gradients back."""

    def to_discriminator(self, images: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Images of micro-batches of ``num_samples`` over all replicas: from G's slices of them to D's."""
        ...

    def to_generator(self, grads: Sequence[Tensor], num_samples: int) -> Sequence[Tensor]:
        """Gradients at those images: from D's slices to G's."""
        ...


class Scheduled(NamedTuple):
    """The numbers of one update that may change over a run.

    Attributes:
        generator: Of its optimizer.
        discriminator: Of its optimizer.
        penalty_weights: Of ``r1`` and ``r2``, where they are not those of the section.
    """

    generator: Rates
    discriminator: Rates
    penalty_weights: Mapping[str, float]


class AdversarialStep:
    """Callable that makes one generator update and the discriminator updates before it."""

    def __init__(
        self,
        generator: Engine,
        discriminator: Engine,
        hand_over: HandOver,
        section: Objective,
        reals: RealSource,
        latents: LatentSource,
        slices: dict[str, dict[str, Slice]],
        image_shape: tuple[int, int, int],
        statistics: Statistics,
    ) -> None:
        """Join two engines.

        Args:
            generator: Of images.
            discriminator: Of images.
            hand_over: Between their layouts.
            section: The game.
            reals: Real images.
            latents: The generator's inputs.
            slices: What each network computes in the phase of each: ``slices[phase][network]``.
            image_shape: (C, H, W).
            statistics: Where losses, logits and norms are added.
        """
        self.generator, self.discriminator = generator, discriminator
        self._hand_over, self._section, self._reals, self._latents = hand_over, section, reals, latents
        self._slices, self._image_shape, self._statistics = slices, image_shape, statistics
        self._g_objective = GeneratorObjective(section, statistics)
        statistics.declare(*statistic_names(section))
        generator.after_update = self._generator_updated
        discriminator.after_update = functools.partial(self._record, "discriminator", discriminator)

    def __call__(self, update: int, scheduled: Scheduled) -> None:
        """Make update number ``update`` (from 0)."""
        for d_step in range(self._section.d_steps):
            # A phase of reals is taken where and when it is first looked at.
            reals = functools.cache(self._reals.next_phase)
            draws: _Draws = ("discriminator", (update, d_step))
            phase = update * self._section.d_steps + d_step
            self._discriminator_phase(draws, phase, reals, scheduled)
        if not self._section.reuse_fakes:
            draws = ("generator", (update,))
        self._generator_phase(draws, reals, scheduled.generator)
        self.generator.finish()
        self.discriminator.finish()

    def _discriminator_phase(self, draws: _Draws, phase: int, reals: _Reals, scheduled: Scheduled) -> None:
        slices = self._slices["discriminator"]
        own = slices["discriminator"]
        objective = DiscriminatorObjective(self._section, self._statistics, phase, scheduled.penalty_weights)
        fakes = self.generator.infer(self._latents.phase(*draws, slices["generator"]))
        fakes = self._hand_over.to_discriminator(fakes, own.batch // own.accumulation)
        labels = self._latents.labels(*draws, own)
        noise = {name: self._latents.noise(name, draws[1], own, self._image_shape) for name in objective.perturbed}

        def batch(j: int) -> tuple[Tensor, ...]:
            return objective.batch(reals()[j], (fakes[j], labels[j]), {name: noise[name][j] for name in noise})

        batches = MicroBatches(own.accumulation, own.num_samples * objective.num_segments, batch, source=fakes)
        self.discriminator.train(batches, objective, scheduled.discriminator)

    def _generator_phase(self, draws: _Draws, reals: _Reals, rates: Rates) -> None:
        slices = self._slices["generator"]
        theirs = slices["discriminator"]
        micro_batch = theirs.batch // theirs.accumulation
        objective = self._g_objective
        fakes = self.generator.forward(self._latents.phase(*draws, slices["generator"]))
        fakes = self._hand_over.to_discriminator(fakes, micro_batch)
        labels = self._latents.labels(*draws, theirs)

        def batch(j: int) -> tuple[Tensor, ...]:
            return objective.batch(reals()[j] if objective.pairs else None, (fakes[j], labels[j]))

        num_samples = theirs.num_samples * objective.num_segments
        batches = MicroBatches(theirs.accumulation, num_samples, batch, source=fakes)
        all_grads = self.discriminator.input_grads(batches, objective)
        grads = OnDemand(len(all_grads), lambda j: all_grads[j][-theirs.num_samples :], source=all_grads)
        self.generator.backward(self._hand_over.to_generator(grads, micro_batch), rates)

    def _generator_updated(self) -> None:
        self.discriminator.observe_seam(self.generator.applied)
        self._record("generator", self.generator)

    def _record(self, name: str, engine: Engine) -> None:
        if not engine.applied:  # the norm of a skipped update is infinite
            return
        if isinstance(engine.grad_norm, Tensor):
            self._statistics.add(f"grad_norm/{name}", engine.grad_norm.detach())
        else:
            self._statistics.add_host(f"grad_norm/{name}", engine.grad_norm)
