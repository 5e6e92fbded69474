"""ZeRO 1 and 2 with an optimizer on the host: one question to the device for the norm of an update's gradients.

As it comes DeepSpeed (0.19.8, zero/stage_1_and_2.py) asks for each gradient of each micro-batch whether it is finite,
while the backward pass goes on, and for the norm of each at the end. The norm of all tells both. The private parts are
those that tests/distributed/test_host_waits.py fails on first if a later version changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bigsgan.engines.deepspeed.grouped_gradients import leave_to_the_norm, norm_over_ranks


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
        """Norm of a group's gradients over all ranks, a tensor () on the host; inf where it is not finite."""
        found = optimizer.norm_for_param_grads  # of the parameters that had a gradient, on this rank's part of it
        norms = [found[number] for p in parameters if (number := optimizer.get_param_id(p)) in found]
        own = torch.stack(norms) if norms else optimizer.bit16_groups_flat[0].new_zeros(1)
        return norm_over_ranks(optimizer, own).to(optimizer.device)

    optimizer.complete_grad_norm_calculation_for_cpu_offload = norm
