"""ZeRO 1 and 2 with an optimizer on the host: one question to the device for the norm of an update's gradients.

As it comes DeepSpeed (0.19.8, zero/stage_1_and_2.py) asks for each gradient of each micro-batch whether it is finite,
while the backward pass goes on, and for the norm of each at the end. The norm of all tells both. The private parts are
those that tests/distributed/test_host_waits.py fails on first if a later version changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bigsgan.engines.grouped_gradients import leave_to_the_norm

_INVALID = -1.0
"""What DeepSpeed takes for a norm that is not finite."""


def ask_once(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the norm tell whether gradients are finite, and ask for it once.

    Each parameter is of one stage and one rank alone, of which DeepSpeed knows others as well.

    Args:
        optimizer: With masters on the host.
    """
    if not optimizer.ignore_unused_parameters:
        return  # where DeepSpeed's own looks for parameters without a gradient
    optimizer.update_offload_overflow_tracker = optimizer.check_overflow = leave_to_the_norm

    def norm(parameters: Sequence[Any]) -> Tensor:
        """Norm of a group's gradients over all ranks, a tensor () on the host; -1 where it is not finite."""
        found = optimizer.norm_for_param_grads  # of the parameters that had a gradient, on this rank's part of it
        norms = [found[number] for p in parameters if (number := optimizer.get_param_id(p)) in found]
        squares = torch.stack(norms).double().square() if norms else torch.zeros(1, dtype=torch.float64)
        total = squares.sum().to(optimizer.bit16_groups_flat[0].device)
        dist.all_reduce(total, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(total, dist.ReduceOp.SUM)  # over the stages of a pipeline
        norm = total.sqrt().float().to(optimizer.device)
        return torch.where(norm.isfinite(), norm, _INVALID)

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm
