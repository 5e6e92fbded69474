"""Builds a network's optimizer and DeepSpeed engine, with bucket sizes that fit the layers on this rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from bigsgan.config import RunPlan
from bigsgan.engines.deepspeed.averaged_gradients import AveragedGradients
from bigsgan.engines.deepspeed.collectives import align_parts, install_reducers
from bigsgan.engines.deepspeed.reports import keep_log, profile_into
from bigsgan.engines.deepspeed.scalars import broadcasting_scalars
from bigsgan.engines.deepspeed_config import size_buckets, stage_0_at_a_time
from bigsgan.engines.optimizer import build_optimizer
from bigsgan.engines.parameter_groups import whole_shape
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm


def initialize_engine(
    plan: RunPlan, network: str, layers: LayerStack, module: nn.Module, config: dict[str, Any]
) -> tuple[DeepSpeedEngine, AveragedGradients | None]:
    """Make the optimizer and the engine. Every rank calls this.

    DeepSpeed runs ``module``, which stands around this rank's ``layers``. ``config`` gets the sizes that it leaves
    open.

    Returns:
        The engine, and its averaged gradients, which must be waited for before they are used; None if no wait is due.
    """
    own, trained = plan.engines[network], layers
    if not any(True for _ in layers.parameters()):  # a stage of frozen layers
        trained = module.placeholder = LayerStack([_Placeholder()]).to(comm.device())
    numel = sum(whole_shape(parameter).numel() for parameter in layers.parameters())
    size_buckets(config, plan, network, numel)
    at_once = stage_0_at_a_time(plan, network, numel)
    # ZeRO 1 and 2 reduce and update groups of at most so many elements.
    at_a_time = int(config["zero_optimization"]["reduce_bucket_size"]) if own.reduces_by_group else None
    if own.optimizer.kind == "muon" and own.file.stage == 0 and not own.is_stock:
        at_a_time = at_once.updated  # results travel group by group
    optimizer = build_optimizer(own.optimizer, trained, own.file, at_a_time)
    align_parts(not own.is_stock)
    keep_log()
    # Below float32 at ZeRO 0 DeepSpeed would make a step here, of gradients that are 0 (fp16/unfused_optimizer.py): it
    # would be counted, and weights would decay.
    vars(optimizer)["step"] = _keep_still
    with broadcasting_scalars():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    del vars(optimizer)["step"]
    profile_into(engine, network, Path(plan.recipe.out), bool(config.get("wall_clock_breakdown")))
    if own.is_stock:
        return engine, None
    return engine, install_reducers(engine, own, at_once)


class _Placeholder(nn.Module):
    """A parameter whose gradient is 0: optimizers and engines need one."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(1))


def _keep_still(closure: Any = None) -> None:
    pass
