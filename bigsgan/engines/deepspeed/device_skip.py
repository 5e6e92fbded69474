"""Updates skipped on the device: gradients that are not finite change nothing, and no host waits to know it.

A host that decides waits for the gradients' norm, and the device runs dry meanwhile. torch's fused Adam leaves weights,
moments and step as they are where its ``found_inf`` is 1 (torch/optim/adam.py: it is there for gradient scaling), so
that the norm need not leave the device; DeepSpeed copies and gathers weights that are what they were.
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
        """Decide for an engine, of which ``device_decides`` says that this goes.

        Args:
            engine: Any.
        """
        self._engine = engine
        self._skips: Tensor | None = None

    def judge(self, norm: Tensor) -> bool:
        """Look at the norm of an update's gradients, a tensor (): the next step is skipped for one that is not finite.

        Returns:
            False: the host does not skip the step.
        """
        self._skips = ~(torch.isfinite(norm) & (norm >= 0))  # DeepSpeed may give -1 for one that is not
        self._engine.basic_optimizer.found_inf = self._skips.float()
        return False

    def step(self) -> Outcome:
        """Step the engine, whose optimizer asks ``judge`` where it has a norm of its own."""
        with _judged_by(self.judge):
            self._engine.step()
        skips, self._skips = self._skips, None
        assert skips is not None, "nobody looked at the norm"
        return ~skips


@contextmanager
def _judged_by(judge: Callable[[Any], bool]) -> Iterator[None]:
    """Let ``judge`` say inside the block whether a norm is invalid, and not DeepSpeed's function, which waits for it.

    It is asked by stage3.py once for an update; by stage_1_and_2.py once and, where gradients are clipped, once for
    each group; and by divided_update.
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
    """Whether the device can decide, and it pays.

    The host does on a CPU, for which it would only be more to compute; where either network is in fp16, whose next
    scales depend on it; for an optimizer on the host, or another than Adam; and where DeepSpeed reduces gradients, and
    looks at them, in ways of its own.

    Args:
        engine: Any.
        plan: The run's.
        network: Which.
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
    """Whether the host gives the device work without waiting until it is done."""
    return device.type == "cuda"
