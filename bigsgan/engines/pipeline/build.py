"""Builds the engines of networks in stages: division, this rank's layers, DeepSpeed, channels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from bigsgan.config import RunPlan
from bigsgan.engines.deepspeed import internals
from bigsgan.engines.frozen import hold_frozen, tell_frozen
from bigsgan.engines.initialization import initialize_engine
from bigsgan.engines.pipeline.engine import PipelineEngine
from bigsgan.engines.pipeline.layout import StageDivision, build_on_meta, divide_network, measure_layers, samples_of
from bigsgan.engines.pipeline.transport import open_channels
from bigsgan.engines.replicas import join_replicas
from bigsgan.models.build import initial_seed
from bigsgan.models.initial import with_memory
from bigsgan.models.network import initialize
from bigsgan.monitor import NOTICE
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import by_each

_log = logging.getLogger(__name__)


def build_pipeline(
    plan: RunPlan, network: str, config: dict[str, Any], bounds: Sequence[int] | None
) -> tuple[PipelineEngine, StageDivision]:
    """Build ``generator`` or ``discriminator``, with only this rank's layers. All ranks of the network call this.

    ``config`` is DeepSpeed's configuration; ``bounds`` are those of a checkpoint's stages, or None to divide anew.

    Raises:
        UserError: There are fewer layers than stages.
    """
    rank, device = comm.rank(), comm.device()
    placement = plan.placement(network).local
    measured = comm.from_rank_zero(measure_layers(plan, network, device) if rank == 0 else None)
    division = divide_network(plan, network, measured, None if bounds is None else list(bounds))
    _log.log(NOTICE, "%s", division.table(samples_of(plan, network)))
    stage = placement.stage(rank)
    part = build_on_meta(plan, network).part(division.bounds[stage], division.bounds[stage + 1])
    part = with_memory(part.float(), device)  # DeepSpeed takes masters from float32 values
    by_each(comm, lambda: initialize(part, initial_seed(plan.recipe, network)))  # the others have other layers
    module = internals.pipeline_module(part, placement, rank)
    engine, _ = initialize_engine(plan, network, part, module, config)
    first = placement.rank(stage, 0)
    group, parts = internals.replica_group(engine), plan.statistics_parts(network)
    join_replicas(part, placement.num_replicas, first, group, parts)
    hold_frozen(plan, network, part, placement.replica(rank), partial(comm.gather_parts, group=group), device)
    tell_frozen(plan, network, part)
    channels = open_channels(placement, rank, device)
    compile = plan.engines[network].section.compile
    return PipelineEngine(engine, part, placement, rank, division, channels, compile), division
