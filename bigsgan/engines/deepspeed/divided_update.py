"""bf16 at ZeRO 0: updates a part of the parameters at a time.

DeepSpeed (0.19.8, runtime/fp16/unfused_optimizer.py) keeps float32 masters. By itself it makes float32 copies of all
gradients for an update, 4 bytes a parameter on top of the 16 that training takes, and waits for the device at every
parameter to know whether its gradient is finite. Here copies are made for some parameters at a time, and replace these
parameters' gradients in bf16 (with several replicas, those of a group in which they were averaged). The norm of all
gradients shows whether they are finite. tests/distributed/test_deepspeed_collectives.py fails first if a later version
changes the private parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from bigsgan.engines.parameter_groups import grouped

_EPSILON = 1e-6
"""Added to the norm by which gradients are clipped, as in torch.nn.utils.clip_grad_norm_."""


def divide_update(optimizer: FP16_UnfusedOptimizer, at_a_time: int) -> None:
    """Let the optimizer update a part of the elements at a time.

    Args:
        optimizer: DeepSpeed's optimizer.
        at_a_time: Largest number of elements in a part of several parameters.
    """
    weights = [parameter for group in optimizer.fp16_groups for parameter in group]
    masters = iter([master for group in optimizer.fp32_groups for master in group])
    parts = [[(weight, next(masters)) for weight in part] for part in grouped(weights, at_a_time)]

    def step(closure: Callable[[], Any] | None = None) -> bool:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(
            torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else []
        )
        del gradients  # so that the weights, or with several replicas their groups, free them one by one
        optimizer.overflow = stage_1_and_2.is_invalid_grad_norm(norm)
        if optimizer.overflow:
            return bool(optimizer._skip_invalid_grad_norm())
        optimizer._global_grad_norm = norm
        optimizer._update_scale(False)
        clip = optimizer.clip_grad
        factor = (clip / (norm + _EPSILON)).clamp(max=1.0) if clip > 0 else 1.0
        for part in parts:
            _update(optimizer.optimizer, part, factor)
        return False

    optimizer.step = step


@torch.no_grad()
def _update(optimizer: torch.optim.Optimizer, part: Sequence[tuple[Tensor, Tensor]], factor: Any) -> None:
    """Update some masters and weights; the optimizer passes over all others, as they have no gradient."""
    for weight, master in part:
        if weight.grad is None:
            master.grad = torch.zeros_like(master)
        else:
            master.grad = weight.grad.to(master.dtype)
            weight.grad = None
        master.grad.mul_(factor)
    optimizer.step()
    for weight, master in part:
        master.grad = None
        weight.copy_(master)
