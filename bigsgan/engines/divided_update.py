"""bf16 at stage 0: an update of a part of the parameters at a time.

DeepSpeed (0.19.8, runtime/fp16/unfused_optimizer.py) keeps float32 masters and, as it comes, makes float32 copies of
all gradients for an update, 4 bytes a parameter on top of the 16 that training takes. Here they are made for some
parameters at a time, whose gradients in bf16 go as theirs come. tests/distributed/test_deepspeed_collectives.py fails
first if a later version changes the private parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import get_global_norm, get_weight_norm, is_invalid_grad_norm
from torch import Tensor

from bigsgan.engines.optimizer import grouped


def divide_update(optimizer: FP16_UnfusedOptimizer, at_a_time: int) -> None:
    """Let the optimizer update so many elements at a time from now on, or one larger parameter.

    Args:
        optimizer: DeepSpeed's.
        at_a_time: Elements.
    """
    weights = [parameter for group in optimizer.fp16_groups for parameter in group]
    masters = iter([master for group in optimizer.fp32_groups for master in group])
    parts = [[(weight, next(masters)) for weight in part] for part in grouped(weights, at_a_time)]

    def step(closure: Callable[[], Any] | None = None) -> bool:
        optimizer.overflow = optimizer.overflow_checker.check()
        if optimizer.overflow:
            return bool(optimizer._skip_invalid_grad_norm())
        norm = _norm(optimizer, weights)
        optimizer._global_grad_norm = norm
        if is_invalid_grad_norm(norm):
            return bool(optimizer._skip_invalid_grad_norm())
        optimizer._update_scale(False)
        scale = optimizer.unscale_and_clip_grads(norm, apply_scale=False)
        for part in parts:
            _update(optimizer.optimizer, part, 1.0 / scale)
        return False

    optimizer.step = step


def _norm(optimizer: FP16_UnfusedOptimizer, weights: Sequence[Tensor]) -> Any:
    """Norm of the gradients, to which nothing refers afterwards but the weights."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return get_global_norm(norm_list=[get_weight_norm(gradients, mpu=optimizer.mpu)])


@torch.no_grad()
def _update(optimizer: torch.optim.Optimizer, part: Sequence[tuple[Tensor, Tensor]], factor: Any) -> None:
    """Update masters and weights; the optimizer passes over parameters without a gradient, here all others."""
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
