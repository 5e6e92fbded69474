"""ZeRO 1 and 2 with an optimizer on the host: wait for the device once an update, for the norm of the gradients.

By itself DeepSpeed (0.19.8, zero/stage_1_and_2.py) asks whether each gradient of each micro-batch is finite, during the
backward pass, and for the norm of each at the end. The norm of all gradients answers both.
tests/distributed/test_host_waits.py fails first if a later version changes the private parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bigsgan.engines.deepspeed.grouped_gradients import leave_to_the_norm, norm_over_ranks


def ask_once(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the norm of all gradients show whether they are finite, and read it once, where masters are on the host.

    Assumes that each parameter is in one stage, without the other forms of parallelism that DeepSpeed knows.
    """
    if not optimizer.ignore_unused_parameters:
        return  # DeepSpeed's own norm then looks for parameters without a gradient
    optimizer.update_offload_overflow_tracker = optimizer.check_overflow = leave_to_the_norm

    def norm(parameters: Sequence[Any]) -> Tensor:
        """Return the norm of a group's gradients over all ranks, a tensor () on the host; inf if it is not finite."""
        found = optimizer.norm_for_param_grads  # norms on this rank's part, of parameters that had a gradient
        norms = [found[number] for p in parameters if (number := optimizer.get_param_id(p)) in found]
        own = torch.stack(norms) if norms else optimizer.bit16_groups_flat[0].new_zeros(1)
        return norm_over_ranks(optimizer, own).to(optimizer.device)

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm
