"""Makes the engines of networks in stages: division into stages, this rank's layers, DeepSpeed, channels."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import deepspeed
import torch

from bigsgan import comm
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines import zero_private
from bigsgan.engines.deepspeed_config import size_buckets
from bigsgan.engines.optimizer import build_optimizer
from bigsgan.engines.pipeline.engine import PipelineEngine
from bigsgan.engines.pipeline.partition import Boundaries, divide
from bigsgan.engines.pipeline.program import Program
from bigsgan.engines.pipeline.schedule import Cost
from bigsgan.engines.pipeline.transport import open_channels
from bigsgan.engines.sequences import MicroBatch
from bigsgan.errors import UserError
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.layers import BatchStatistics
from bigsgan.models.network import LayerStack, initialize

_log = logging.getLogger(__name__)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EQUAL = Cost(1.0, 2.0)
"""Of a stage that was not measured: a backward pass costs about two forward passes."""


class PipelineBuilder:
    """Builds the pipelines of a run; two that meet on the same ranks share a program, so that their phases overlap."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        generator, discriminator = (plan.placement(network) for network in NETWORKS)
        self._meet = generator.output_ranks() == discriminator.input_ranks()
        self._programs: dict[str, Program] = {}

    def build(self, network: str, config: dict[str, Any], division: list[int] | None) -> PipelineEngine:
        """Build ``generator`` or ``discriminator``. Every rank calls this.

        Args:
            network: Which.
            config: DeepSpeed's.
            division: Of the layers into stages, as a checkpoint has it; None to make one.

        Raises:
            UserError: There are fewer layers than stages.
        """
        plan, rank, device = self._plan, comm.rank(), comm.device()
        recipe, placement, file = plan.recipe, plan.placement(network), plan.deepspeed_files[network]
        stage = placement.stage(rank)
        with torch.device("meta"):
            whole = build_network(recipe, network)
        bounds = division or self._divide(network, whole)
        boundaries = Boundaries(whole, bounds, _DTYPES[file.precision], partial(self._inputs, network))
        with torch.device("meta"):
            part = build_network(recipe, network).part(bounds[stage], bounds[stage + 1])
        part = part.to_empty(device="cpu")
        initialize(part, initial_seed(recipe, network))
        part = part.to(device)
        optimizer = build_optimizer(getattr(recipe.optimizer, network), part, file)
        size_buckets(config, sum(parameter.numel() for parameter in part.parameters()))
        clip_norm = config["gradient_clipping"]
        if file.stage == 0 and file.precision == "fp32":
            config = {**config, "gradient_clipping": 0.0}  # each stage would clip by a norm of its own
        module = zero_private.pipeline_module(part, placement, rank)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        if placement.num_replicas > 1:
            average = partial(comm.mean_over_ranks, group=zero_private.replica_group(engine))
            for layer in part.modules():
                if isinstance(layer, BatchStatistics):
                    layer.average_over_ranks, layer.num_ranks = average, placement.num_replicas
        return PipelineEngine(
            engine,
            part,
            network,
            placement,
            rank,
            boundaries,
            open_channels(placement, rank, device),
            self._program(network),
            recomputes=recipe.pipeline.generator_phase == "recompute",
            clip_norm=clip_norm,
        )

    def _program(self, network: str) -> Program:
        placement = self._plan.placement(network)
        costs = [_EQUAL] * placement.num_stages
        for other, program in self._programs.items():
            if self._meet:
                program.costs[network] = costs
                return self._programs.setdefault(network, self._programs[other])
        first_stage_device = placement._replace(reversed=False).stage(comm.rank())
        joint = self._plan.recipe.pipeline.schedule == "joint"
        self._programs[network] = Program(first_stage_device, placement.num_stages, {network: costs}, joint)
        return self._programs[network]

    def _divide(self, network: str, whole: LayerStack) -> list[int]:
        stages = self._plan.placement(network).num_stages
        layers = list(whole.layers.values())
        field = f"engines.{network}.pipeline_stages"
        if stages > len(layers):
            problem = f"is more than the {network} has layers ({len(layers)}), which would leave a stage without any"
            raise UserError(field, stages, problem, f"set {field} to {len(layers)} or less")
        partition = self._plan.recipe.engine(network).partition
        if partition == "uniform":
            return divide([1.0] * len(layers), stages)
        return divide([float(sum(p.numel() for p in layer.parameters())) for layer in layers], stages)

    def _inputs(self, network: str, num_samples: int) -> MicroBatch:
        """Inputs of a number of samples without data."""
        recipe = self._plan.recipe
        data = recipe.data
        labels = torch.empty(num_samples, dtype=torch.int64, device="meta")
        if network == "generator":
            return torch.empty(num_samples, recipe.generator.latent_size, device="meta"), labels
        return torch.empty(num_samples, data.image_channels, data.resolution, data.resolution, device="meta"), labels
