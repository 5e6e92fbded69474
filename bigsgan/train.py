"""Composition root of a training run: plan -> engines -> step -> loop."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigsgan import checkpoint, comm, memory
from bigsgan.adversarial import AdversarialStep, InputSource, LatentSource, PairSource, SampleDraws, Slice
from bigsgan.adversarial.extras import build_extras
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.config.run_directory import RECIPE_FILE, compare_recipes, read_saved_recipe, write_recipe
from bigsgan.data import RealImages, build_dataset, readable_images
from bigsgan.data.datasets import ImageDataset
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch, OnDemand
from bigsgan.engines.build import build_engines
from bigsgan.engines.hand_over import build_hand_over
from bigsgan.errors import EXIT_BAD_INPUT, UserError, wait_to_be_ended
from bigsgan.initial_weights import InitialWeights, freeze_first_layers, load_initial_weights
from bigsgan.monitor import RankLog, Reporter, Statistics, open_rank_log
from bigsgan.training.ema import ShardedAverage
from bigsgan.training.loop import Run, training_loop
from bigsgan.training.sampling import STANDING_BATCHES, SampleGrid, has_standing_statistics, latent_grid, pair_grid
from bigsgan.training.state import AverageState, Counters, EngineState

NUM_SHOWN, REAL_COLUMNS, NUM_PAIRS = 100, 10, 18

_log = logging.getLogger(__name__)


def main(plan: RunPlan) -> int:
    """Train, and return the process's exit status: 0, or 2 after the message of a UserError.

    Every rank calls this. One rank prints; the others wait to be ended by the launcher, which ends all ranks as soon as
    one exits.
    """
    try:
        with memory.naming_remedy(*_memory_remedy(plan)):
            comm.initialize()
            _run(plan)
    except UserError as error:
        return _end(error)
    except RuntimeError as error:
        if not comm.another_rank_spoke():
            raise
        _log.info("stopped after another rank", exc_info=error)  # its connection broke
        wait_to_be_ended()
        return EXIT_BAD_INPUT
    comm.leave()
    return 0


def _run(plan: RunPlan) -> None:
    recipe, rank = plan.recipe, comm.rank()
    out = Path(recipe.out)
    rank_log = open_rank_log(out / "logs", rank, lambda text: print(text, file=sys.stderr))
    start = comm.from_rank_zero(_prepare(recipe, out) if rank == 0 else None)
    if isinstance(start, UserError):
        raise start
    found = start.found
    if found is not None and found.nimg >= recipe.total_nimg:
        if rank == 0:
            print(f"{out} is complete at {found.nimg} images; raise total_nimg to go on")
        return
    rank_log.phase = "build"
    _log.info("%d ranks on %s; recipe:\n%s", comm.world_size(), comm.device(), recipe.to_yaml())
    run = build_run(plan, out, start, rank_log)
    if rank == 0:  # not before the recipe has proved to fit the data and the checkpoint
        write_recipe(recipe, out, plan.deepspeed_files)
    rank_log.write = run.reporter.message
    try:
        training_loop(run)
    finally:
        run.reals.close()
        run.source.close()
        run.reporter.close()
    run.reporter.message(_closing_lines(out, run.counters.nimg))


class Start(NamedTuple):
    """What a run begins from; with neither, at the beginning.

    Attributes:
        found: Its own checkpoint, to go on from.
        initial: Weights of another run, or imported ones.
    """

    found: checkpoint.Checkpoint | None = None
    initial: InitialWeights | None = None


def _prepare(recipe: Recipe, out: Path) -> Start | UserError:
    """Find what to begin from; return what is wrong instead of raising, because only rank 0 is here."""
    try:
        found = checkpoint.newest(out / "checkpoints")
        if found is not None and checkpoint.is_imported(found):
            return Start(initial=InitialWeights(read_saved_recipe(out), found, live=False))
        if found is not None or os.path.lexists(out / RECIPE_FILE):
            saved = read_saved_recipe(out)  # and not somebody else's file of that name, which would be overwritten
            if found is not None:
                compare_recipes(saved, recipe)
        if found is None and (init := recipe.init_from):
            other = read_saved_recipe(Path(init.run))
            initial = InitialWeights(other, checkpoint.find(Path(init.run), init.nimg), init.weights == "live")
            return Start(initial=initial)
    except UserError as error:
        return error
    return Start(found)


def build_run(plan: RunPlan, out: Path, start: Start, rank_log: RankLog) -> Run:
    """Put a run together, and restore what it begins from. Every rank calls this.

    Raises:
        UserError: The data, the checkpoint or this machine do not fit the plan.
    """
    found, initial = start
    recipe, device, rank = plan.recipe, comm.device(), comm.rank()
    dataset = build_dataset(recipe.data)
    layout = _layout(plan)
    divisions = {} if found is None else checkpoint.saved_divisions(found, layout)
    engines = build_engines(plan, divisions)
    if initial is not None:
        load_initial_weights(recipe, initial, engines)
    if recipe.init_from:
        freeze_first_layers(recipe, engines["discriminator"], recipe.init_from.freeze_discriminator)
    layout.update({f"{network}.division": engine.division for network, engine in engines.items()})
    average = ShardedAverage(engines["generator"])
    counters = Counters()
    entries: dict[str, checkpoint.StateEntry] = {
        "generator": EngineState(engines["generator"]),
        "discriminator": EngineState(engines["discriminator"]),
        "average": AverageState(engines["generator"], average),
        "counters": counters,
    }
    statistics = Statistics(device)
    extras = build_extras(recipe, engines["discriminator"].network, statistics, device, comm.sum_over_ranks)
    entries.update(extras.entries())
    if found is not None:
        checkpoint.load(found, entries, layout, comm)
    slices = _slices(plan, rank)
    draws = Draws(recipe.seed)
    reals = _build_reals(plan, "discriminator", slices["discriminator"], dataset, draws, counters.update)
    sample_draws = SampleDraws(draws, device)
    source, standing = _build_source(plan, slices, sample_draws, dataset, counters.update)
    image_shape = (recipe.data.image_channels, recipe.data.resolution, recipe.data.resolution)
    hand_over = build_hand_over(plan, image_shape)
    step = AdversarialStep(
        engines["generator"],
        engines["discriminator"],
        hand_over,
        recipe.objective,
        reals,
        source,
        sample_draws,
        slices,
        image_shape,
        statistics,
        extras,
    )
    reporter = Reporter(out, rank, recipe.total_nimg, counters.nimg)
    if found is not None:
        reporter.message(f"going on from {found.path} ({counters.nimg} images)")
    if initial is not None:
        reporter.message(f"beginning with the weights of {initial.checkpoint.path}")
    grid = _build_grid(recipe, dataset, reporter, counters.nimg)
    return Run(
        recipe=recipe,
        out=out,
        reals=reals,
        source=source,
        step=step,
        average=average,
        grid=grid,
        sampling_batch=slices["generator"]["generator"].num_samples,
        standing=standing,
        counters=counters,
        entries=entries,
        layout=layout,
        statistics=statistics,
        reporter=reporter,
        rank_log=rank_log,
    )


def _build_grid(recipe: Recipe, dataset: ImageDataset, reporter: Reporter, nimg: int) -> SampleGrid:
    """What sample grids show; a grid of real images is shown at once, unless they stand beside the samples."""
    num = NUM_PAIRS if recipe.data.paired else NUM_SHOWN
    images = readable_images(dataset, num) if comm.rank() == 0 else torch.empty(0)
    if recipe.data.paired:  # one rank reads, as all have to show the same
        images = comm.from_rank_zero(images)
        if not len(images):
            raise UserError("data.root", recipe.data.root, "holds no pair that can be read", "repair its images")
        return pair_grid(recipe, images, comm.device())
    if len(images):
        reporter.images("samples/real", images, REAL_COLUMNS, nimg)
    return latent_grid(recipe, comm.device())


def _slices(plan: RunPlan, rank: int) -> dict[str, dict[str, Slice]]:
    """What each network computes on this rank in the phase of each: ``slices[phase][network]``."""
    places = {network: plan.placement(network) for network in NETWORKS}
    batch, accumulation = plan.recipe.batch, plan.recipe.accumulation_of
    return {
        phase: {n: Slice(batch, accumulation(phase), p.replica(rank), p.num_replicas) for n, p in places.items()}
        for phase in NETWORKS
    }


def _build_reals(
    plan: RunPlan, network: str, slices: dict[str, Slice], dataset: ImageDataset, draws: Draws, update: int
) -> RealImages:
    """Begin to read the data of a network's slice, on the ranks that its first stage lies on."""
    recipe, part = plan.recipe, slices[network]
    return RealImages(
        dataset,
        recipe.data,
        draws,
        batch=recipe.batch,
        accumulation=part.accumulation,
        rank=part.replica,
        world_size=part.num_replicas,
        device=comm.device(),
        first_phase=update * recipe.objective.d_steps,
        reads=plan.placement(network).stage(comm.rank()) == 0,
    )


def _build_source(
    plan: RunPlan, slices: dict[str, dict[str, Slice]], draws: SampleDraws, dataset: ImageDataset, update: int
) -> tuple[InputSource, Sequence[MicroBatch]]:
    """Where the generator's inputs come from, and some of them for standing statistics."""
    recipe, d_phase, g_phase = plan.recipe, slices["discriminator"], slices["generator"]
    if not recipe.data.paired:
        latents = LatentSource(draws, recipe.latent_size, recipe.data.num_classes, recipe.generator.draws)
        part, num = g_phase["generator"], STANDING_BATCHES if has_standing_statistics(recipe) else 0
        return latents, OnDemand(num, lambda i: latents.phase("standing", (i,), part)[0])
    places = [plan.placement(network) for network in NETWORKS]
    together = places[0].input_ranks() == places[1].input_ranks()
    own = None
    if not together:  # other pairs than those that D reads on this rank
        own = _build_reals(plan, "generator", d_phase, dataset, Draws(recipe.seed), update)
    return PairSource(draws, recipe.data.input_channels, own), []


def _layout(plan: RunPlan) -> dict[str, Any]:
    """What a run that goes on from a checkpoint has to share with the one that saved it."""
    layout: dict[str, Any] = {"world_size": plan.world_size}
    for network, file in plan.deepspeed_files.items():
        layout[f"{network}.stage"] = file.stage
        layout[f"{network}.precision"] = file.precision
        layout[f"{network}.pipeline_stages"] = plan.placement(network).num_stages
    return layout


def _closing_lines(out: Path, nimg: int) -> str:
    return "\n".join(
        [
            f"done: {nimg} images",
            f"  samples      {out / 'samples'}",
            f"  checkpoint   {out / 'checkpoints' / f'{nimg:012d}'}",
            f"  TensorBoard  {out / 'tensorboard'}",
            f"look at it:    tensorboard --logdir {out.parent}",
            f"go on:         deepspeed launch/train.py --config {out / RECIPE_FILE} total_nimg={2 * nimg}",
        ]
    )


def _end(error: UserError) -> int:
    # INFO, for the log file alone: as an error it would be printed twice.
    _log.info("stopped: %s", error, exc_info=error)
    if comm.claim_speech():
        print(f"bigsgan: {error}", file=sys.stderr, flush=True)
    else:
        wait_to_be_ended()
    return EXIT_BAD_INPUT


def _memory_remedy(plan: RunPlan) -> tuple[str, str]:
    """Say where memory ran out, and what to do about it."""
    sizes = ", ".join(f"{plan.micro_batch_size(n)} ({n})" for n in NETWORKS)
    staged = any(plan.placement(network).num_stages > 1 for network in NETWORKS)
    keeps = staged and plan.recipe.pipeline.generator_phase == "keep"
    return (
        f"on rank {comm.rank()} with {sizes} images a micro-batch",
        ("set pipeline.generator_phase=recompute; or set " if keeps else "set ")
        + " and ".join(f"engines.{n}.activation_checkpointing=true" for n in NETWORKS)
        + f"; or start a new `out` with more micro-batches (accumulation={2 * plan.recipe.accumulation}) or "
        + ("more pipeline stages" if staged else "a higher ZeRO stage (ds_configs/zero3.json)"),
    )
