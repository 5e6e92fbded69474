"""The resolved description of one network's engine, from the recipe, its DeepSpeed file and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.engines import Engine
from bigsgan.config.placement import Placement
from bigsgan.config.sections import Optimizer


@dataclass(frozen=True)
class EnginePlan:
    """The description of a network's engine."""

    network: str  # `generator` or `discriminator`
    section: Engine  # the engine's section of the recipe
    optimizer: Optimizer  # the optimizer's section of the recipe
    file: DeepSpeedFile  # its DeepSpeed file
    placement: Placement  # the ranks of its stages and replicas
    micro_batch_size: int  # images of one micro-batch on one replica
    derived: dict[str, Any]  # DeepSpeed's keys whose values the recipe determines
    is_stock: bool  # whether `engines.stock_deepspeed` keeps DeepSpeed's own reductions, updates and prefetching

    @property
    def reduces_by_group(self) -> bool:
        """Whether ZeRO 1 or 2 reduces gradients group by group (engines/deepspeed/grouped_gradients.py).

        DeepSpeed reduces them in its own way with an optimizer on the host, and if the file asks for that:
        ``reduce_scatter`` false, ``use_multi_rank_bucket_allreduce``, or ``parameter_alignment``. Float32 accumulation
        of bf16 at ZeRO 1 uses another optimizer (bf16_optimizer.py), which has the groups, but reduces in DeepSpeed's
        way.
        """
        zero = self._zero
        return (
            self.file.stage in (1, 2)
            and not self.is_stock
            and self.file.offload_optimizer == "none"
            and zero.get("reduce_scatter", True) is not False
            and "use_multi_rank_bucket_allreduce" not in zero
            and not zero.get("parameter_alignment", False)
        )

    @property
    def averages_by_group(self) -> bool:
        """Whether ZeRO 0 averages gradients over replicas group by group (engines/deepspeed/averaged_gradients.py).

        DeepSpeed averages them in its own way in pipelines, and if the file asks for ``prescale_gradients`` or
        ``gradient_predivide_factor``.
        """
        content = self.file.content
        scales = content.get("prescale_gradients", False) or content.get("gradient_predivide_factor", 1.0) != 1.0
        is_exempt = self.placement.num_replicas == 1 or self.placement.num_stages > 1
        return self.file.stage == 0 and not (is_exempt or scales or self.is_stock)

    @property
    def overlaps(self) -> bool:
        """Whether gradients travel during the backward pass at ZeRO 0 to 2, if bigsgan reduces them."""
        reduces = self.reduces_by_group and self.placement.num_stages == 1
        return (self.averages_by_group or reduces) and self._zero.get("overlap_comm", True) is True

    @property
    def leaves_steps_open(self) -> bool:
        """Whether gradients may still travel after the backward pass, until the network's next task."""
        return self.averages_by_group and self.overlaps

    @property
    def _zero(self) -> dict[str, Any]:
        return self.file.content.get("zero_optimization", {})
