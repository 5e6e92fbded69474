"""Checks of the GPUs: that torch can use them, that each rank has its own, and that its cores are near it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from bigsgan.bench.host import processor
from bigsgan.doctor import links
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.doctor.host import nodes_of
from bigsgan.runtime import idle_gpus

PCI = Path("/sys/bus/pci/devices")
PINNED_BYTES, _COPIES = 128 << 20, 4
"""Bytes that each rank pins, and how often it copies them."""

MOST_TAKEN, MOST_TAKEN_BYTES = 0.1, 3 << 29
"""Share and bytes of a GPU's memory, the larger of which may be in use: CUDA takes some hundred MiB, desktops a GiB."""


def devices(subject: Subject) -> Finding:
    """Check that each rank has a GPU of its own, which computes and has its memory free."""
    asks_for_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    if asks_for_cpu or not torch.cuda.is_available():
        idle_gpus.refuse_idle_gpus(os.environ)
        subject.ranks.gather(None)
        why = "DS_ACCELERATOR is cpu" if asks_for_cpu else "no GPU here"
        name = f"{processor() or 'CPU'}, {len(os.sched_getaffinity(0))} cores"
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


def numa(subject: Subject) -> Finding:
    """Check that a rank's cores are on the NUMA node of its GPU, or that it is not bound to cores."""
    place = place_of(subject.local_rank)
    if not place:
        return not_applicable("this torch does not tell the place of a GPU")
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


def place_of(device: torch.device | int) -> str:
    """A GPU's address on the PCI bus, such as ``0000:1b:00.0``; empty if this torch does not tell it."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def pinned(subject: Subject) -> Finding:
    """Pin memory of the host, as loading and offload do, and copy it to the rank's GPU and back, all ranks at once."""
    try:
        found, problem = copy_rates(torch.device("cuda", subject.local_rank)), ""
    except RuntimeError as error:  # CUDA's errors, also the one for memory that cannot be pinned
        found, problem = {}, " ".join(str(error).split())[:200]
    subject.ranks.gather(None)
    numbers: dict[str, Any] = {**found, "pinned_bytes": PINNED_BYTES}
    if problem:
        remedy = "run `ulimit -l unlimited` before the launcher (docker run --ulimit memlock=-1), or free memory"
        return failed(f"{PINNED_BYTES >> 20} MiB cannot be pinned and copied: {problem}", remedy, numbers)
    to, back = found["to_device_bytes_per_second"], found["to_host_bytes_per_second"]
    text = f"{PINNED_BYTES >> 20} MiB are pinned, and copied at {to / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} back"
    link = links.of_bus(place_of(subject.local_rank))
    if link is not None:
        numbers |= {"link": link.name, "link_bytes_per_second": link.rate}
        text += f"; {link.name} gives {link.rate / 1e9:.1f}"
    return passed(text, numbers, -min(to, back))


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second of copies between pinned memory and a device: the fastest of a few."""
    held = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    there = torch.empty_like(held, device=device)
    found = {}
    for name, target, source in (("to_device", there, held), ("to_host", held, there)):
        seconds = []
        for _ in range(_COPIES):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        found[f"{name}_bytes_per_second"] = PINNED_BYTES / min(seconds)
    if int(held[-1]) != 1:
        raise RuntimeError(f"a copy came back as {int(held[-1])}, not 1")
    return found
