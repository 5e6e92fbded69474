"""The memory of a network's states on one rank: weights, masters, optimizer, gradients, and DeepSpeed's buffers.

Follows DeepSpeed 0.19.8 as bigsgan sets it up; files are under deepspeed/runtime/. The planner's tests compare it with
what runs of every ZeRO stage hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bigsgan.config import Recipe, RunPlan
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed.nvme import num_swap_buffers
from bigsgan.engines.deepspeed_config import PART_MULTIPLE, stage_0_at_a_time, zero_settings
from bigsgan.engines.optimizer import num_state_elements
from bigsgan.runtime.memory import pinned_bytes

FLOAT = 4
_NORM = 8
"""Bytes of an element of the copy whose norm is taken, one gradient at a time (zero/utils.py: get_norm_dtype)."""


def image_bytes(recipe: Recipe) -> int:
    """Bytes of a sample that travels from G to D, and of the gradient that comes back: float32."""
    return recipe.judged_channels * recipe.data.network_size.num_pixels * FLOAT


@dataclass(frozen=True)
class Gradients:
    """What gradients hold while they come and while they are used, in bytes beyond what stays."""

    each: float = 0  # for each element that has arrived in a backward pass
    beginning: int = 0  # from the beginning of an update's first backward pass on
    between: int = 0  # from one micro-batch of an update to the next
    buffer: int = 0  # from the first arrival in a pass to its end
    group: int = 0  # most that a group of gradients takes while it arrives and is reduced
    # most that each element that has arrived adds to that: itself, and its copy once the group is whole
    group_each: int = 0
    ending: int = 0  # at the end of each pass, as long as it takes to reduce them
    updating: int = 0  # at the end of the update: to reduce them, where that was not done before, and to step

    def during(self, arrived: np.ndarray, earlier: bool) -> np.ndarray:
        """Bytes at moments of a backward pass, where ``arrived`` elements (T,) are complete.

        ``earlier`` says whether other micro-batches of the update came before.
        """
        own = self.beginning + (arrived * self.each).astype(np.int64)
        held = np.maximum(own, self.between) if self.each else np.full_like(own, self.between)
        group = np.minimum(arrived * self.group_each, self.group)
        return (held if earlier else own) + group + np.where(arrived > 0, self.buffer, 0)


@dataclass(frozen=True)
class States:
    """One network on one rank."""

    device: dict[str, int]  # bytes that stay on the device, by what they are
    host: dict[str, int]  # the same of the host's memory
    gradients: Gradients  # what comes and goes with an update
    num_masters: int  # elements that the rank updates, and averages
    # bytes of parameters that ZeRO 3 has gathered at most while the network computes, those of all, of the largest
    # parameter, or layer that is compiled, of those that stay until the update, and of an element; 0 elsewhere
    gathers: int = 0
    whole: int = 0
    largest: int = 0
    persistent: int = 0
    gathered_each: int = 0
    spare: int = 0  # bytes of pinned blocks beyond the host's tensors in them; without a GPU nothing is pinned
    # number of pinned blocks that held parameters while these were built, by size; torch keeps them for other tensors
    built: Counter[int] = field(default_factory=Counter)


class _Network:
    """A network on one rank; sizes in elements.

    Attributes:
        engine: Its plan.
        weight: Bytes of an element in the passes.
        adds_up: Bytes of an element where gradients are added up.
        several: Whether an update has several micro-batches.
        sizes: Of each parameter of this rank's layers.
        whole: Of all of them.
        largest: Of one parameter.
        num: Replicas.
        shared: That this rank updates, of those that share them.
        touched: Of each parameter that is in part among those; of the rank with the largest sum.
        in_matrices: Of this rank's layers, in the matrices that Muon updates; 0 with another optimizer.
        copied: At a time, at ZeRO 0.
        settings: DeepSpeed's of ZeRO.
    """

    def __init__(self, plan: RunPlan, network: str, sizes: Sequence[int], in_matrices: int) -> None:
        self.engine, self.num = plan.engines[network], plan.placement(network).num_replicas
        file = self.engine.file
        self.weight = DTYPES[file.precision].itemsize
        in_float32 = file.content.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")
        self.adds_up = FLOAT if in_float32 else self.weight
        self.several = plan.recipe.accumulation_of(network) > 1
        self.sizes, self.whole, self.largest = sizes, sum(sizes), max(sizes)
        self.shared, self.touched = (_cut_each if file.stage == 3 else _cut_line)(sizes, self.num)
        self.in_matrices = in_matrices if self.engine.optimizer.kind == "muon" else 0
        self.copied = stage_0_at_a_time(plan, network, self.whole)
        self.settings = zero_settings(plan, network, self.whole)

    def updated(self, numel: int) -> dict[str, int]:
        """Bytes of so many elements' masters and of the optimizer's tensors."""
        in_matrices = numel * self.in_matrices // self.whole
        num = num_state_elements(self.engine.optimizer, self.engine.file, numel, in_matrices)
        return {"masters": numel * FLOAT, "optimizer": num * FLOAT}

    def orthogonalized(self, numel: int) -> int:
        """Bytes on the device to orthogonalize matrices that have so many elements on a rank (engines/muon.py)."""
        if not self.in_matrices:
            return 0
        numel = min(numel, self.in_matrices)
        # At ZeRO 1 and 2 only matrices that lie on two ranks travel, and a rank has two of them at most.
        cut = numel if self.engine.file.stage in (0, 3) else min(numel, 2 * self.largest)
        # Whole matrices and parts that come and go, in bf16, and the products of the largest.
        return 2 * numel + (4 * cut if self.num > 1 else 0) + 6 * self.largest


def build_states(
    plan: RunPlan, network: str, sizes: Sequence[int], in_matrices: int = 0, largest_layer: int = 0
) -> States:
    """States of a network on the rank that needs most for them, without its EMA and buffers.

    ``sizes`` are the elements of each parameter of the rank's layers, of which ``in_matrices`` are in those that Muon
    may update, and ``largest_layer`` those of a layer.
    """
    if not sizes:  # a rank that holds nothing of the network
        return States({}, {}, Gradients(), 0)
    own, file = _Network(plan, network, sizes, in_matrices), plan.engines[network].file
    has_flat_gradients = file.precision == "bf16" and (
        (file.stage == 0 and plan.placement(network).num_stages > 1)
        or (file.stage == 1 and own.adds_up == FLOAT and file.offload_optimizer == "none")
    )
    if file.stage == 3:
        return _stage3(own, largest_layer)
    if has_flat_gradients:
        return _flat_gradients(own)
    if file.stage == 0:
        return _stage0(own)
    return _stage12(own) if file.offload_optimizer == "none" else _stage12_offloaded(own)


def _cut_line(sizes: Sequence[int], num_replicas: int) -> tuple[int, Sequence[int]]:
    """``shared`` and ``touched`` of parameters in one line that is cut into equal parts (zero/stage_1_and_2.py)."""
    shared = -(-sum(sizes) // (PART_MULTIPLE * num_replicas)) * PART_MULTIPLE
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    starts = ends - sizes
    cuts = np.arange(num_replicas, dtype=np.int64) * shared
    first = np.searchsorted(ends, cuts, side="right")
    last = np.minimum(np.searchsorted(starts, cuts + shared, side="left"), len(sizes)) - 1
    first, last = first[first <= last], last[first <= last]
    fullest = int((ends[last] - starts[first]).argmax())
    return shared, sizes[first[fullest] : last[fullest] + 1]


def _cut_each(sizes: Sequence[int], num_replicas: int) -> tuple[int, Sequence[int]]:
    """The same of parameters that are each cut into equal parts (zero/partition_parameters.py)."""
    return sum(_parts(sizes, num_replicas)), sizes


def _parts(sizes: Iterable[int], num_replicas: int) -> Iterator[int]:
    return (-(-size // num_replicas) for size in sizes)


def _spare(tensors: Iterable[int]) -> int:
    """Bytes of the blocks that torch pins for tensors of so many bytes, beyond the tensors."""
    return sum(pinned_bytes(size) - size for size in tensors)


def _stage0(own: _Network) -> States:
    """Everything on every replica; below float32, float32 masters of each parameter (fp16/unfused_optimizer.py)."""
    whole, weight, is_low = own.whole, own.weight, own.weight < FLOAT
    held = whole * weight
    device = {"weights": held, **own.updated(whole), **({} if is_low else {"masters": 0})}
    reduced, updated = own.copied
    updated = min(whole, max(updated, own.largest))
    if own.engine.averages_by_group:
        group = min(whole, max(reduced, own.largest)) * weight  # copied as soon as it is whole, and then gone itself
        updating = held + (updated * FLOAT if is_low else 0)  # gradients go by the group, and copies come by the part
        updating += own.orthogonalized(updated)
        gradients = Gradients(
            weight, between=held, group=group, group_each=weight, ending=held + group, updating=updating
        )
        return States(device, {}, gradients, whole)
    # A bucket that is full has gone beyond its size.
    bucket = min(whole, reduced + own.largest) if own.num > 1 else 0
    converted = updated * (FLOAT - weight) + own.largest * weight  # copies, whose gradients go one by one
    updating = held + max(bucket * weight, (converted if is_low else 0) + own.orthogonalized(updated))
    return States(device, {}, Gradients(each=weight, between=held, updating=updating), whole)


def _stage12(own: _Network) -> States:
    """Masters and optimizer shared; at ZeRO 2 gradients too (zero/stage_1_and_2.py, deepspeed/grouped_gradients.py).

    So are ZeRO 1's in a single backward pass that reduces them meanwhile.
    """
    whole, shared, num, weight, adds_up = own.whole, own.shared, own.num, own.weight, own.adds_up
    device = {"weights": shared * num * weight, **own.updated(shared)}
    group = min(own.settings.reduce_bucket_size, whole)  # of parameters that are reduced and updated together
    sent = max(group, own.largest)  # a larger parameter is sent as it is, the others in a copy
    kept, part = shared * adds_up, -(-sent // num)
    stepping = kept + (part * FLOAT if adds_up < FLOAT else 0) + own.orthogonalized(part)
    several, overlapping = own.several, own.engine.overlaps
    if own.engine.file.stage == 1 and (several or adds_up > weight or not overlapping):
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
        single = own.largest * weight * (2 if own.largest % (2 * num) else 1)  # what is padded is copied too
        handled = max(2 * group * weight, single + added)
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
    return States(device, {}, gradients, shared)


def _stage12_offloaded(own: _Network) -> States:
    """Masters, optimizer and the reduced gradients on the host."""
    bucket, whole, shared, weight = own.settings.reduce_bucket_size, own.whole, own.shared, own.weight
    device = {"weights": shared * own.num * weight, "buffers": own.largest * weight}
    gradients_of = [shared * FLOAT, *(size * weight for size in own.touched if own.several)]
    buffers = [shared * weight, own.largest * weight]
    host = {**own.updated(shared), "gradients": sum(gradients_of), "buffers": sum(buffers)}
    # Each of these is a tensor, and so are the masters; the optimizer's tensors are not pinned.
    offload = own.settings.offload_optimizer
    spare = _spare([shared * FLOAT, *gradients_of, *buffers]) if offload and offload.pin_memory else 0
    sent = min(bucket, whole) * weight
    converted = min(own.largest, shared) * FLOAT if weight < FLOAT else 0
    copied, orthogonalized = max(sent, converted), own.orthogonalized(shared)
    if own.engine.file.stage == 1:
        updating = whole * weight + max(copied, orthogonalized)
        gradients = Gradients(weight, whole * weight, bucket * weight, updating=updating)
    else:
        flushing = copied if bucket < whole else 0
        ending = bucket * weight + copied
        gradients = Gradients(buffer=bucket * weight + flushing, ending=ending, updating=orthogonalized)
    return States(device, host, gradients, shared, spare=spare)


def _flat_gradients(own: _Network) -> States:
    """Masters and optimizer shared, and one tensor that all gradients are added to (bf16_optimizer.py)."""
    padded = own.shared * own.num
    device = {"weights": padded * own.weight, **own.updated(own.shared), "gradients": padded * own.adds_up}
    sent = 0
    if own.num > 1:
        group = max(own.settings.reduce_bucket_size, own.largest) if own.engine.file.stage else padded
        sent = min(padded, own.copied.reduced + group) * own.adds_up
    stepping = (own.shared * FLOAT if own.adds_up < FLOAT else 0) + own.orthogonalized(own.shared)
    return States(device, {}, Gradients(updating=max(sent, stepping)), own.shared)


def _stage3(own: _Network, largest_layer: int) -> States:
    """Everything shared; whole parameters for as long as they are used (zero/stage3.py)."""
    file, settings, weight, shared = own.engine.file, own.settings, own.weight, own.shared
    bucket = settings.reduce_bucket_size
    device, host = dict[str, int](), dict[str, int]()
    (host if file.offload_parameters != "none" else device)["weights"] = shared * weight
    step = min(settings.sub_group_size, shared)
    stepping = step * own.adds_up + (step * FLOAT if own.adds_up < FLOAT else 0) + own.orthogonalized(step)
    stepping = max(stepping, -(-own.largest // own.num) * _NORM)
    held = bucket * weight  # from the first backward pass of an update to its end, with the gradients
    if file.offload_optimizer == "none":
        held += shared * own.adds_up
    else:
        host["gradients"] = shared * (own.adds_up + FLOAT)
        stepping = own.orthogonalized(step)
    if file.uses_nvme:
        host["buffers"] = step * FLOAT * num_swap_buffers(file, own.engine.optimizer)
    else:
        (device if file.offload_optimizer == "none" else host).update(own.updated(shared))
    sent = min(bucket, own.whole) * weight
    if own.largest > bucket and own.largest % own.num:
        sent = own.largest * weight  # reduced by itself, and padded for that
    gradients = Gradients(
        beginning=held,
        between=held if own.several else 0,
        buffer=sent if bucket < own.whole else 0,
        ending=held + sent,
        updating=held + stepping,
    )
    # What is needed again within the distance stays, and the next parameters are under way.
    at_once = largest_layer if own.engine.section.compile == "layers" else own.largest
    most = min(own.whole, settings.max_reuse_distance + settings.prefetch_bucket_size + at_once)
    small = sum(size for size in own.sizes if size <= settings.param_persistence_threshold)
    each = weight if own.num > 1 else 0
    gathered = most * each, own.whole * each, at_once * each, small * each, each
    return States(device, host, gradients, shared, *gathered, *_pinned_at_stage3(own))


def _pinned_at_stage3(own: _Network) -> tuple[int, Counter[int]]:
    """``spare`` and ``built`` (zero/stage3.py, zero/partition_parameters.py); buffers for a drive are not torch's."""
    file, settings, weight = own.engine.file, own.settings, own.weight
    tensors, built = list[int](), Counter[int]()
    if file.offload_parameters != "none":
        tensors.append(own.shared * weight)  # pinned whatever the file says
        if settings.offload_param and settings.offload_param.pin_memory:
            built.update(pinned_bytes(part * weight) for part in _parts(own.sizes, own.num))
    if file.offload_optimizer != "none" and settings.offload_optimizer and settings.offload_optimizer.pin_memory:
        tensors.append(own.shared * own.adds_up)
        if not file.uses_nvme:
            tensors += [group * FLOAT for group in _sub_groups(own)]
    return _spare(tensors), built


def _sub_groups(own: _Network) -> Iterator[int]:
    """Elements of the groups in which parameters are updated, each complete with the one that fills it."""
    group = 0
    for part in _parts(own.sizes, own.num):
        group += part
        if group >= own.settings.sub_group_size:
            yield group
            group = 0
    if group:
        yield group
