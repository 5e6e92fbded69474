"""Ranks, devices and the few collectives that bigsgan makes itself.

Besides engines/, the only module that imports deepspeed.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.runtime import board, division, launched, memory, roster
from bigsgan.runtime.idle_gpus import refuse_idle_gpus

PATIENCE_HOURS = 3
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.14 on
_SPEAKER_KEY, _FAILURE_KEY = "bigsgan/speaker", "bigsgan/failure"
_LOOK_ROUND = timedelta(seconds=5)
"""How long a rank waits for others before it looks whether they are still there."""

_MOST_SENT_TO_ALL = 1 << 16
"""Bytes of a rank's object that each rank may get to see."""

_patience: timedelta | None = None  # of a collective, as ``initialize`` was given it

_process_store = dist.HashStore()
"""Where a run of one process keeps what several keep in the store of rank 0 or of their launcher."""


def initialize(patience_seconds: float | None = None) -> None:
    """Join the process group that the launcher describes, or make one of a single rank without a launcher.

    DeepSpeed's shared-memory all-reduce for CPUs is left out: it would compile for minutes before the first step
    (seen in 0.19.8, comm/torch.py), and a killed build would block every later run.

    A collective waits ``patience_seconds`` for a rank that does not come, or DeepSpeed's ten minutes.

    Raises:
        UserError: There are fewer devices than ranks, or GPUs that torch cannot use, or ranks cannot meet at
            MASTER_ADDR and MASTER_PORT.
    """
    if not os.environ.get("RANK"):  # DeepSpeed asks for all of them; nobody meets at that port
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if get_accelerator().device_name() == "cpu":
        refuse_idle_gpus(os.environ)
    else:
        devices = get_accelerator().device_count()
        if devices == 0:
            problem = f"must be a device of {socket.gethostname()}"
            name = get_accelerator().device_name()
            raise UserError("DS_ACCELERATOR", name, problem, "run `unset DS_ACCELERATOR`", "an environment variable")
        if (num_sharing := launched.num_sharing(os.environ)) > devices:
            remedy = "start at most one rank for each device"
            problem = f"must be at most {devices}, the number of devices of this host"
            raise UserError("LOCAL_SIZE", num_sharing, problem, remedy)
        # CUDA has 8 queues otherwise. An inner stage of two pipelines has more streams, and one that waits for a
        # neighbour would hold up another that shares its queue.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # torch warns of messages that wait for others of their group: all ranks have one order of them (exchange.py).
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        get_accelerator().set_device(local_rank())
    if (num_threads := _num_threads()) is not None:
        torch.set_num_threads(num_threads)
    global _patience
    _patience = None if patience_seconds is None else timedelta(seconds=patience_seconds)
    patience: dict[str, Any] = {} if _patience is None else {"timeout": _patience}
    if (os.environ.get("WORLD_SIZE") or "1") == "1" and not dist.is_initialized():
        # In this process alone: a store for others would listen on all interfaces.
        backend = get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=_process_store, rank=0, world_size=1, **patience)
    store = _meeting_place()
    deepspeed.init_distributed(verbose=False, **patience)
    del store  # torch's own has shared it since


def num_cores() -> int:
    """Return the number of this rank's cores: those that Slurm has bound it to, or its part of the host's."""
    return max(1, len(os.sched_getaffinity(0)) // (1 if _is_bound() else launched.local_size(os.environ)))


def _is_bound() -> bool:
    """Whether this rank is a task of Slurm's with cores of its own; ranks of other launchers share those of a job."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    if tasks is None or tasks != os.environ.get("WORLD_SIZE"):
        return False
    return len(os.sched_getaffinity(0)) < launched.number("SLURM_CPUS_ON_NODE", default=os.cpu_count() or 1, least=1)


def _num_threads() -> int | None:
    """Return this rank's number of cores, or None where the user or the launcher has chosen the number of threads.

    The deepspeed launcher unsets OMP_NUM_THREADS, so that every rank would take all cores; torchrun sets it to 1, with
    which the first weights of a large network take long, and a user's 1 cannot be told from that. Slurm binds each rank
    to its own cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS")
    is_torchruns = asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return None if _is_bound() or (asked and not is_torchruns) else num_cores()


def extend_patience() -> None:
    """Let all groups of this rank wait as long as that of all ranks, for which ``initialize`` was given it.

    Groups do not inherit it: torch would end the process after 10 minutes on NCCL and 30 on gloo. No group's own
    patience becomes less.
    """
    if _patience is not None and _patience > dist.default_pg_timeout:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # until torch 2.13
        for group in list(dist.distributed_c10d._world.pg_map):
            set_timeout(_patience, group)


def rank() -> int:
    """Return this process's rank in the job, or in its part of it inside ``division.within_part``."""
    return int(division.world().rank() if dist.is_initialized() else os.environ.get("RANK") or 0)


def local_rank() -> int:
    """Return the number of this process's device: its rank on its host, or 0 where it sees a device of its own."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def world_size() -> int:
    """Return the number of ranks of the job, or of the part."""
    return int(division.world().size()) if dist.is_initialized() else 1


def device() -> torch.device:
    """Return this rank's device."""
    name = get_accelerator().device_name()
    return torch.device("cpu") if name == "cpu" else torch.device(name, local_rank())


def barrier() -> None:
    """Wait for all ranks."""
    with division.scope():
        # NCCL would guess the device from the rank, and hang where hosts differ.
        own = device()
        dist.barrier(device_ids=[own.index] if own.type == "cuda" and dist.get_backend() == "nccl" else None)


def patient_barrier() -> Callable[[], None]:
    """Return what waits for all ranks, once, for hours; ``barrier`` gives up after DeepSpeed's ten minutes.

    Ranks are counted in the store that they met at: a process group would connect each of them with all others. It has
    a name of its own, as a launcher may keep its store for a restart. A collective.
    """
    size = world_size()
    if size == 1:
        return lambda: None
    come = open_board(f"barrier/{from_rank_zero(uuid.uuid4().hex)}")

    def wait() -> None:
        latest = time.monotonic() + 3600 * PATIENCE_HOURS
        if come.add("come", 1) == size:
            come.set("all", "")
        while True:
            try:
                come.wait(["all"], _LOOK_ROUND)
                return
            except dist.DistStoreError:  # not yet
                if roster.gone() or another_rank_spoke() or time.monotonic() > latest:
                    raise

    return wait


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over all ranks, or those of a group, in place."""
    if world_size() > 1:
        with division.scope(group):
            dist.all_reduce(tensor, group=group)
    return tensor


def largest_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace a tensor by the elementwise largest of all ranks, or those of a group."""
    if world_size() > 1:
        with division.scope(group):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)


def broadcast(tensors: Iterable[Tensor], source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy one rank's tensors to all ranks, or those of a group, in place."""
    if world_size() > 1:
        with division.scope(group):
            for tensor in tensors:
                dist.broadcast(tensor, source, group=group)


def gather_parts(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``whole`` with the parts of all ranks, or of those of a group, in their order; ``own`` is this rank's."""
    with division.scope(group):
        _all_gather(whole, own, group=group)


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's picklable ``value`` on all ranks."""
    return from_rank(0, value)


def from_rank(source: int, value: Any) -> Any:
    """Return one rank's picklable ``value`` on all ranks."""
    values = [value]
    if world_size() > 1:
        with division.scope():
            dist.broadcast_object_list(values, source, device=device())
    return values[0]


def gather_objects(value: Any) -> list[Any] | None:
    """Return all ranks' picklable values, by rank, on rank 0; None on the others.

    NCCL's gather would connect rank 0 with each other rank. So small values go to all ranks, round the ring in which
    these are connected.
    """
    if world_size() == 1:
        return [value]
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    with division.scope():
        sizes = torch.empty(world_size(), dtype=torch.int64, device=device())
        _all_gather(sizes, sizes.new_full((1,), len(pickled)))
        if (largest := int(sizes.max())) > _MOST_SENT_TO_ALL:
            values = [None] * world_size() if rank() == 0 else None
            dist.gather_object(value, values)
            return values
        own = torch.zeros(largest, dtype=torch.uint8, device=device())
        own[: len(pickled)] = pickled
        whole = own.new_empty(len(sizes) * largest)
        _all_gather(whole, own)
    if rank() != 0:
        return None
    parts = whole.view(len(sizes), largest).cpu().numpy()
    return [pickle.loads(part[:size].tobytes()) for part, size in zip(parts, sizes.tolist(), strict=True)]


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is set on any rank."""
    return bool(total(float(flag)))


def total(value: float) -> float:
    """Return the sum of the ranks' values."""
    return float(sum_over_ranks(torch.tensor(value, dtype=torch.float64, device=device())))


def open_board(name: str) -> dist.Store:
    """Connect once more to the store that the ranks met at, as the main connection may hang.

    A board has the same name on all ranks.

    Raises:
        RuntimeError: Its host does not answer.
    """
    return board.connect(name) if world_size() > 1 else dist.PrefixStore(f"bigsgan/{name}", _process_store)


def claim_message() -> bool:
    """Return True on exactly one of the ranks that call this, so that one message is printed and not many."""
    num = _spoken(1)
    if num is None and not dist.is_initialized():
        return rank() == 0
    return num == 1  # not where the store's host is gone already: that rank has ended, so it has spoken


def claim_failure() -> bool:
    """Return True on the first rank that calls this to tell of a failure, and where nobody can be asked any more."""
    return not dist.is_initialized() or _spoken(1, _FAILURE_KEY) in (1, None)


def another_rank_spoke() -> bool | None:
    """Return whether a rank has printed its message and ended, so that collectives fail on all others.

    None where nobody can be asked: the store has ended too, with rank 0, which may have spoken or been killed.
    """
    if not dist.is_initialized():
        return False
    return None if (num := _spoken(0)) is None else num > 0


def _spoken(more: int, key: str = _SPEAKER_KEY) -> int | None:
    """Return how many ranks have spoken, with ``more`` of them; None where the store's host is gone."""
    try:
        if not dist.is_initialized() and launched.world_size() > 1:
            return board.of_job(board.PATIENCE).add(key, more)  # before the ranks have met
        return (division.store() if dist.is_initialized() else dist.HashStore()).add(key, more)
    except (RuntimeError, KeyError):  # nobody answers, or no launcher says where
        return None


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether an error of a collective says that another rank, or the way to it, is gone."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def leave() -> None:
    """Leave the process group at the end of a run."""
    division.unite()
    if dist.is_initialized():
        ended = deepspeed.comm if deepspeed.comm.is_initialized() else dist  # whose start may have failed
        ended.destroy_process_group()  # DeepSpeed's forgets its own groups too, which the process's next run would use


def synchronize() -> None:
    """Wait until the device has done all it was given. For timing, never inside the step."""
    if device().type != "cpu":
        get_accelerator().synchronize()


def synchronize_stream() -> None:
    """Wait until the device has done what it was given to compute, and not for messages under way beside it."""
    if device().type != "cpu":
        get_accelerator().current_stream().synchronize()


def peak_memory_bytes() -> int:
    """Return the most memory this rank has held: of the device, or of the process on a CPU."""
    if device().type == "cpu":
        return memory.resident_bytes(peak=True)
    return int(get_accelerator().max_memory_allocated())


def forget_peak_memory() -> None:
    """Reset a device's ``peak_memory_bytes``, after releasing the unused memory of its allocator."""
    if device().type != "cpu":
        get_accelerator().empty_cache()
        get_accelerator().reset_peak_memory_stats()


def _meeting_place() -> dist.Store | None:
    """Open the store that rank 0 keeps for all ranks, on rank 0, which torch then shares. torchrun keeps its own.

    Raises:
        UserError: It cannot listen at MASTER_PORT, or MASTER_ADDR leads elsewhere.
    """
    if dist.is_initialized() or not launched.keeps_store(rank()):
        return None
    host, port = launched.meeting_place()
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=board.PATIENCE, multi_tenant=True
        )
    except RuntimeError as error:
        raise launched.unfit_meeting_place(host, port, error) from error
