"""What a rank reads in each phase: its part of the real images, and the source of the generator's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigsgan.adversarial import Infer, InputSource, LatentSource, SampleDraws, build_source
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.data import RealImages, Slice
from bigsgan.data.conditions import Conditions, conditions_of
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.order import Stretch
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import by_each
from bigsgan.training.sampling import STANDING_BATCHES, has_standing_statistics
from bigsgan.training.state import Counters


def batch_slices(plan: RunPlan, rank: int) -> dict[str, dict[str, Slice]]:
    """Return the part of a batch that each network computes on this rank in each phase: ``slices[phase][network]``."""
    places = {network: plan.placement(network) for network in NETWORKS}
    batch, accumulation = plan.recipe.batch, plan.recipe.accumulation_of
    return {
        phase: {n: Slice(batch, accumulation(phase), p.replica(rank), p.num_replicas) for n, p in places.items()}
        for phase in NETWORKS
    }


def build_reals(
    plan: RunPlan,
    network: str,
    slices: dict[str, Slice],
    dataset: ImageDataset,
    draws: Draws,
    device: torch.device,
    start: tuple[int, Sequence[Stretch]] = (0, ()),
) -> RealImages:
    """Start to read this rank's part of the data, on the ranks of the network's first stage, and who else has to."""
    recipe, place = plan.recipe, plan.placement(network)
    # G's reader shows images too, though nobody looks: both replace a sample whose image is corrupt.
    shows, stages = recipe.objective.teacher is not None, {0}
    if shows and network == "discriminator":  # D's last stage compares features with the teacher's
        stages.add(place.num_stages - 1)
    # G's last stage needs G's inputs, as path length's seeds and terms of its outputs do.
    knows = recipe.objective.path_length or recipe.outputs or not recipe.has_discriminator
    if network == "generator" and knows:
        stages.add(place.num_stages - 1)
    reads = place.stage(comm.rank()) in stages
    return RealImages(dataset, recipe.data, draws, slices[network], device, start=start, reads=reads, shows=shows)


def build_sources(
    plan: RunPlan,
    slices: dict[str, dict[str, Slice]],
    draws: SampleDraws,
    dataset: ImageDataset,
    conditions: Conditions,
    counters: Counters,
    infer: Infer | None,
) -> tuple[InputSource, Sequence[MicroBatch]]:
    """Build the source of the generator's inputs, and draw the inputs for standing statistics.

    These have ``conditions``, which samples have, where fakes have the labels of reals. ``infer`` makes images of G's
    inputs, on ranks that hold a part of G.
    """
    recipe, d_phase, g_phase = plan.recipe, slices["discriminator"], slices["generator"]
    labels = recipe.objective.fake_labels
    has_standing = not recipe.translates and has_standing_statistics(recipe)
    if not recipe.translates and labels != "data" and (has_standing or not recipe.adds_noise):
        conditions = by_each(comm, lambda: conditions_of(recipe.data, dataset, labels == "frequencies"))
    places = [plan.placement(network) for network in NETWORKS]
    own = None
    if recipe.inputs_from_data and recipe.has_discriminator and places[0].input_ranks() != places[1].input_ranks():
        own = build_reals(plan, "generator", d_phase, dataset, Draws(recipe.seed), comm.device(), counters.start)
    source, standing = build_source(recipe, draws, conditions, own, infer), list[MicroBatch]()
    if has_standing:
        latents = LatentSource(draws, recipe.latent_size, conditions, recipe.generator.draws)  # without times
        standing = [latents.phase("standing", (i,), g_phase["generator"])(0) for i in range(STANDING_BATCHES)]
    return source, standing
