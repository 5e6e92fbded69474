"""Arithmetic throughput: the operations of an update divided by its time, and the peak of the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bigsgan.bench.measure import fastest
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.base import DTYPES
from bigsgan.engines.build import on_this_machine
from bigsgan.planner.counting import count_work, mean_flop
from bigsgan.runtime import comm
from bigsgan.runtime.tf32 import tf32

_FIELDS = ("flops", "flops_per_second", "matrix_precision", "matrix_flops_per_second", "achieved_share")


class Arithmetic(NamedTuple):
    """The work of the mean update, and the speed of a matrix product, with which it is compared."""

    flops: int  # operations of a rank in the mean update
    precision: str  # of the matrix product
    peak: float  # operations a second of the matrix product


def arithmetic_of(plan: RunPlan, peaks: dict[str, float]) -> Arithmetic | None:
    """Count the mean update's operations, and measure a matrix product in D's precision unless ``peaks`` has it.

    None if a network has stages, because its ranks have unequal work.
    """
    if any(plan.placement(network).num_stages > 1 for network in NETWORKS):
        return None
    flops = mean_flop(count_work(on_this_machine(plan))) * plan.recipe.batch // plan.world_size
    engine_precision = plan.engines["discriminator"].file.precision
    precision = matrix_precision(engine_precision, comm.device())
    if precision not in peaks:
        if comm.world_size() > 1:
            comm.barrier()  # all measure at once
        peaks[precision] = matrix_flops_per_second(DTYPES[engine_precision], comm.device())
    return Arithmetic(flops, precision, peaks[precision])


def speed(arithmetic: Arithmetic | None, seconds: float) -> dict[str, Any]:
    """The fields of a record about updates that take so many seconds; all None if operations are not counted."""
    if arithmetic is None:
        return dict.fromkeys(_FIELDS)
    flops, precision, peak = arithmetic
    return dict(zip(_FIELDS, (flops, flops / seconds, precision, peak, flops / seconds / peak), strict=True))


def matrix_flops_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Highest speed that this device can reach: the best of a few products of two square matrices.

    It uses TF32 if convolutions may, although torch allows that for float32 matrices only when told to.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # equal numbers would need less power
    with tf32(torch.backends.cudnn.allow_tf32):
        return 2 * size**3 / fastest(lambda: torch.mm(a, b))


def matrix_precision(precision: str, device: torch.device) -> str:
    """Precision of the matrix product, in words."""
    uses_tf32 = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return "fp32 (TF32, as convolutions)" if uses_tf32 else precision
