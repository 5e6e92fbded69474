"""The mean over ranks, differentiable any number of times.

The mean is its own adjoint: d(sum over ranks of loss)/dx averages the incoming gradients. Each rank's loss is a mean
over its own samples and the engines average gradients over ranks, which the backward pass here must agree with: the
averaged gradient of the averaged losses is the global one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def mean_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None, known: Tensor | None = None) -> Tensor:
    """Average a tensor over all ranks, or those of a group; differentiable any number of times.

    No message is sent if the mean is ``known`` on all of these ranks.
    """
    if torch.compiler.is_compiling() and known is None:
        return _compiled_mean(tensor, (group or dist.group.WORLD).group_name)  # type: ignore[union-attr]
    mean: Tensor = _Mean.apply(tensor, group, known)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, known: Tensor | None) -> Tensor:
        ctx.group = group
        return _mean(tensor, group) if known is None else known.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Mean.apply(grad, ctx.group, None), None, None


def _mean(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result = tensor.contiguous().clone()
    dist.all_reduce(result, group=group)
    return result.div_(dist.get_world_size(group))


@torch.library.custom_op("bigsgan::mean_over_ranks", mutates_args=())
def _compiled_mean(tensor: Tensor, group_name: str) -> Tensor:
    """Return the mean in compiled code, which takes it as one operation.

    torch 2.11 compiles the collective in ``_Mean`` without an error, and its gradient is wrong.
    """
    return _mean(tensor, distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]


@_compiled_mean.register_fake
def _(tensor: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _compiled_mean(grad, ctx.group_name), None


_compiled_mean.register_autograd(_backward, setup_context=_keep_group)
