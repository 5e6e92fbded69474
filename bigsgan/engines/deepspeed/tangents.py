"""ZeRO 3 in passes that carry tangents: DeepSpeed's own functions (0.19.8) have no derivative in forward mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import linear
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor


def let_tangents_through(engine: DeepSpeedEngine) -> None:
    """Give ZeRO 3's linear map and its hooks, which are the identity, a derivative in forward mode.

    Hooks (zero/parameter_offload.py:466, 497) gather and release parameters when the gradient of a value arrives.
    Autograd goes backward in the reverse order of the forward pass, where a layer's tangents lie between these hooks.
    """
    linear.LinearFunctionForZeroStage3 = _Linear
    for module in engine.module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            if name in module.__dict__:
                getattr(module, name).jvp = staticmethod(_identity)


def _identity(ctx: Any, tangent: Tensor) -> Tensor:
    return tangent.view_as(tangent)


class _Linear:
    """ZeRO 3's linear map (zero/linear.py:80), applied to values and to tangents.

    Not as a ``jvp`` method of DeepSpeed's function: torch.compile could then not compile other networks of the process,
    whose linear maps DeepSpeed replaces too.
    """

    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in), (out, in), (out,) -> (..., out)."""
        if torch.compiler.is_compiling():  # torch 2.11 loses the gradient of a bias that is added in place
            return torch._C._nn.linear(x, weight, bias)
        value, tangent = forward_mode.unpack_dual(x)
        if tangent is None:
            return LinearFunctionForZeroStage3.apply(x, weight, bias)
        primal = LinearFunctionForZeroStage3.apply(value, weight, bias)
        return forward_mode.make_dual(primal, LinearFunctionForZeroStage3.apply(tangent, weight, None))
