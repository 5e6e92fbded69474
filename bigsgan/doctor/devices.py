"""Checks of the GPUs: that torch can use them, and that each rank has its own."""

from __future__ import annotations

import os

import torch

from bigsgan.bench.host import processor
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.errors import counted
from bigsgan.runtime import idle_gpus

MOST_TAKEN, MOST_TAKEN_BYTES = 0.1, 3 << 29
"""Share and bytes of a GPU's memory, the larger of which may be in use: CUDA takes some hundred MiB, desktops a GiB."""


def devices(subject: Subject) -> Finding:
    """Check that each rank has a GPU of its own, which computes and has its memory free."""
    asks_for_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    if asks_for_cpu or not torch.cuda.is_available():
        idle_gpus.refuse_idle_gpus(os.environ)
        subject.ranks.gather(None)
        why = "DS_ACCELERATOR is cpu" if asks_for_cpu else "no GPU here"
        name = f"{processor() or 'CPU'}, {counted(len(os.sched_getaffinity(0)), 'core')}"
        return not_applicable(f"{why}; a run computes on the CPU", {"name": name})
    num, rank = torch.cuda.device_count(), subject.local_rank
    numbers = {"visible": num, "local_rank": rank, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
    own = str(torch.cuda.get_device_properties(rank).uuid) if rank < num else None
    by_rank = subject.ranks.gather(own)
    if own is None:
        remedy = "start at most one rank for each GPU; look at CUDA_VISIBLE_DEVICES"
        return failed(f"local rank {rank} has none of the {num} GPUs that it sees", remedy, numbers)
    sharing = [other for other, uuid in enumerate(by_rank) if uuid == own and other != subject.ranks.rank]
    if sharing and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":  # as NCCL asks, from 2.30 on
        remedy = "show each rank a GPU of its own, or all ranks all GPUs (CUDA_VISIBLE_DEVICES, Slurm: --gpus-per-task)"
        return failed(f"GPU {own} is rank {sharing[0]}'s too", remedy, numbers, len(sharing))
    free, total = torch.cuda.mem_get_info(rank)
    name, taken = torch.cuda.get_device_name(rank), 1 - free / total
    numbers |= {"name": name, "uuid": own, "free_bytes": free, "total_bytes": total}
    if (found := float(torch.full((1024,), 2.0, device=f"cuda:{rank}").sum())) != 2048:
        return failed(f"{name} adds 1,024 twos to {found}", "take this GPU out of use", numbers)
    if total - free > max(MOST_TAKEN * total, MOST_TAKEN_BYTES):
        text = f"{taken:.0%} of the memory of {name} is in use"
        return failed(text, "end the processes that `nvidia-smi` shows", numbers, taken)
    return passed(f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free", numbers, taken)
