"""Composition root of a training run: plan -> engines -> step -> loop."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bigsgan import checkpoint, comm, memory
from bigsgan.adversarial import AdversarialStep, LatentSource, Slice
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.config.run_directory import RECIPE_FILE, compare_recipes, read_saved_recipe, write_recipe
from bigsgan.data import RealImages, build_dataset
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.images import CorruptImage
from bigsgan.draws import Draws
from bigsgan.engines.build import build_engines
from bigsgan.engines.hand_over import build_hand_over
from bigsgan.errors import EXIT_BAD_INPUT, UserError, wait_to_be_ended
from bigsgan.monitor import RankLog, Reporter, Statistics, open_rank_log
from bigsgan.training.ema import ShardedAverage
from bigsgan.training.loop import Run, training_loop
from bigsgan.training.state import AverageState, Counters, EngineState

REAL_GRID, REAL_COLUMNS = 100, 10

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
    found = comm.from_rank_zero(_prepare(recipe, out) if rank == 0 else None)
    if isinstance(found, UserError):
        raise found
    if found is not None and found.nimg >= recipe.total_nimg:
        if rank == 0:
            print(f"{out} is complete at {found.nimg} images; raise total_nimg to go on")
        return
    rank_log.phase = "build"
    _log.info("%d ranks on %s; recipe:\n%s", comm.world_size(), comm.device(), recipe.to_yaml())
    run = build_run(plan, out, found, rank_log)
    if rank == 0:  # not before the recipe has proved to fit the data and the checkpoint
        write_recipe(recipe, out, plan.deepspeed_files)
    rank_log.write = run.reporter.message
    try:
        training_loop(run)
    finally:
        run.reals.close()
        run.reporter.close()
    run.reporter.message(_closing_lines(out, run.counters.nimg))


def _prepare(recipe: Recipe, out: Path) -> checkpoint.Checkpoint | UserError | None:
    """Find what to resume from; return what is wrong instead of raising, because only rank 0 is here."""
    try:
        found = checkpoint.newest(out / "checkpoints")
        if found is not None or os.path.lexists(out / RECIPE_FILE):
            saved = read_saved_recipe(out)  # and not somebody else's file of that name, which would be overwritten
            if found is not None:
                compare_recipes(saved, recipe)
    except UserError as error:
        return error
    return found


def build_run(plan: RunPlan, out: Path, found: checkpoint.Checkpoint | None, rank_log: RankLog) -> Run:
    """Put a run together, and restore ``found`` if there is something to go on from. Every rank calls this.

    Raises:
        UserError: The data, the checkpoint or this machine do not fit the plan.
    """
    recipe, device, rank = plan.recipe, comm.device(), comm.rank()
    dataset = build_dataset(recipe.data)
    layout = _layout(plan)
    divisions = {} if found is None else checkpoint.saved_divisions(found, layout)
    engines = build_engines(plan, divisions)
    layout.update({f"{network}.division": engine.division for network, engine in engines.items()})
    average = ShardedAverage(engines["generator"])
    counters = Counters()
    entries: dict[str, checkpoint.StateEntry] = {
        "generator": EngineState(engines["generator"]),
        "discriminator": EngineState(engines["discriminator"]),
        "average": AverageState(engines["generator"], average),
        "counters": counters,
    }
    if found is not None:
        checkpoint.load(found, entries, layout, comm)
    slices = _slices(plan, rank)
    draws, statistics = Draws(recipe.seed), Statistics(device)
    reals = _build_reals(plan, slices["discriminator"]["discriminator"], dataset, draws, counters.update)
    image_shape = (recipe.data.image_channels, recipe.data.resolution, recipe.data.resolution)
    hand_over = build_hand_over(plan, image_shape)
    latents = LatentSource(draws, recipe.generator.latent_size, recipe.data.num_classes, device)
    step = AdversarialStep(
        engines["generator"],
        engines["discriminator"],
        hand_over,
        recipe.objective,
        reals,
        latents,
        slices,
        image_shape,
        statistics,
    )
    reporter = Reporter(out, rank, recipe.total_nimg, counters.nimg)
    if found is not None:
        reporter.message(f"going on from {found.path} ({counters.nimg} images)")
    if rank == 0 and (real := readable_images(dataset, REAL_GRID)):
        reporter.images("samples/real", torch.stack(real).float() / 127.5 - 1, REAL_COLUMNS, counters.nimg)
    return Run(
        recipe=recipe,
        out=out,
        reals=reals,
        step=step,
        average=average,
        latents=latents,
        sampling_slice=slices["generator"]["generator"],
        counters=counters,
        entries=entries,
        layout=layout,
        statistics=statistics,
        reporter=reporter,
        rank_log=rank_log,
    )


def _slices(plan: RunPlan, rank: int) -> dict[str, dict[str, Slice]]:
    """What each network computes on this rank in the phase of each: ``slices[phase][network]``."""
    places = {network: plan.placement(network) for network in NETWORKS}
    batch, accumulation = plan.recipe.batch, plan.recipe.accumulation_of
    return {
        phase: {n: Slice(batch, accumulation(phase), p.replica(rank), p.num_replicas) for n, p in places.items()}
        for phase in NETWORKS
    }


def _build_reals(plan: RunPlan, part: Slice, dataset: ImageDataset, draws: Draws, update: int) -> RealImages:
    """Begin to read real images, on the ranks that the discriminator's first stage lies on."""
    recipe = plan.recipe
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
        reads=plan.placement("discriminator").stage(comm.rank()) == 0,
    )


def _layout(plan: RunPlan) -> dict[str, Any]:
    """What a run that goes on from a checkpoint has to share with the one that saved it."""
    layout: dict[str, Any] = {"world_size": plan.world_size}
    for network, file in plan.deepspeed_files.items():
        layout[f"{network}.stage"] = file.stage
        layout[f"{network}.precision"] = file.precision
        layout[f"{network}.pipeline_stages"] = plan.placement(network).num_stages
    return layout


def readable_images(dataset: ImageDataset, num: int) -> list[torch.Tensor]:
    """Up to ``num`` images from all over a data set that can be read: uint8 (C, R, R) each."""
    found = []
    num = min(num, len(dataset))
    for index in range(num):
        with suppress(CorruptImage):  # the loader counts and reports it
            found.append(dataset[index * len(dataset) // num][0])
    return found


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
