"""The private parts of DeepSpeed that bigsgan reads and calls; the other files here replace parts of it.

Seen in DeepSpeed 0.19.8; tests/distributed/test_deepspeed_internals.py fails first if a later version changes them.
Files are under deepspeed/runtime/. Parameters are typed Any where DeepSpeed adds attributes of its own to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from bigsgan.config.placement import Placement
from bigsgan.engines.base import Piece
from bigsgan.runtime.atomic import fsync
from bigsgan.runtime.division import partition

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_PARTITIONS = (
    "fp32_partitioned_groups_flat",  # ZeRO 3: zero/stage3.py
    "single_partition_of_fp32_groups",  # ZeRO 1 and 2: zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # bf16 in a pipeline, or at ZeRO 1 with float32 accumulation: bf16_optimizer.py
)
"""Attributes of DeepSpeed's optimizers that hold this rank's partition of the masters."""

_PINNED_BY = -1
"""Marks a parameter as used by bigsgan in ``ds_active_sub_modules``, which holds ids of modules (all >= 0)."""


@contextmanager
def pinned(parameters: Iterable[Any]) -> Iterator[None]:
    """Keep ZeRO 3's parameters gathered while a double backward runs.

    Nodes that double backward creates have no hook that gathers, so they would see empty parameters (zero/
    parameter_offload.py). ``release_sub_module`` keeps parameters that a sub-module still uses
    (zero/partitioned_param_coordinator.py); this adds one more user. Without ZeRO 3 it does nothing.
    """
    sharded = sorted((p for p in parameters if hasattr(p, "ds_id")), key=lambda p: p.ds_id)
    if not sharded:
        yield
        return
    sharded[0].all_gather(param_list=sharded)
    for parameter in sharded:
        parameter.ds_active_sub_modules.add(_PINNED_BY)
    try:
        yield
    finally:
        for parameter in sharded:
            parameter.ds_active_sub_modules.clear()
        sharded[0].partition(param_list=sharded)


def masters(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return the float32 tensors that this rank's optimizer updates, in a fixed order; between updates they are live.

    A master that is swapped out to NVMe is returned as a mapping of its swap file. The kernel reads pages when they are
    used and may drop them again, so the mapping needs no memory. Take a new one after each update.
    """
    found = []
    for key in keys(engine):
        files = _swap_files(engine, key)
        found.append(_mapped(files[0]) if files else key)
    return found


def keys(engine: DeepSpeedEngine) -> list[Any]:
    """Return the optimizer's keys of its state, in the order of ``masters``; these tensors are empty if swapped out."""
    optimizer = engine.optimizer
    for attribute in _PARTITIONS:
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    if hasattr(optimizer, "fp32_groups"):  # ZeRO 0, bf16: fp16/unfused_optimizer.py
        return [parameter for group in optimizer.fp32_groups for parameter in group]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]  # ZeRO 0, fp32


def has_whole_masters(engine: DeepSpeedEngine) -> bool:
    """Whether each replica holds all masters, not a partition: at ZeRO 0, except bf16 in a pipeline."""
    return not any(hasattr(engine.optimizer, attribute) for attribute in _PARTITIONS)


def pieces(engine: DeepSpeedEngine, names: dict[int, str], rank: int) -> list[list[Piece]]:
    """Return the pieces in each of ``masters``; ``names`` maps id(parameter) to its name, and others have no piece."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return [_stage3_pieces(group, names, rank) for group in optimizer.fp16_groups]
    if hasattr(optimizer, "bit16_groups") or hasattr(optimizer, "fp32_groups_flat_partition"):
        groups = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
        return [_mapped_pieces(group, names) for group in groups]
    if hasattr(optimizer, "fp32_groups"):
        parameters = [p for group in optimizer.fp16_groups for p in group]
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [[Piece(names[id(p)], 0, p.numel(), 0)] if id(p) in names else [] for p in parameters]


def _stage3_pieces(group: list[Any], names: dict[int, str], rank: int) -> list[Piece]:
    found, start = [], 0
    for parameter in group:
        size = parameter.partition_numel()  # equal on all ranks: the last ones may hold padding
        offset = rank * size
        numel = max(0, min(size, parameter.ds_numel - offset))
        if numel:
            found.append(Piece(names[id(parameter)], offset, numel, start))
        start += size
    return found


def _mapped_pieces(group: list[Any], names: dict[int, str]) -> list[Piece]:
    found = []
    for parameter in group:
        mapping = parameter._hp_mapping  # None if no part of the parameter lies on this rank
        if mapping is not None and id(parameter) in names:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            found.append(Piece(names[id(parameter)], low.start, low.numel, high.start))
    return found


@torch.no_grad()
def publish(engine: DeepSpeedEngine) -> None:
    """Copy the masters into the parameters of the forward pass. Every rank calls this."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):
        # Copies still gathered since the last forward pass would hide the new values.
        engine.empty_partition_cache()
        for i, (key, master) in enumerate(zip(keys(engine), masters(engine), strict=True)):
            _flush(_swap_files(engine, key))
            optimizer.fp16_partitioned_groups_flat[i].data.copy_(master.data)
            optimizer._unflatten_partitioned_parameters(i)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(low, high, strict=True):
                parameter.data.copy_(master.data)


def optimizer_states(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    """Return the base optimizer's live state of each of ``masters``."""
    found = []
    for key in keys(engine):
        state = engine.basic_optimizer.state.get(key, {})
        if files := _swap_files(engine, key):
            swapped = {id(file.tensor): file for file in files}
            state = {k: _mapped(swapped[id(v)]) if id(v) in swapped else v for k, v in state.items()}
        found.append(state)
    return found


def set_optimizer_state(engine: DeepSpeedEngine, index: int, state: dict[str, Any]) -> None:
    """Replace the base optimizer's state of one of ``masters``: flat tensors, and the number of steps."""
    key = keys(engine)[index]
    files = _swap_files(engine, key)
    if not files:
        state = {k: v.view(key.shape) if isinstance(v, Tensor) else v for k, v in state.items()}
    if "step" in state and isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        state["step"] = _step_of(engine.basic_optimizer, key, float(state["step"]))
    if not files:
        engine.basic_optimizer.state[key] = state
        return
    _flush(files)
    swapper = engine.optimizer.optimizer_swapper
    info = swapper.swap_params_info[key.ds_id]
    info.tensors, info.has_state_tensors = info.tensors[:1], False  # OptimizerSwapper.purge_state, of one master
    swapper.swap_in_optimizer_state(key, async_parameter=None)
    engine.basic_optimizer.state[key] = state
    swapper.swap_out_optimizer_state(key, async_swap=False)  # finds the new tensors and writes them
    key.grad = None  # it lay in a buffer of the swapper


def _step_of(optimizer: torch.optim.Optimizer, key: Tensor, step: float) -> Any:
    """Return the number of steps in the optimizer's form: a tensor for torch's, an int for DeepSpeedCPUAdam."""
    optimizer = getattr(optimizer, "rest", optimizer)  # Muon's, for what is no matrix
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.RMSprop)):
        return int(step)
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.tensor(step, dtype=torch.float32, device=key.device if on_device else "cpu")


def gradient_buffers(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return ZeRO 3's gradient buffers on the device (zero/stage3.py), which it keeps between backward passes too."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "grad_partitions_flat_buffer"):
        return []
    found = [bucket.buffer for bucket in optimizer.ipg_buckets.values() if bucket.buffer is not None]
    return found if optimizer.offload_optimizer else [*found, optimizer.grad_partitions_flat_buffer]


def take(buffers: Iterable[Tensor]) -> None:
    """Give memory to tensors that were released, and fill these with 0."""
    for tensor in buffers:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()


def release(buffers: Iterable[Tensor]) -> None:
    """Free the tensors' memory; views of them stay views."""
    for tensor in buffers:
        tensor.untyped_storage().resize_(0)


def keep_gradients_in_memory(engine: DeepSpeedEngine) -> None:
    """Have the swapper of an engine with NVMe offload hold gradients on the host until the update.

    By itself it writes gradients of 1 MiB or more to files, and reads them back to their place in the sub-group.
    O_DIRECT refuses addresses that a disk's block does not divide, DeepSpeed ignores the failure (csrc/aio/common/
    deepspeed_aio_common.cpp), and updates with whatever the buffer held (swap_tensor/partitioned_optimizer_swapper.py:
    _swap_in_pinned_gradients). It holds smaller gradients on the host; here it holds all of them.
    """
    swapper = engine.optimizer.optimizer_swapper

    def hold(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Tensor]) -> None:
        held = swapper.swap_params_info[parameter.ds_id].unswapped_gradients
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            held[offset] = gradient.cpu()

    swapper.swap_out_gradients = hold


class _SwapFile(NamedTuple):
    """The file of a tensor between updates; ``tensor`` itself is then empty, or a view of a reused buffer."""

    path: str
    numel: int
    tensor: Tensor


def _swap_files(engine: DeepSpeedEngine, key: Any) -> list[_SwapFile]:
    """Return the files of one master and, after it, of its optimizer state; none if they stay in memory.

    swap_tensor/optimizer_utils.py: an OptimizerStateSwapInfo for each sub-group of 1 MiB or more, in it a
    SwapTensorContext for each file. A file holds the raw elements, padded to a multiple of 1 KiB.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    info = None if swapper is None else swapper.swap_params_info.get(key.ds_id)
    return [] if info is None else [_SwapFile(t.swap_path, info.numel(), t.compute_tensor) for t in info.tensors]


def _mapped(file: _SwapFile) -> Tensor:
    """Map the file into memory: writes to the tensor are writes to the file.

    DeepSpeed reads and writes with O_DIRECT, past the page cache. It writes only during updates, when Linux drops the
    overwritten pages from the cache. Writes to the tensor must be flushed before the next update.
    """
    return torch.from_file(file.path, shared=True, size=file.numel, dtype=torch.float32)


def _flush(files: Iterable[_SwapFile]) -> None:
    for file in files:
        fsync(Path(file.path))


def loss_scale(engine: DeepSpeedEngine) -> float:
    """Return the factor on losses before the backward pass, of an engine in fp16."""
    return float(engine.optimizer.loss_scale)


def loss_scaler_numbers(engine: DeepSpeedEngine) -> dict[str, float]:
    """Return the loss scaler's changing numbers (fp16/loss_scaler.py); a static scaler has only its scale."""
    state = vars(engine.optimizer.loss_scaler)
    return {key: state[key] for key in _SCALER_STATE if key in state}


def set_loss_scaler_numbers(engine: DeepSpeedEngine, values: dict[str, float]) -> None:
    """Restore the numbers that ``loss_scaler_numbers`` returned."""
    state = vars(engine.optimizer.loss_scaler)
    for key, value in values.items():
        if key in state:
            state[key] = type(state[key])(value)


def set_counters(engine: DeepSpeedEngine, updates: int, skipped: int) -> None:
    """Continue the engine's own counting after ``updates`` updates, of which ``skipped`` were skipped."""
    engine.global_steps = updates
    engine.skipped_steps = skipped
    engine.micro_steps = updates * engine.gradient_accumulation_steps()


class _Topology(PipeDataParallelTopology):
    """DeepSpeed's own order of ranks, or the one with stages from the last rank to the first, by ``Placement``.

    The base class keeps {coordinates: rank} in ``mapping``, which all of its methods look up (pipe/topology.py).
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement.num_stages, placement.num_replicas)
        self.mapping: dict[Any, int] = {c: placement.rank(c.pipe, c.data) for c in self.mapping}


def pipeline_module(part: nn.Module, placement: Placement, rank: int) -> PipelineModule:
    """Wrap this rank's stage for ``deepspeed.initialize``, which makes a PipelineEngine of it. Every rank calls this.

    Each stage is one layer to PipelineModule. Other ranks' stages are functions, which it does not register.
    """
    layers: list[Any] = [_computed_elsewhere] * placement.num_stages
    layers[placement.stage(rank)] = part
    groups = [partition(parts) for parts in (placement.pipelines(), placement.replicas())]
    with redirect_stdout(StringIO()), _handing_out(groups):  # it prints a seed that nothing uses
        return PipelineModule(layers, topology=_Topology(placement), partition_method="uniform")


@contextmanager
def _handing_out(groups: Sequence[Any]) -> Iterator[None]:
    """Let DeepSpeed have these process groups where it would make some of the same ranks, and no others.

    PipelineModule and its grid make one of all ranks, and one after the other those of each pipeline twice, of the
    replicas of each stage, and of each rank alone, of which only layers split over ranks make use: thousands on each
    of 1,024 ranks, and each is a split of all ranks over NCCL (pipe/module.py, pipe/topology.py).
    """
    own = {tuple(range(dist.get_world_size())): dist.group.WORLD}
    own |= {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    new_group = deepspeed.comm.new_group
    deepspeed.comm.new_group = lambda ranks: own.get(tuple(sorted(ranks)), dist.GroupMember.NON_GROUP_MEMBER)
    try:
        yield
    finally:
        deepspeed.comm.new_group = new_group


def _computed_elsewhere(*carry: Tensor) -> None:
    raise AssertionError("this stage is another rank's")


def pipe_group(engine: PipelineEngine) -> Any:
    """Return the process group of the stages of this rank's replica (pipe/topology.py)."""
    return engine.grid.get_pipe_parallel_group()


def replica_group(engine: PipelineEngine) -> Any:
    """Return the process group of the replicas of this rank's stage (pipe/topology.py)."""
    return engine.grid.get_data_parallel_group()


def has_optimizer_wrapper(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed wraps the optimizer in one of its own, which checks for overflow and knows the norm."""
    return engine.optimizer is not engine.basic_optimizer


def clip_with(engine: DeepSpeedEngine, clip: Callable[[], None]) -> None:
    """Let ``clip`` clip the gradients of ZeRO 0 in float32.

    DeepSpeed's own function (engine.py) takes the norm again, that of a pipeline's stage alone, and waits for numbers
    from the device.
    """
    engine.clip_fp32_gradients = clip


def accumulate_gradients(engine: PipelineEngine) -> None:
    """Add the gradients of a backward pass to the float32 ones, if there are any; those of a placeholder are 0.

    An engine's own backward pass ends with this: for bf16 in bf16_optimizer.py, for fp16 in zero/stage_1_and_2.py.
    """
    if (placeholder := getattr(engine.module, "placeholder", None)) is not None:
        for parameter in placeholder.parameters():
            parameter.grad = torch.zeros_like(parameter)  # without one, the norm in bf16_optimizer.py would fail
    if isinstance(engine.optimizer, BF16_Optimizer):
        engine.optimizer.update_hp_grads(clear_lp_grads=True)
    elif getattr(engine.optimizer, "use_grad_accum_attribute", False):
        engine.optimizer.fill_grad_accum_attribute()


def reduce_pipeline_gradients(engine: PipelineEngine) -> None:
    """Average the gradients of a whole update over the replicas: the schedule's ReduceGrads (pipe/engine.py)."""
    engine._exec_reduce_grads()


def step_pipeline(engine: PipelineEngine) -> None:
    """Update the parameters: the schedule's OptimizerStep (pipe/engine.py)."""
    engine._exec_optimizer_step()
