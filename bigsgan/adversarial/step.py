"""One adversarial update: two engines that meet only at the image.

    G makes images      fakes = G(latents)                                 no graph
    D checks            the slope of D on one micro-batch                  to check a finite difference, now and then
    D differentiates    the slope of D at reals, or at all images          for a penalty in forward mode
    D trains            update D on d_loss(D(reals), D(fakes))
    G differentiates    the slope of G at its styles                       for path length in forward mode
    G makes images      fakes = G(latents)
    D judges            grads = dL/d(fakes), L = g_loss(D(fakes))
    G weighs            the sizes of the gradients of L's parts             for a weight that follows from them
    G pulls back        update G by the backward pass of sum(fakes * grads)

If a step of D and G's update share their fakes, G makes images once. ``objective.schedule`` may let G's update come
first. If it lets updates overlap, D judges first, and then trains on images that it kept in the update before
(adversarial/stale_images.py). Without a D, G trains on its own images in one phase.

This is the chain rule, cut at one tensor, so it is exact. G's update leaves D's parameters and gradients untouched. The
lines above are phases (engines/phases.py). This file gives each its inputs and its loss; the executor computes them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.adversarial.adaptive_weight import AdaptiveWeight
from bigsgan.adversarial.image_pool import ImagePool
from bigsgan.adversarial.latents import Inputs, InputSource, Reals, SampleDraws
from bigsgan.adversarial.objectives import (
    DiscriminatorObjective,
    GeneratorObjective,
    InputGradients,
)
from bigsgan.adversarial.stale_images import StaleImages
from bigsgan.adversarial.terms import (
    GradientNormalization,
    InnerTerm,
    OutputLoss,
    Term,
    due,
    image_gradient,
    images_read,
    inner_term,
    output_loss,
    targets_of,
)
from bigsgan.adversarial.terms.gradient_normalization import STATISTIC
from bigsgan.config import RunPlan
from bigsgan.data import RealImages, Slice
from bigsgan.engines import Engine, MicroBatch, Phase, Rates, Work, phases
from bigsgan.engines.executor import Executor
from bigsgan.monitor import Statistics

_TOTAL = "loss/generator"
"""Name of the statistic of G's whole loss where it learns alone."""

_MAKES = phases.MakesImages, phases.MakesOwnImages

GetInputs = Callable[[int, Tensor | None], MicroBatch]
"""Returns the inputs of a phase's micro-batch, given its number and the images that the phase reads."""


class Sources(NamedTuple):
    """The sources of images and random numbers."""

    reals: RealImages
    inputs: InputSource  # the generator's inputs
    draws: SampleDraws  # noise for penalties, seeds for augmentations
    # the samples that a network computes in the update of either: ``slices[update_of][network]``
    slices: dict[str, dict[str, Slice]]
    stale_images: StaleImages | None = None  # images for D's next update, where updates overlap
    pool: ImagePool | None = None  # images of earlier updates that D sees in place of some new ones


class Scheduled(NamedTuple):
    """The numbers of one update that may change over a run."""

    generator: Rates  # learning rate and beta2 of G's optimizer
    discriminator: Rates  # learning rate and beta2 of D's optimizer
    penalty_weights: Mapping[str, float]  # weights of ``r1`` and ``r2`` that replace those of the recipe
    adversarial: float = 1.0  # factor of the loss on logits in G's loss
    discriminator_learns: bool = True  # whether D's loss counts
    augmentation: float | None = None  # probability of D's augmentations; None unless it follows a schedule


class AdversarialStep:
    """Callable that makes one generator update, and the discriminator's of the same update.

    Attributes:
        executor: Computes the phases.
        generator, discriminator: The two engines; no discriminator where the generator learns alone.
    """

    def __init__(
        self,
        executor: Executor,
        plan: RunPlan,
        sources: Sources,
        statistics: Statistics,
        terms: Sequence[Term],
        augmentation: Tensor | None = None,
    ) -> None:
        """Join two engines.

        Args:
            executor: Runs the engines.
            plan: The run's plan.
            sources: The sources of the inputs.
            statistics: Collects losses, logits and norms.
            terms: Those of the game.
            augmentation: Probability of D's augmentations, (1,), if this rank holds it.
        """
        self.executor = executor
        self.generator, self.discriminator = executor.engines["generator"], executor.engines.get("discriminator")
        self._plan, self._section, self._sources = plan, plan.objective, sources
        self._phases = functools.cache(functools.partial(phases.update_phases, plan))
        self._statistics, self._terms, self._augmentation = statistics, terms, augmentation
        self._normalization = next((term for term in terms if isinstance(term, GradientNormalization)), None)
        statistics.declare(*(name for term in terms for name in term.statistics))
        statistics.declare(*(["augmentation"] if plan.recipe.augmentation is not None else []))
        statistics.declare(*(f"grad_norm/{network}" for network in executor.engines))
        statistics.declare(*([_TOTAL] if self.discriminator is None else []))
        statistics.declare(*([STATISTIC] if self._section.adversarial.adaptive else []))
        self.generator.after_update = self._generator_updated
        if self.discriminator is not None:
            self.discriminator.after_update = functools.partial(self._record, "discriminator", self.discriminator)

    def __call__(self, update: int, scheduled: Scheduled) -> None:
        """Make update number ``update`` (from 0)."""
        if self._augmentation is not None:
            if scheduled.augmentation is not None:
                self._augmentation.fill_(scheduled.augmentation)
            self._statistics.add("augmentation", self._augmentation, self._images("discriminator"))
        weighs = self._section.adversarial.weighs  # the weight has the factor then
        weights = {"generator": 1.0 if weighs else scheduled.adversarial, "normalization": scheduled.adversarial}
        weights |= scheduled.penalty_weights
        for term in self._terms:
            term.begin_update(weights)
        self.executor(self._works(update, scheduled))
        for term in self._terms:
            term.finish_update(update, self.executor.engines[term.network].outcomes.last)
        if self._sources.stale_images is not None:
            self._sources.stale_images.finish_update(update)
        if self._sources.pool is not None:
            self._sources.pool.finish_update(self._section.d_steps)

    def _works(self, update: int, scheduled: Scheduled) -> Iterator[Work]:
        """Yield each phase with its inputs and its loss."""
        if self.discriminator is None:
            yield self._learn_without_discriminator(update, scheduled)
            return
        section, num_made = self._section, self._plan.recipe.generator.images_per_sample
        objectives = [
            DiscriminatorObjective(self._terms, self._statistics, number, num_made, scheduled.discriminator_learns)
            for number in range(update * section.d_steps, (update + 1) * section.d_steps)
        ]
        of_g = due(self._terms, "generator", update)
        regularizer = inner_term(of_g)
        of_outputs = output_loss(self._terms, self._plan.recipe, update, self._statistics)
        # Real images are only read when D needs them, on the ranks that do, in the order of its steps.
        reals: list[Reals] = [functools.cache(self._sources.reals.next_phase) for _ in objectives]
        # G's update goes with the real images that D read last, or with the first ones where it comes before D's steps.
        reals_of_g = reals[-1] if section.schedule == "exact" else reals[0]

        @functools.cache
        def inputs_of(d_step: int | None) -> Inputs:
            """Return the inputs of one of D's steps, which count on into the next update, or of G's update."""
            if d_step is None:
                return self._inputs("generator", (update,), reals_of_g)
            later, number = divmod(d_step, section.d_steps)
            return self._inputs("discriminator", (update + later, number), reals_of_g if later else reals[number])

        weight = self._normalization or self._adaptive_weight(scheduled.adversarial)
        stale = self._sources.stale_images
        has_stale = stale is not None and stale.update == update
        planned = self._phases(tuple(o.segments for o in objectives), regularizer is not None, has_stale)
        for d_step in dict.fromkeys(each.d_step for each in planned if isinstance(each, _MAKES)):
            if prepare := inputs_of(d_step).prepare:
                prepare()
        for phase in planned:
            if isinstance(phase, phases.MakesOwnImages):
                own_inputs = inputs_of(phase.d_step)
                own = self._make_images(phase, own_inputs, regularizer)
                own.of_outputs = of_outputs
                if weight is not None:
                    own.exposed, own.weighted = weight.parameter, weight.weighted
                yield own
            elif isinstance(phase, phases.MakesImages):
                yield self._make_images(phase, inputs_of(phase.d_step))
            elif isinstance(phase, phases.DifferentiatesStyles):
                assert regularizer is not None, "G differentiates for a term of a tensor inside it"
                yield self._differentiate_inside(phase, inputs_of(phase.d_step), regularizer)
            elif isinstance(phase, phases.Judges):
                yield self._judge(phase, own_inputs, update, reals_of_g)
            elif isinstance(phase, phases.Weighs):
                assert weight is not None, "G weighs for a weight"
                yield dataclasses.replace(own, phase=phase, weigh=weight.weigh, outputs={})
            elif isinstance(phase, phases.PullsBack):
                # With the graphs of G's forward passes, or the inputs to repeat them.
                graphs = own.graphs if phase.graphs_from is not None else {}
                yield dataclasses.replace(own, phase=phase, rates=scheduled.generator, outputs={}, graphs=graphs)
            elif isinstance(phase, phases.Learns):
                yield self._learn(phase, inputs_of(phase.d_step), update, reals, objectives, scheduled)
            elif isinstance(phase, phases.Keeps):
                yield self._keep(phase)

    def _learn_without_discriminator(self, update: int, scheduled: Scheduled) -> Work:
        (phase,) = self._phases()
        reals: Reals = functools.cache(self._sources.reals.next_phase)
        inputs = self._inputs("generator", (update,), reals)
        of_terms = OutputLoss(due(self._terms, "generator", update), self._plan.recipe, self._statistics)

        def loss(*made: Any) -> Tensor:
            total = of_terms(*made)
            self._statistics.add(_TOTAL, total, len(made[0]))
            return total

        return Work(
            phase,
            lambda j, images: inputs.generator(j),
            of_outputs=loss,
            targets=lambda j: self._sources.inputs.real(reals()[j])[:1],
            rates=scheduled.generator,
        )

    def _adaptive_weight(self, factor: float) -> AdaptiveWeight | None:
        section = self._section.adversarial.adaptive
        if section is None:
            return None
        num = self._plan.recipe.accumulation_of("generator") * self._plan.placement("generator").num_replicas
        return AdaptiveWeight(section, factor, num, self.generator.sum_over_replicas, self._statistics)

    def _inputs(self, stream: str, counters: tuple[int, ...], reals: Reals) -> Inputs:
        return self._sources.inputs.inputs(stream, counters, self._sources.slices[stream], reals)

    def _make_images(self, phase: Phase, inputs: Inputs, regularizer: InnerTerm | None = None) -> Work:
        ahead = 0 if regularizer is None else regularizer.ahead
        return Work(phase, lambda j, images: inputs.generator(j), regularizer=regularizer, ahead=ahead)

    def _differentiate_inside(self, phase: Phase, inputs: Inputs, regularizer: InnerTerm) -> Work:
        def gradient(j: int, styles: Tensor, grads: Tensor) -> Tensor:
            return regularizer.direction(grads)

        part = functools.cache(lambda j: regularizer.taking_part(inputs.generator(j)))
        return Work(phase, lambda j, images: part(j), regularizer.probe, gradient=gradient, ahead=regularizer.ahead)

    def _batch(
        self, objective: DiscriminatorObjective, inputs: Inputs, counters: tuple[int, int], reals: Reals, of_reals: bool
    ) -> GetInputs:
        """Build the function that returns D's inputs where it trains, or the part of them that has real images."""
        part = self._sources.slices["discriminator"]["discriminator"]

        def batch(j: int, images: Tensor | None) -> MicroBatch:
            samples, draws = part.positions(j), self._sources.draws
            real = (*self._sources.inputs.real(reals()[j]), *self._seeds("discriminator/real", counters, samples))
            if of_reals:
                return objective.reals(real)
            assert images is not None, "D trains on G's images"
            if self._sources.pool is not None:
                images = self._sources.pool.shown(counters, j, images)
            fake = (images, *inputs.conditions(j), *self._seeds("discriminator/fake", counters, samples))
            return objective.batch(real, fake, objective.noise(draws, counters, samples, real[0], images))

        return batch

    def _targets(self, counters: tuple[int, int], reals: Reals) -> Callable[[int], MicroBatch]:
        """Build the function that returns a teacher's features, if there is one, of the real images that D sees."""
        part = self._sources.slices["discriminator"]["discriminator"]
        targets = targets_of(self._terms)
        if targets is None:
            return lambda j: ()
        return lambda j: targets(reals()[j], *self._seeds("discriminator/real", counters, part.positions(j)))

    def _learn(
        self,
        phase: phases.Learns,
        inputs: Inputs,
        update: int,
        reals: Sequence[Reals],
        objectives: Sequence[DiscriminatorObjective],
        scheduled: Scheduled,
    ) -> Work:
        """Build a phase of one of D's steps."""
        d_step = phase.d_step
        objective, of_reals = objectives[d_step], phase.segments == 1  # as only where D differentiates
        batch = self._batch(objective, inputs, (update, d_step), reals[d_step], of_reals)
        if phase.images_from is None and not of_reals:
            batch = self._with_stale(batch, d_step)
        if isinstance(phase, phases.Trains):
            targets = self._targets((update, d_step), reals[d_step])
            return Work(phase, batch, objective, rates=scheduled.discriminator, targets=targets)
        build = self._check if isinstance(phase, phases.Checks) else self._differentiate
        return build(phase, batch, objective)

    def _with_stale(self, batch: GetInputs, d_step: int) -> GetInputs:
        stale = self._sources.stale_images
        assert stale is not None, "images are kept where updates overlap"
        return lambda j, images: batch(j, stale.get(d_step, j))

    def _keep(self, phase: phases.Keeps) -> Work:
        """Keep images for a step of D in the next update."""
        stale, d_step = self._sources.stale_images, phase.d_step
        assert stale is not None, "images are kept where updates overlap"

        def keep(j: int, images: Tensor | None) -> MicroBatch:
            assert images is not None, "G's images are kept"
            stale.keep(d_step - self._section.d_steps, j, images)
            return ()

        return Work(phase, keep)

    def _check(self, phase: Phase, batch: GetInputs, objective: DiscriminatorObjective) -> Work:
        loss = InputGradients(objective.num_segments, objective.note_slopes, objective.judged)

        def note(j: int, images: Tensor, grads: Tensor) -> Tensor:
            objective.note_gradients(images, grads / loss.scale)
            return grads  # nothing reads them

        return Work(phase, batch, loss, gradient=note)

    def _differentiate(self, phase: Phase, batch: GetInputs, objective: DiscriminatorObjective) -> Work:
        loss = InputGradients(objective.num_differentiated, judged=objective.judged)
        return Work(
            phase,
            lambda j, images: objective.differentiated(batch(j, images)),
            loss,
            gradient=lambda j, images, grads: objective.slopes(grads / loss.scale),
        )

    def _judge(self, phase: Phase, inputs: Inputs, update: int, reals: Reals) -> Work:
        part = self._sources.slices["generator"]["discriminator"]
        objective = GeneratorObjective(self._terms, self._statistics, update, self._section.pairs)
        terms, num = [t for t in due(self._terms, "generator", update) if t.of_images], part.num_samples
        weighs = self._section.adversarial.weighs
        names = {name for term in terms for name in term.reads}
        reads_reals = not {"real_images", "input_images"}.isdisjoint(names)

        def batch(j: int, images: Tensor | None) -> MicroBatch:
            assert images is not None, "D judges G's images"
            samples, real = part.positions(j), None
            if objective.pairs:
                real = (*self._sources.inputs.real(reals()[j]), *self._seeds("generator/real", (update,), samples))
            fake = (images, *inputs.conditions(j), *self._seeds("generator/fake", (update,), samples))
            return objective.batch(real, fake)

        def gradient(j: int, images: Tensor, grads: Tensor) -> Tensor:
            own = grads[-num:]
            if not terms:
                return torch.cat([own, torch.zeros_like(own)], dim=1) if weighs else own
            real = self._sources.inputs.real(reals()[j])[0] if reads_reals else None
            latents = inputs.latents(j) if inputs.latents is not None and "latents" in names else None
            read = images_read(images[-num:], inputs.conditions(j), real, latents)
            of_images = image_gradient(terms, read, self._statistics)
            return torch.cat([own, of_images], dim=1) if weighs else own + of_images

        return Work(phase, batch, objective, gradient=gradient)

    def _seeds(self, stream: str, counters: tuple[int, ...], samples: range) -> MicroBatch:
        """Return the seeds of D's augmentations and noise; empty if D has neither."""
        if not self._plan.recipe.discriminator_reads_seeds:
            return ()
        return (self._sources.draws.seeds(f"augment/{stream}", counters, samples),)

    def _generator_updated(self) -> None:
        if self.discriminator is not None:
            self.discriminator.observe_seam(self.generator.outcomes.last)
        self._record("generator", self.generator)

    def _record(self, name: str, engine: Engine) -> None:
        if engine.outcomes.last is False or engine.grad_norm is None:  # not finite, or known to other ranks only
            return
        if isinstance(engine.grad_norm, Tensor):
            self._statistics.add(f"grad_norm/{name}", engine.grad_norm, self._images(name))
        else:
            self._statistics.add_host(f"grad_norm/{name}", engine.grad_norm, self._images(name))

    def _images(self, network: str) -> int:
        """Return how many images of an update a rank of a network has."""
        return self._plan.recipe.batch // self._plan.placement(network).num_replicas
