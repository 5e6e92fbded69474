"""The collectives of DeepSpeed that bigsgan changes or watches: private parts.

Seen in DeepSpeed 0.19.8; tests/distributed/test_deepspeed_collectives.py fails first if a later version changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.engine_plan import EnginePlan
from bigsgan.engines.deepspeed import internals
from bigsgan.engines.deepspeed.averaged_gradients import AveragedGradients
from bigsgan.engines.deepspeed.divided_update import divide_update
from bigsgan.engines.deepspeed.grouped_gradients import GroupedGradients, norm_over_ranks
from bigsgan.engines.deepspeed.offloaded_norm import ask_once
from bigsgan.engines.deepspeed.reports import collectives
from bigsgan.engines.deepspeed_config import PART_MULTIPLE, AtATime

_MOST_PADDING = 1.05
"""Largest ratio of padded parts to their content; above it, one reduction for each rank sends less."""


_MULTIPLE = "nccl_start_alignment_factor"
"""Name of an attribute of the optimizers, which their constructors set to 2."""


class _PartMultiple:
    """Descriptor that replaces this attribute; an optimizer keeps the number from when it was made."""

    def __init__(self, aligned: bool) -> None:
        self._aligned = aligned

    def __get__(self, optimizer: Any, kind: type) -> Any:
        return self if optimizer is None else vars(optimizer)[_MULTIPLE]

    def __set__(self, optimizer: Any, number: int) -> None:
        vars(optimizer)[_MULTIPLE] = PART_MULTIPLE if self._aligned else number


def align_parts(aligned: bool) -> None:
    """Let ranks' parts of flat groups begin at multiples of 16 bytes in optimizers that are made from now on, or not.

    By itself DeepSpeed pads groups so that parts begin at multiples of 4 bytes (zero/stage_1_and_2.py and
    bf16_optimizer.py), where NCCL's copies are narrower; no DeepSpeed file can change this.
    """
    for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        setattr(kind, _MULTIPLE, _PartMultiple(aligned))


def install_reducers(engine: DeepSpeedEngine, plan: EnginePlan, at_a_time: AtATime) -> AveragedGradients | None:
    """Let an engine reduce and update with fewer bytes, on the wire and in memory, than DeepSpeed's own code.

    Args:
        engine: The engine.
        plan: Its plan; the choices of its DeepSpeed file stand.
        at_a_time: How many elements ZeRO 0 handles together.

    Returns:
        Averaged gradients that must be waited for before they are used; None if no wait is due.
    """
    file, replayed = plan.file, plan.section.cuda_graphs
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        divide_update(engine.optimizer, at_a_time.updated)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        if plan.reduces_by_group:
            GroupedGradients(engine.optimizer, replayed)
        else:
            _scatter_gradients(engine.optimizer, file)
        if engine.optimizer.cpu_offload:
            ask_once(engine.optimizer)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) and file.offload_optimizer == "none":
        _order_reductions(engine.optimizer)
        _keep_norm_on_device(engine.optimizer)
    if not internals.has_optimizer_wrapper(engine):
        _drop_gradients_at_once(engine)
    if plan.averages_by_group:
        return AveragedGradients(engine, at_a_time.reduced, bool(engine.zero_overlap_comm()), replayed)
    _limit_reductions(engine, at_a_time.reduced)
    return None


def _limit_reductions(engine: DeepSpeedEngine, at_a_time: int) -> None:
    """Limit DeepSpeed's flat copies for averaging at ZeRO 0: 500 million elements, which no file sets (engine.py).

    This concerns pipelines, and files that ask for a scaling of gradients.

    A single replica has nobody to average with. It only puts zeros where a gradient is missing, as DeepSpeed does,
    because optimizers pass over parameters without a gradient.
    """
    reduce, has_others = engine.buffered_allreduce_fallback, engine.dp_world_size > 1
    is_bare, parameters = not internals.has_optimizer_wrapper(engine), list(engine.module.parameters())

    def limited(grads: Any = None, elements_per_buffer: int = 0) -> None:
        if has_others:
            reduce(grads, at_a_time)
        elif is_bare:
            for parameter in parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    engine.buffered_allreduce_fallback = limited


def _order_reductions(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the compute stream, not the host, wait for ZeRO 3's reductions after a backward pass.

    While the host waits, the device has nothing to do (zero/stage3.py). Other callers that wait for the reductions get
    tensors on the device, which are read on the compute stream. With an optimizer on the host, the host must wait.
    """
    stream: Any = optimizer.reduce_and_partition_stream  # None on devices without streams
    if stream is not None:
        stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)


def _keep_norm_on_device(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Take ZeRO 3's gradient norm without a number on the host, for which it would wait (zero/stage3.py:2483)."""

    def norm(gradients: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        return norm_over_ranks(optimizer, torch.stack(norms))

    optimizer.get_grad_norm_direct = norm


def _drop_gradients_at_once(engine: DeepSpeedEngine) -> None:
    """Spare ZeRO 0 in float32 a walk through all modules after each update to find the parameters."""
    parameters = list(engine.module.parameters())

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = None

    engine.zero_grad = zero_grad


def _scatter_gradients(optimizer: DeepSpeedZeroOptimizer, file: DeepSpeedFile) -> None:
    """Let ZeRO 1 and 2 with an optimizer on the host send each rank only its part of the gradients' sum.

    By itself DeepSpeed all-reduces gradients (zero/stage_1_and_2.py), which sends twice as much. If the file sets
    ``use_multi_rank_bucket_allreduce``, true or false, DeepSpeed does what that says. With ``reduce_scatter`` false it
    all-reduces, and never calls the function replaced here.
    """
    if (
        dist.get_world_size(optimizer.dp_process_group) > 1
        and "use_multi_rank_bucket_allreduce" not in file.content["zero_optimization"]
    ):
        optimizer.allreduce_and_copy_with_multiple_ranks = partial(_scatter_bucket, optimizer)


def _scatter_bucket(
    optimizer: DeepSpeedZeroOptimizer,
    slices: Sequence[Tensor],
    communication_data_type: torch.dtype,
    *,
    process_group: Any,
    bucket_ranks: Sequence[frozenset[int]],
    output_bucket: Sequence[Tensor | None],
    divide: bool,
    log: Any = None,
) -> None:
    """Replace each slice of gradients, on the rank that owns it, by the sum over all ranks."""
    assert not divide, "average_tensor has divided already"
    num, me = dist.get_world_size(process_group), dist.get_rank(process_group)
    by_owner: list[list[Tensor]] = [[] for _ in range(num)]
    for piece, (owner,) in zip(slices, bucket_ranks, strict=True):
        by_owner[owner].append(piece)
    sizes = [sum(piece.numel() for piece in own) for own in by_owner]
    if num * max(sizes) <= _MOST_PADDING * sum(sizes):
        summed = _reduce_scatter(by_owner, max(sizes), communication_data_type, process_group, me)
    else:
        summed = _reduce_each(by_owner, communication_data_type, process_group, me)
    start = 0
    for piece, (owner,), output in zip(slices, bucket_ranks, output_bucket, strict=True):
        if owner == me:
            own = summed[start : start + piece.numel()]
            if output is None:
                piece.copy_(own.view_as(piece))
            else:
                optimizer._add_to_grad_partition_buffer(output, own)
            start += piece.numel()
        if optimizer.overlap_comm and piece.is_cuda:
            piece.record_stream(optimizer.reduction_stream)  # the backward pass may free it before that stream reads it


def _reduce_scatter(by_owner: Sequence[Sequence[Tensor]], size: int, dtype: torch.dtype, group: Any, me: int) -> Tensor:
    """Reduce in one collective, on parts of equal size; return the sum of this rank's part."""
    first = next(own[0] for own in by_owner if own)
    parts = first.new_empty((len(by_owner), size), dtype=dtype)
    for part, own in zip(parts, by_owner, strict=True):
        _fill(part, own)
    collectives().reduce_scatter_tensor(parts[me], parts.view(-1), group=group)
    return parts[me]


def _reduce_each(by_owner: Sequence[Sequence[Tensor]], dtype: torch.dtype, group: Any, me: int) -> Tensor:
    """Reduce to each rank that owns a part, one by one; return the sum of this rank's part."""
    sums, works = {}, []
    for owner, own in enumerate(by_owner):
        if own:
            sums[owner] = own[0].new_empty(sum(piece.numel() for piece in own), dtype=dtype)
            _fill(sums[owner], own)
            destination = dist.get_global_rank(group, owner)
            works.append(collectives().reduce(sums[owner], destination, group=group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    return sums.get(me, torch.empty(0))


def _fill(part: Tensor, pieces: Sequence[Tensor]) -> None:
    start = 0
    for piece in pieces:
        part[start : start + piece.numel()].copy_(piece.view(-1))
        start += piece.numel()


_COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "all_gather_object", "allgather_fn", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_fn", "all_to_all_single", "barrier",
)  # fmt: skip


@contextmanager
def wrapped_collectives(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace collectives inside the block: torch's, and DeepSpeed's, which keeps some of torch's (comm/torch.py)."""
    found = [(o, n, getattr(o, n)) for o in (dist, deepspeed.comm) for n in _COLLECTIVES if hasattr(o, n)]
    for owner, name, function in found:
        setattr(owner, name, wrap(function))
    try:
        yield
    finally:
        for owner, name, function in found:
            setattr(owner, name, function)
