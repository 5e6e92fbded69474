"""Skips updates on the device: gradients that are not finite change nothing, and no host waits to know it.

A host that decides waits for the gradients' norm, and meanwhile the device runs out of work. torch's fused Adam changes
neither weights, moments nor step if its ``found_inf`` is 1 (torch/optim/adam.py: it is there for gradient scaling). So
the norm can stay on the device; after a skipped update DeepSpeed copies and gathers unchanged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import Tensor

from bigsgan.config import RunPlan
from bigsgan.engines.outcomes import Outcome


class DeviceSkip:
    """Tells an engine's optimizer, on the device, to skip updates whose gradients are not finite."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Begin without a norm. ``device_decides`` is true for the engine."""
        self._engine = engine
        self._skips: Tensor | None = None

    def judge(self, norm: Tensor) -> bool:
        """Skip the next step unless ``norm``, that of an update's gradients, a tensor (), is finite.

        Returns:
            False: the host does not skip the step.
        """
        self._skips = ~(torch.isfinite(norm) & (norm >= 0))  # DeepSpeed may give -1 for a norm that is not finite
        self._engine.basic_optimizer.found_inf = self._skips.float()
        return False

    def step(self) -> Outcome:
        """Step the engine; an optimizer that takes the norm itself calls ``judge``."""
        with _judged_by(self.judge):
            self._engine.step()
        skips, self._skips = self._skips, None
        assert skips is not None, "nobody looked at the norm"
        return ~skips


@contextmanager
def _judged_by(judge: Callable[[Any], bool]) -> Iterator[None]:
    """Inside the block, replace DeepSpeed's function that judges norms, and waits for them, by ``judge``.

    stage3.py calls it once an update; stage_1_and_2.py once and, if gradients are clipped, once for each group;
    divided_update calls it too.
    """
    modules = (stage_1_and_2, stage3)
    waiting = [module.is_invalid_grad_norm for module in modules]
    for module in modules:
        module.is_invalid_grad_norm = judge
    try:
        yield
    finally:
        for module, function in zip(modules, waiting, strict=True):
            module.is_invalid_grad_norm = function


def device_decides(engine: DeepSpeedEngine, plan: RunPlan, network: str) -> bool:
    """Whether the device can decide on skips, and gains time by it.

    The host decides on a CPU, where deciding on the device only adds work; if either network is in fp16, whose next
    scales depend on the outcome; for an optimizer on the host, or another than Adam; and if DeepSpeed reduces and
    checks gradients in ways of its own.
    """
    optimizer, file = engine.basic_optimizer, plan.engines[network].file
    return (
        _runs_ahead(engine.device)
        and not plan.engines[network].is_stock
        and all(each.file.precision != "fp16" for each in plan.engines.values())
        and file.offload_optimizer == "none"
        and (file.stage in (0, 3) or plan.engines[network].reduces_by_group)
        and not isinstance(engine.optimizer, BF16_Optimizer)
        and isinstance(optimizer, torch.optim.Adam)
        and bool(optimizer.defaults["fused"])
    )


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host queues work on the device without waiting for it."""
    return device.type == "cuda"
