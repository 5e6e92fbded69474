"""What the terms of a codebook hold beside the passes, on the meta device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bigsgan.adversarial.terms import Termed, codebook_terms
from bigsgan.config import RunPlan
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.monitor import Statistics
from bigsgan.planner.census import Census

_META = torch.device("meta")


class Codes(NamedTuple):
    """Bytes of the terms of a codebook."""

    held: int = 0  # between updates
    # most beside them at the end of the first update, with the latents that it kept, and at the end of another
    first: int = 0
    later: int = 0


def trace_codes(plan: RunPlan, makes_latents: bool) -> Codes:
    """Trace the ends of the first two updates on a rank that computes the latents of its samples, or none."""
    recipe, section = plan.recipe, plan.recipe.objective.codebook
    generator = recipe.generator
    if section is None or not isinstance(generator, AutoencoderGenerator):
        return Codes()
    engine, pixels = plan.engines["generator"], recipe.data.network_size.num_pixels // generator.factor**2
    num, width = engine.micro_batch_size, generator.latent_channels
    seeds, census, ends = torch.empty(num, dtype=torch.int64, device=_META), Census(), []
    rank = Termed(Statistics(_META), _META, lambda tensor: tensor, place=(0, plan.world_size))
    census.ignore([seeds])
    with census:
        terms = codebook_terms(recipe, section, rank)
        held = census.held
        for update in range(2):
            for _ in range(recipe.accumulation_of("generator") if makes_latents else 0):
                read = {"encoded": torch.empty(num, pixels, width, device=_META), "seeds": seeds}
                for term in terms:
                    if term.name == "kmeans" and term.is_due(update):
                        term.loss(read, rank.statistics)
                del read
            census.take()
            for term in terms:
                term.finish_update(update, True)
            ends.append(census.take().peak - held)
    return Codes(held, *ends)
