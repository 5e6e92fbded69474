"""The baseline: the same training as a plain PyTorch loop, without engines and without the seam.

G's gradient comes from backpropagation through D(G(z)). The loop has the initial weights, images, latents and losses of
a run, so that a difference in time is due to the engines.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigsgan.adversarial import SampleDraws, build_source
from bigsgan.adversarial.latents import Inputs, Reals
from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.adversarial.step import Scheduled, Sources
from bigsgan.adversarial.terms import (
    Own,
    Sum,
    Term,
    Termed,
    build_terms,
    codes_of,
    due,
    images_read,
    inner_term,
    output_loss,
    set_codes,
    targets_of,
)
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.data import RealImages, Slice, build_training_dataset
from bigsgan.data.conditions import conditions_of
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch, Rates
from bigsgan.engines.optimizer import build_torch_optimizer, set_rates
from bigsgan.engines.replicas import join_replicas
from bigsgan.engines.zero import Pass, Root
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.models.precision import avoid_fp16_on_a_cpu
from bigsgan.monitor import Statistics
from bigsgan.runtime import comm
from bigsgan.training.schedules import ema_decay, scheduled


class NetworkAndOptimizer:
    """One network with its optimizer; with ``distributed``, DistributedDataParallel averages its gradients over ranks.

    Attributes:
        root: The network, whose forward pass can end in a loss.
        accumulation: Micro-batches of an update.
    """

    def __init__(
        self,
        root: Root,
        optimizer: torch.optim.Optimizer,
        accumulation: int,
        clip_norm: float | None,
        distributed: bool,
    ) -> None:
        self.root, self.accumulation = root, accumulation
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self._parameters = list(root.parameters())
        scale = torch.tensor(1 / accumulation, device=self._parameters[0].device)  # a number would be copied each time
        for layer in root.network.spectral_layers():
            layer.gradient_scale = scale
        self._ddp = None
        if distributed:
            with warnings.catch_warnings():  # torch 2.15 prefers another name for it, unknown to older versions
                warnings.simplefilter("ignore", FutureWarning)
                self._ddp = DistributedDataParallel(root, broadcast_buffers=False)

    def __call__(self, inputs: MicroBatch, run: Pass) -> tuple[Tensor, ...]:
        """Run a forward pass that ``backward`` may follow; see Root."""
        return (self.root if self._ddp is None else self._ddp)(inputs, run)

    def reducing(self, j: int) -> AbstractContextManager:
        """Context for forward and backward of micro-batch ``j``: only the last one sends gradients."""
        return nullcontext() if self._ddp is None or j == self.accumulation - 1 else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Add gradients, for a mean over the micro-batches."""
        (loss / self.accumulation).backward()

    def update(self, rates: Rates) -> None:
        """Step, and clear the gradients."""
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        set_rates(self._optimizer, rates)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class PlainLoop:
    """Callable that makes one update, as AdversarialStep does on engines.

    Attributes:
        nimg: Images seen.
    """

    def __init__(
        self,
        recipe: Recipe,
        networks: dict[str, NetworkAndOptimizer],
        sources: Sources,
        terms: Sequence[Term],
        termed: Termed,
    ) -> None:
        statistics, sum_over_ranks = termed.statistics, termed.sum_over_ranks
        self.nimg, self._statistics, self._sum_over_ranks = 0, statistics, sum_over_ranks
        self._recipe, self._generator, self._discriminator = recipe, networks["generator"], networks["discriminator"]
        self._reals, self._source, self._draws = sources.reals, sources.inputs, sources.draws
        self._slices, self._terms, self._updates = sources.slices, terms, 0
        self._augmentation, self._targets = termed.augmentation, targets_of(terms)
        # Only for one micro-batch, whatever the engines' layout: DistributedDataParallel alternates forward and
        # backward passes.
        self._keeps_graphs = recipe.accumulation_of("generator") == 1
        self._every = recipe.statistics == "every_pass"
        self._exact_layers = self._discriminator.root.network.exact_layers()
        self._graphs: dict[int, tuple[Tensor, Tensor]] = {}
        self._weights: list[Tensor] = list(self._generator.root.parameters())
        self._ema = [weight.detach().clone() for weight in self._weights]

    @property
    def waited_seconds(self) -> float:
        """Seconds that it has waited for images so far."""
        return self._reals.waited_seconds

    def __call__(self) -> None:
        """Make one update: D's steps, G's step, and the step of the EMA."""
        recipe, update = self._recipe, self._updates
        numbers = scheduled(recipe, self.nimg)
        if self._augmentation is not None and numbers.augmentation is not None:
            self._augmentation.fill_(numbers.augmentation)
        for term in self._terms:
            term.begin_update({**numbers.penalty_weights, "generator": numbers.adversarial})
        for d_step in range(recipe.objective.d_steps):
            reals, counters = functools.cache(self._reals.next_phase), (update, d_step)
            inputs = self._source.inputs("discriminator", counters, self._slices["discriminator"], reals)
            shares = recipe.objective.reuse_fakes and d_step == recipe.objective.d_steps - 1
            fakes = self._fakes([inputs.generator(j) for j in range(self._discriminator.accumulation)], update, shares)
            self._train_discriminator(inputs, fakes, counters, reals, numbers)
        if not recipe.objective.reuse_fakes:
            inputs = self._source.inputs("generator", (update,), self._slices["generator"], reals)
        self._train_generator(inputs, update, reals, numbers)
        for term in self._terms:
            term.finish_update(update, True)
        self._updates += 1
        self.nimg += recipe.batch
        with torch.no_grad():
            torch._foreach_lerp_(self._ema, self._weights, 1 - ema_decay(recipe.ema, recipe.batch, self.nimg))

    def means(self) -> dict[str, float]:
        """Means of losses and other statistics since the last call, over the loop's ranks, which all call this."""
        return self._statistics.reduce(self._sum_over_ranks)

    def idle(self) -> float | None:
        """Return None: the networks take turns."""
        return None

    def close(self) -> None:
        """End the loading processes."""
        self._reals.close()
        self._source.close()

    def _fakes(self, batches: Sequence[MicroBatch], update: int, shares: bool) -> list[Tensor]:
        """Images for D; if G's update shares them, their graphs are kept if possible, and G's state moves here."""
        if shares and self._keeps_graphs:
            self._graphs = {j: self._generate(batch, update, moving=j == 0) for j, batch in enumerate(batches)}
            return [images.detach() for images, _ in self._graphs.values()]
        with torch.no_grad():
            runs = [Pass(self._every or (shares and j == 0)) for j in range(len(batches))]
            return [self._generator.root(batch, run)[0] for batch, run in zip(batches, runs, strict=True)]

    def _generate(self, batch: MicroBatch, update: int, moving: bool) -> tuple[Tensor, Tensor]:
        """Images with their graph, and the terms of G's loss that do not depend on D."""
        term = inner_term(due(self._terms, "generator", update))
        of_outputs = output_loss(self._terms, self._recipe, update, self._statistics)
        images, *own = self._generator(batch, Pass(moving, regularizer=term, of_outputs=of_outputs))
        return images, sum(own, images.new_zeros(()))

    def _train_discriminator(
        self, inputs: Inputs, fakes: Sequence[Tensor], counters: tuple[int, int], reals: Reals, numbers: Scheduled
    ) -> None:
        section, part = self._recipe.objective, self._slices["discriminator"]["discriminator"]
        number = counters[0] * section.d_steps + counters[1]
        num_made = self._recipe.generator.images_per_sample
        objective = DiscriminatorObjective(
            self._terms, self._statistics, number, num_made, numbers.discriminator_learns
        )
        self._choose_kernels(objective.differentiates_inputs)
        for j, fake in enumerate(fakes):
            samples, draws = part.positions(j), self._draws
            real = (*self._source.real(reals()[j]), *self._seeds("discriminator/real", counters, samples))
            noise = objective.noise(draws, counters, samples, real[0], fake)
            judged = (fake, *inputs.conditions(j), *self._seeds("discriminator/fake", counters, samples))
            with self._discriminator.reducing(j):
                batch = objective.batch(real, judged, noise)
                targets = () if self._targets is None else self._targets(reals()[j], *real[2:])
                run = Pass(self._every or j == 0, objective, targets=targets)
                (loss,) = self._discriminator(batch, run)
                self._discriminator.backward(loss)
        self._discriminator.update(numbers.discriminator)

    def _train_generator(self, inputs: Inputs, update: int, reals: Reals, numbers: Scheduled) -> None:
        part, section = self._slices["generator"]["generator"], self._recipe.objective
        objective = GeneratorObjective(self._terms, self._statistics, update, section.pairs)
        of_images = [term for term in due(self._terms, "generator", update) if term.of_images]
        self._discriminator.root.requires_grad_(False)
        self._choose_kernels(exact=False)
        for j in range(part.accumulation):
            samples = part.positions(j)
            with self._generator.reducing(j):
                if j in self._graphs:
                    fakes, loss = self._graphs.pop(j)
                else:
                    moving = self._every or (j == 0 and not section.reuse_fakes)
                    fakes, loss = self._generate(inputs.generator(j), update, moving=moving)
                real = None
                if objective.pairs:
                    real = (*self._source.real(reals()[j]), *self._seeds("generator/real", (update,), samples))
                judged = (fakes, *inputs.conditions(j), *self._seeds("generator/fake", (update,), samples))
                judged = objective.batch(real, judged)
                loss = loss + self._discriminator.root(judged, Pass(self._every, objective))[0]
                latents = inputs.latents(j) if inputs.latents else None
                read = images_read(fakes, inputs.conditions(j), self._source.real(reals()[j])[0], latents)
                loss = loss + sum(term.loss(read, self._statistics) for term in of_images)
                self._generator.backward(loss)
        self._discriminator.root.requires_grad_(True)
        self._generator.update(numbers.generator)

    def _choose_kernels(self, exact: bool) -> None:
        for layer in self._exact_layers:
            layer.exact = exact

    def _seeds(self, stream: str, counters: tuple[int, ...], samples: range) -> Sequence[Tensor]:
        """Seeds for D's augmentations and noise of a micro-batch; empty if D draws nothing."""
        if not self._recipe.discriminator_reads_seeds:
            return []
        return [self._draws.seeds(f"augment/{stream}", counters, samples)]


def build_plain_loop(plan: RunPlan, distributed: bool) -> PlainLoop:
    """Build the loop on this rank alone, or with DistributedDataParallel on all ranks, which then all call this.

    The plan's engines are whole on each rank, in float32.

    Raises:
        UserError: The data does not fit the recipe.
    """
    recipe, device, draws = plan.recipe, comm.device(), Draws(plan.recipe.seed)
    recipe = recipe.model_copy(update={"objective": plan.objective})
    rank, num_ranks = (comm.rank(), comm.world_size()) if distributed else (0, 1)
    trainees = {}
    for network in NETWORKS:
        stack, section = build_network(recipe, network).to(device), getattr(recipe.optimizer, network)
        avoid_fp16_on_a_cpu(stack, device.type == "cuda")
        initialize(stack, initial_seed(recipe, network))
        join_replicas(stack, num_ranks)
        optimizer = build_torch_optimizer(section, stack)
        accumulation = recipe.accumulation_of(network)
        trainees[network] = NetworkAndOptimizer(Root(stack), optimizer, accumulation, section.clip_norm, distributed)
    parts = {n: Slice(recipe.batch, recipe.accumulation_of(n), rank, num_ranks) for n in NETWORKS}
    dataset = build_training_dataset(recipe.data)
    part = parts["discriminator"]
    shows = recipe.objective.teacher is not None
    reals = RealImages(dataset, recipe.data, draws, part, device, shows=shows)
    sample_draws, statistics = SampleDraws(draws, device), Statistics(device)
    conditions = conditions_of(recipe.data, dataset, recipe.objective.fake_labels == "frequencies")
    source = build_source(recipe, sample_draws, conditions)
    total: Sum = comm.sum_over_ranks if distributed else lambda tensor: tensor
    stack = trainees["discriminator"].root.network
    termed = Termed.of(stack, statistics, total)
    if (codes := codes_of(trainees["generator"].root.network)) is not None:
        begin = functools.partial(set_codes, codes)
        termed = termed._replace(codebook=codes, begin_codes=begin, place=(rank, num_ranks))
    slices = {phase: dict.fromkeys(NETWORKS, part) for phase, part in parts.items()}
    sources = Sources(reals, source, sample_draws, slices)
    terms = build_terms(recipe, plan.objective, termed, Own.of(recipe, device))
    return PlainLoop(recipe, trainees, sources, terms, termed)
