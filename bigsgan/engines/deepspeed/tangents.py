"""Stage 3 and passes that carry tangents: DeepSpeed's own functions (0.19.8) have no derivative in forward mode."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import linear
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor


def let_tangents_through(engine: DeepSpeedEngine) -> None:
    """Give stage 3's linear map and its hooks, which are the identity, a derivative in forward mode.

    Hooks (zero/parameter_offload.py:466, 497) gather and let go as the gradient of a value arrives. Autograd goes
    backward in the reverse order of the forward pass, where a layer's tangents lie between the hooks of its values.
    """
    linear.LinearFunctionForZeroStage3 = _Linear
    for module in engine.module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if name in module.__dict__:
                getattr(module, name).jvp = staticmethod(_identity)


def _identity(ctx: Any, tangent: Tensor) -> Tensor:
    return tangent.view_as(tangent)


class _Linear(LinearFunctionForZeroStage3):
    """Stage 3's linear map (zero/linear.py:80), which gathers a weight that is gone in the backward pass."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        LinearFunctionForZeroStage3.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (weight,) = ctx.saved_for_forward
        return _Linear.apply(tangent, weight)
