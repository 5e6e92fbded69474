"""Checks of the GPUs: that torch can use them, that each rank has its own, and that its cores are near."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.doctor.host import nodes_of
from bigsgan.runtime import idle_gpus

PCI = Path("/sys/bus/pci/devices")
MOST_TAKEN, MOST_TAKEN_BYTES = 0.1, 3 << 29
"""Of a GPU's memory, the larger may be in use before a run: CUDA itself takes some hundred MiB, desktops a GiB."""


def devices(subject: Subject) -> Finding:
    """Each rank has a GPU of its own, which computes and has its memory free; or there is none on this machine."""
    asks_for_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    if asks_for_cpu or not torch.cuda.is_available():
        idle_gpus.refuse_idle_gpus(os.environ)
        subject.ranks.gather(None)
        why = "DS_ACCELERATOR is cpu" if asks_for_cpu else "no GPU here"
        return not_applicable(f"{why}; a run computes on the CPU")
    num, rank = torch.cuda.device_count(), subject.local_rank
    numbers = {"visible": num, "local_rank": rank, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
    own = str(torch.cuda.get_device_properties(rank).uuid) if rank < num else None
    by_rank = subject.ranks.gather(own)
    if own is None:
        remedy = "start at most one rank for each GPU; look at CUDA_VISIBLE_DEVICES"
        return failed(f"local rank {rank} has none of the {num} GPUs that it sees", remedy, numbers)
    sharing = [other for other, uuid in enumerate(by_rank) if uuid == own and other != subject.ranks.rank]
    if sharing:
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


def numa(subject: Subject) -> Finding:
    """A rank's cores are on the NUMA node of its GPU, or it is not bound to cores."""
    properties: Any = torch.cuda.get_device_properties(subject.local_rank)
    if not hasattr(properties, "pci_bus_id"):
        return not_applicable("this torch does not tell the place of a GPU")
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = int((PCI / place / "numa_node").read_text())
    except OSError:
        node = -1
    nodes = nodes_of(sorted(os.sched_getaffinity(0)))
    numbers = {"gpu": place, "gpu_node": node, "nodes_of_cores": nodes}
    if node < 0 or not nodes:
        return not_applicable("this machine does not tell the node of a GPU", numbers)
    if node not in nodes:
        remedy = f"bind the rank to cores of node {node} (numactl --cpunodebind={node}; Slurm: --gpu-bind=closest)"
        text = f"its cores are on NUMA node {nodes[0]}, its GPU on node {node}"
        return failed(text, remedy, numbers)
    return passed(f"GPU and cores are on NUMA node {node}", numbers)
