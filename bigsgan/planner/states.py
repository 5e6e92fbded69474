"""What a network's states hold on one rank: weights, masters, optimizer, gradients, and DeepSpeed's buffers.

Follows DeepSpeed 0.19.8 as bigsgan sets it up; files are under deepspeed/runtime/. The planner's tests compare it with
what runs of every stage hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigsgan.config import RunPlan
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed_config import (
    PART_MULTIPLE,
    stage_0_at_a_time,
    zero_settings,
)
from bigsgan.engines.nvme import num_swap_buffers
from bigsgan.engines.optimizer import num_state_tensors
from bigsgan.planner.gathering import Limits

FLOAT = 4
_NORM = 8
"""Bytes of an element of the copy whose norm is taken, one gradient at a time (zero/utils.py: get_norm_dtype)."""


@dataclass(frozen=True)
class Gradients:
    """What gradients hold while they come and while they are used, in bytes beyond what stays.

    Attributes:
        each: For each element that has arrived in a backward pass.
        beginning: From the beginning of an update's first backward pass on.
        between: From one micro-batch of an update to the next.
        buffer: From the first arrival in a pass to its end.
        group: Most that a group of gradients takes while it arrives and is reduced.
        group_each: Most that each element that has arrived adds to that: itself, and its copy once the group is whole.
        ending: At the end of each pass, as long as it takes to reduce them.
        updating: At the end of the update: to reduce them, where that was not done before, and to step.
    """

    each: float = 0
    beginning: int = 0
    between: int = 0
    buffer: int = 0
    group: int = 0
    group_each: int = 0
    ending: int = 0
    updating: int = 0

    def during(self, arrived: np.ndarray, earlier: bool) -> np.ndarray:
        """Bytes at moments of a backward pass.

        Args:
            arrived: Elements whose gradients are complete, (T,) int64.
            earlier: Whether other micro-batches of the update came before.
        """
        own = self.beginning + (arrived * self.each).astype(np.int64)
        held = np.maximum(own, self.between) if self.each else np.full_like(own, self.between)
        group = np.minimum(arrived * self.group_each, self.group)
        return (held if earlier else own) + group + np.where(arrived > 0, self.buffer, 0)


@dataclass(frozen=True)
class States:
    """One network on one rank.

    Attributes:
        device: Bytes that stay on the device, by what they are.
        host: The same of the host's memory.
        gradients: What comes and goes with an update.
        itemsize: Bytes of a parameter in the passes.
        num_masters: Elements that the rank updates, and averages.
        limits: Of gathering, at stage 3; None elsewhere.
    """

    device: dict[str, int]
    host: dict[str, int]
    gradients: Gradients
    itemsize: int
    num_masters: int
    limits: Limits | None = None


@dataclass(frozen=True)
class _Sizes:
    """Elements.

    Attributes:
        whole: Of the parameters of this rank's layers.
        shared: That this rank updates, of ``num_replicas`` that share them.
        touched: Of the parameters that are in part among those; the largest number of any rank.
        largest: Of one parameter.
    """

    whole: int
    shared: int
    touched: int
    largest: int
    num_replicas: int


def build_states(plan: RunPlan, network: str, sizes: Sequence[int]) -> States:
    """States of a network on the rank that needs most for them, without its average and buffers.

    Args:
        plan: The run's.
        network: Which.
        sizes: Elements of each parameter of the rank's layers.
    """
    file, placement = plan.engines[network].file, plan.placement(network)
    content = file.content.get("data_types", {})
    weight = DTYPES[file.precision].itemsize
    adds_up = FLOAT if content.get("grad_accum_dtype") in ("fp32", "float32") else weight
    has_flat_gradients = file.precision == "bf16" and (
        (file.stage == 0 and placement.num_stages > 1)
        or (file.stage == 1 and adds_up == FLOAT and file.offload_optimizer == "none")
    )
    if file.stage == 3:
        return _stage3(plan, network, _measure_each(sizes, placement.num_replicas), weight, adds_up)
    found = _measure_flat(sizes, placement.num_replicas)
    if has_flat_gradients:
        return _flat_gradients(plan, network, found, weight, adds_up)
    if file.stage == 0:
        return _stage0(plan, network, found, weight)
    if file.offload_optimizer != "none":
        return _stage12_offloaded(plan, network, found, weight)
    return _stage12(plan, network, found, weight, adds_up)


def _measure_flat(sizes: Sequence[int], num_replicas: int) -> _Sizes:
    """All parameters in one line, cut into equal parts (zero/stage_1_and_2.py)."""
    whole = sum(sizes)
    shared = -(-whole // (PART_MULTIPLE * num_replicas)) * PART_MULTIPLE
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    starts = ends - sizes
    cuts = np.arange(num_replicas, dtype=np.int64) * shared
    first = np.searchsorted(ends, cuts, side="right")
    last = np.minimum(np.searchsorted(starts, cuts + shared, side="left"), len(sizes)) - 1
    inside = first <= last
    touched = int((ends[last[inside]] - starts[first[inside]]).max())
    return _Sizes(whole, shared, touched, max(sizes), num_replicas)


def _measure_each(sizes: Sequence[int], num_replicas: int) -> _Sizes:
    """Each parameter cut into equal parts (zero/partition_parameters.py)."""
    shared = sum(-(-size // num_replicas) for size in sizes)
    return _Sizes(sum(sizes), shared, shared, max(sizes), num_replicas)


def _num_moments(plan: RunPlan, network: str) -> int:
    return num_state_tensors(getattr(plan.recipe.optimizer, network), plan.engines[network].file)


def _stage0(plan: RunPlan, network: str, sizes: _Sizes, weight: int) -> States:
    """Everything on every replica; below float32, float32 masters of each parameter (fp16/unfused_optimizer.py)."""
    is_low = weight < FLOAT
    whole = sizes.whole
    device = {
        "weights": whole * weight,
        "masters": whole * FLOAT if is_low else 0,
        "optimizer": whole * FLOAT * _num_moments(plan, network),
    }
    reduced, updated = stage_0_at_a_time(plan, network, whole)
    updated = min(whole, max(updated, sizes.largest))
    held = whole * weight
    if plan.engines[network].averages_by_group:
        group = min(whole, max(reduced, sizes.largest)) * weight  # copied as soon as it is whole, and then gone itself
        updating = held + (updated * FLOAT if is_low else 0)  # gradients go by the group, and copies come by the part
        gradients = Gradients(
            weight, between=held, group=group, group_each=weight, ending=held + group, updating=updating
        )
        return States(device, {}, gradients, weight, whole)
    # A bucket that is full has gone beyond its size.
    bucket = min(whole, reduced + sizes.largest) if sizes.num_replicas > 1 else 0
    converted = updated * (FLOAT - weight) + sizes.largest * weight  # copies, whose gradients go one by one
    updating = held + max(bucket * weight, converted if is_low else 0)
    return States(device, {}, Gradients(each=weight, between=held, updating=updating), weight, whole)


def _stage12(plan: RunPlan, network: str, sizes: _Sizes, weight: int, adds_up: int) -> States:
    """Masters and optimizer shared; at stage 2 gradients too (zero/stage_1_and_2.py, engines/grouped_gradients.py).

    So are stage 1's in a single backward pass that reduces them meanwhile.
    """
    settings = zero_settings(plan, network, sizes.whole)
    bucket = settings.reduce_bucket_size
    whole, shared, num = sizes.whole, sizes.shared, sizes.num_replicas
    device = {
        "weights": shared * num * weight,
        "masters": shared * FLOAT,
        "optimizer": shared * FLOAT * _num_moments(plan, network),
    }
    group = min(bucket, whole)  # of parameters that are reduced and updated together
    sent = max(group, sizes.largest)  # a larger parameter is sent as it is, the others in a copy
    kept, part = shared * adds_up, -(-sent // num)
    stepping = kept + (part * FLOAT if adds_up < FLOAT else 0)
    several, overlapping = plan.recipe.accumulation_of(network) > 1, plan.engines[network].overlaps
    if plan.engines[network].file.stage == 1 and (several or adds_up > weight or not overlapping):
        reducing = (whole + group) * adds_up + part * adds_up
        arriving = whole * weight if adds_up > weight else 0  # before they are added up at the end of a pass
        gradients = Gradients(
            each=weight,
            between=whole * adds_up + arriving,
            ending=whole * adds_up if arriving else 0,
            updating=max(reducing, stepping),
        )
    else:
        between = kept if several else 0
        added = part * weight if several or adds_up > weight else 0  # what comes is else what is kept
        alone = sizes.largest * weight * (2 if sizes.largest % (2 * num) else 1)  # what is padded is copied too
        handled = max(2 * group * weight, alone + added)
        if overlapping and num > 1 and group < whole:
            handled = max(handled, (group + sent + part) * weight)  # the group before is under way
        if group < whole:
            gradients = Gradients(
                each=adds_up / num,
                between=between,
                group=handled,
                group_each=2 * weight,
                ending=kept,
                updating=stepping,
            )
        else:  # complete with the last of them
            gradients = Gradients(weight, between=between, ending=kept + handled, updating=stepping)
    return States(device, {}, gradients, weight, shared)


def _stage12_offloaded(plan: RunPlan, network: str, sizes: _Sizes, weight: int) -> States:
    """Masters, optimizer and the reduced gradients on the host."""
    stage = plan.engines[network].file.stage
    bucket = zero_settings(plan, network, sizes.whole).reduce_bucket_size
    whole, shared, touched = sizes.whole, sizes.shared, sizes.touched
    several = plan.recipe.accumulation_of(network) > 1
    device = {"weights": shared * sizes.num_replicas * weight, "buffers": sizes.largest * weight}
    host = {
        "masters": shared * FLOAT,
        "optimizer": shared * FLOAT * _num_moments(plan, network),
        "gradients": shared * FLOAT + (touched * weight if several else 0),
        "buffers": (shared + sizes.largest) * weight,
    }
    sent = min(bucket, whole) * weight
    converted = min(sizes.largest, shared) * FLOAT if weight < FLOAT else 0
    copied = max(sent, converted)
    if stage == 1:
        gradients = Gradients(weight, whole * weight, bucket * weight, updating=whole * weight + copied)
    else:
        flushing = copied if bucket < whole else 0
        gradients = Gradients(buffer=bucket * weight + flushing, ending=bucket * weight + copied)
    return States(device, host, gradients, weight, shared)


def _flat_gradients(plan: RunPlan, network: str, sizes: _Sizes, weight: int, adds_up: int) -> States:
    """Masters and optimizer shared, and one tensor that all gradients are added to (bf16_optimizer.py)."""
    shared = sizes.shared
    padded = shared * sizes.num_replicas
    device = {
        "weights": padded * weight,
        "masters": shared * FLOAT,
        "optimizer": shared * FLOAT * _num_moments(plan, network),
        "gradients": padded * adds_up,
    }
    sent = 0
    if sizes.num_replicas > 1:
        bucket = zero_settings(plan, network, sizes.whole).reduce_bucket_size
        group = max(bucket, sizes.largest) if plan.engines[network].file.stage else padded
        sent = min(padded, stage_0_at_a_time(plan, network, sizes.whole).reduced + group) * adds_up
    stepping = shared * FLOAT if adds_up < FLOAT else 0
    return States(device, {}, Gradients(updating=max(sent, stepping)), weight, shared)


def _stage3(plan: RunPlan, network: str, sizes: _Sizes, weight: int, adds_up: int) -> States:
    """Everything shared; whole parameters for as long as they are used (zero/stage3.py)."""
    file, settings = plan.engines[network].file, zero_settings(plan, network, sizes.whole)
    shared, bucket = sizes.shared, settings.reduce_bucket_size
    device, host = dict[str, int](), dict[str, int]()
    (host if file.offload_parameters != "none" else device)["weights"] = shared * weight
    step = min(settings.sub_group_size, shared)
    stepping = step * adds_up + (step * FLOAT if adds_up < FLOAT else 0)
    stepping = max(stepping, -(-sizes.largest // sizes.num_replicas) * _NORM)
    held = bucket * weight  # from the first backward pass of an update to its end, with the gradients
    if file.offload_optimizer == "none":
        held += shared * adds_up
    else:
        host["gradients"] = shared * (adds_up + FLOAT)
        stepping = 0
    if file.uses_nvme:
        host["buffers"] = step * FLOAT * num_swap_buffers(file, getattr(plan.recipe.optimizer, network))
    else:
        where = device if file.offload_optimizer == "none" else host
        where["masters"] = shared * FLOAT
        where["optimizer"] = shared * FLOAT * _num_moments(plan, network)
    sent = min(bucket, sizes.whole) * weight
    if sizes.largest > bucket and sizes.largest % sizes.num_replicas:
        sent = sizes.largest * weight  # reduced by itself, and padded for that
    gradients = Gradients(
        beginning=held,
        between=held if plan.recipe.accumulation_of(network) > 1 else 0,
        buffer=sent if bucket < sizes.whole else 0,
        ending=held + sent,
        updating=held + stepping,
    )
    limits = Limits(
        settings.prefetch_bucket_size,
        settings.max_reuse_distance,
        settings.max_live_parameters,
        settings.param_persistence_threshold,
    )
    return States(device, host, gradients, weight, shared, limits if sizes.num_replicas > 1 else None)
