"""One adversarial update: two engines that meet only at the image.

    fakes = G.infer(latents)                               no graph
    D.train([real, fakes], d_loss)                         D's update
    fakes = G.forward(latents)
    grads = D.input_grads(fakes, g_loss)                   dL/d(fakes)
    G.backward(grads)                                      backward of sum(fakes * dL/d(fakes)); G's update

Where the last step of D and G's update share their fakes, G.forward stands in the place of G.infer, and comes once.

The chain rule cut at one tensor, so it is exact; D's parameters and gradients are untouched by G's update. Each line
asks for a phase; what an engine makes of it, and when, is its own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from bigsgan.adversarial.extras import Extras
from bigsgan.adversarial.latents import Inputs, InputSource, Reals, SampleDraws, Slice
from bigsgan.adversarial.objectives import (
    GRADIENT_PENALTY,
    DiscriminatorObjective,
    GeneratorObjective,
    Reconstruction,
    statistic_names,
)
from bigsgan.config.sections import Objective
from bigsgan.data import LabelledImages
from bigsgan.engines import Engine, MicroBatch, MicroBatches, OnDemand, Rates
from bigsgan.engines.replays import begin_update
from bigsgan.monitor import Statistics


class RealSource(Protocol):
    """Where real images come from: the micro-batches of the next discriminator phase."""

    @property
    def reads(self) -> bool:
        """Whether this rank reads D's inputs."""
        ...

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
        augmentation: Probability of D's augmentations, where it follows a schedule.
    """

    generator: Rates
    discriminator: Rates
    penalty_weights: Mapping[str, float]
    augmentation: float | None = None


class AdversarialStep:
    """Callable that makes one generator update and the discriminator updates before it."""

    def __init__(
        self,
        generator: Engine,
        discriminator: Engine,
        hand_over: HandOver,
        section: Objective,
        reals: RealSource,
        source: InputSource,
        draws: SampleDraws,
        slices: dict[str, dict[str, Slice]],
        image_shape: tuple[int, int, int],
        statistics: Statistics,
        extras: Extras,
    ) -> None:
        """Join two engines.

        Args:
            generator: Of images.
            discriminator: Of images.
            hand_over: Between their layouts.
            section: The game.
            reals: Real images.
            source: The generator's inputs.
            draws: Noise for penalties.
            slices: What each network computes in the phase of each: ``slices[phase][network]``.
            image_shape: (C, H, W).
            statistics: Where losses, logits and norms are added.
            extras: What else the recipe asks for.
        """
        self.generator, self.discriminator = generator, discriminator
        self._hand_over, self._section, self._reals = hand_over, section, reals
        self._source, self._draws = source, draws
        self._slices, self._image_shape, self._statistics = slices, image_shape, statistics
        self._extras = extras
        self._g_objective = GeneratorObjective(section, statistics)
        self._reconstruction = Reconstruction(section.l1, statistics) if section.l1 else None
        statistics.declare(*statistic_names(section), *(["augmentation"] if extras.augmented else []))
        generator.after_update = self._generator_updated
        discriminator.after_update = functools.partial(self._record, "discriminator", discriminator)

    def __call__(self, update: int, scheduled: Scheduled) -> None:
        """Make update number ``update`` (from 0)."""
        begin_update(self.generator, self.discriminator)
        if self._extras.augmentation is not None:
            if scheduled.augmentation is not None:
                self._extras.augmentation.fill_(scheduled.augmentation)
            self._statistics.add("augmentation", self._extras.augmentation)
        for d_step in range(self._section.d_steps):
            # A phase of reals is taken where and when it is first looked at.
            reals = functools.cache(self._reals.next_phase)
            counters = (update, d_step)
            inputs = self._source.inputs("discriminator", counters, self._slices["discriminator"], reals)
            if self._section.reuse_fakes and d_step == self._section.d_steps - 1:
                fakes = self._begin_generator(inputs, update)
            else:
                fakes = self._fakes("discriminator", self.generator.infer(inputs.generator))
            self._discriminator_phase(inputs, fakes, counters, reals, scheduled)
        if not self._section.reuse_fakes:
            inputs = self._source.inputs("generator", (update,), self._slices["generator"], reals)
            fakes = self._begin_generator(inputs, update)
        self._generator_phase(inputs, fakes, update, reals, scheduled.generator)
        self.generator.finish()
        self.discriminator.finish()
        for watcher in self._extras.watchers:
            watcher.finish_update(update, self.discriminator.outcomes.last)
        if self._extras.path_length is not None:
            self._extras.path_length.finish_update(update, self.generator.outcomes.last)

    def _fakes(self, phase: str, images: Sequence[Tensor]) -> Sequence[Tensor]:
        """Images of a phase, where D reads its inputs."""
        return self._hand_over.to_discriminator(images, self._slices[phase]["discriminator"].num_global_samples)

    def _begin_generator(self, inputs: Inputs, update: int) -> Sequence[Tensor]:
        """Ask for the forward passes of G's update."""
        path_length = self._extras.path_length
        regularizer = path_length if path_length is not None and path_length.is_due(update) else None
        return self._fakes("generator", self.generator.forward(inputs.generator, regularizer))

    def _discriminator_phase(
        self,
        inputs: Inputs,
        fakes: Sequence[Tensor],
        counters: tuple[int, int],
        reals: Reals,
        scheduled: Scheduled,
    ) -> None:
        part = self._slices["discriminator"]["discriminator"]
        number = counters[0] * self._section.d_steps + counters[1]
        objective = DiscriminatorObjective(
            self._section,
            self._statistics,
            number,
            scheduled.penalty_weights,
            self._extras.watchers,
            self._extras.anchors,
        )
        noise = {name: self._draws.normal(name, counters, part, self._image_shape) for name in objective.perturbed}
        if objective.interpolates:
            noise[GRADIENT_PENALTY] = self._draws.uniform(GRADIENT_PENALTY, counters, part, (1, 1, 1))
        seeds = {name: self._seeds(f"augment/discriminator/{name}", counters, part) for name in ("real", "fake")}

        def batch(j: int) -> MicroBatch:
            real = (*self._source.real(reals()[j]), *seeds["real"][j])
            fake = (fakes[j], *inputs.conditions[j], *seeds["fake"][j])
            return objective.batch(real, fake, {name: noise[name][j] for name in noise})

        batches = MicroBatches(part.accumulation, part.num_samples * objective.num_segments, batch, source=fakes)
        self.discriminator.train(batches, objective, scheduled.discriminator)

    def _generator_phase(
        self, inputs: Inputs, fakes: Sequence[Tensor], update: int, reals: Reals, rates: Rates
    ) -> None:
        part = self._slices["generator"]["discriminator"]
        objective = self._g_objective
        seeds = {name: self._seeds(f"augment/generator/{name}", (update,), part) for name in ("real", "fake")}

        def batch(j: int) -> MicroBatch:
            real = (*self._source.real(reals()[j]), *seeds["real"][j]) if objective.pairs else None
            return objective.batch(real, (fakes[j], *inputs.conditions[j], *seeds["fake"][j]))

        batches = MicroBatches(part.accumulation, part.num_samples * objective.num_segments, batch, source=fakes)
        all_grads = self.discriminator.input_grads(batches, objective)

        def grad(j: int) -> Tensor:
            through_logits = all_grads[j][-part.num_samples :]
            if self._reconstruction is None or not self._reals.reads:
                return through_logits
            target, *_ = self._source.real(reals()[j])
            return through_logits + self._reconstruction.grads(fakes[j], target)

        grads = OnDemand(len(all_grads), grad, source=all_grads)
        self.generator.backward(self._hand_over.to_generator(grads, part.num_global_samples), rates)

    def _seeds(self, stream: str, counters: tuple[int, ...], part: Slice) -> Sequence[tuple[Tensor, ...]]:
        """By micro-batch, what D draws augmentations from; nothing where it has none."""
        if not self._extras.augmented:
            return OnDemand(part.accumulation, lambda j: ())
        seeds = self._draws.seeds(stream, counters, part)
        return OnDemand(part.accumulation, lambda j: (seeds[j],))

    def _generator_updated(self) -> None:
        self.discriminator.observe_seam(self.generator.outcomes.last)
        self._record("generator", self.generator)

    def _record(self, name: str, engine: Engine) -> None:
        if engine.outcomes.last is False:  # the norm is infinite
            return
        if isinstance(engine.grad_norm, Tensor):
            self._statistics.add(f"grad_norm/{name}", engine.grad_norm.detach())
        else:
            self._statistics.add_host(f"grad_norm/{name}", engine.grad_norm)
