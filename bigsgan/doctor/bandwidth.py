"""Measures communication within hosts and between them, and compares it with the rates of their links."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bigsgan.bench.comm import sent_in_ring
from bigsgan.bench.measure import fastest
from bigsgan.doctor import links
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.doctor.devices import place_of
from bigsgan.runtime import comm

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
LEAST_SHARE = 0.5
"""Least share of a link's rate for NCCL's fastest collective at the largest size; 0.7 and more are usual."""

REMEDY = (
    "compare with nccl-tests (all_reduce_perf), and look at NCCL_DEBUG=INFO for the transport that NCCL chose, at "
    "`nvidia-smi topo -m`, at links that are down, and at what else uses the network"
)


class Together(NamedTuple):
    """This rank's group, which communicates while the other groups do."""

    name: str  # where its ranks are
    ranks: Sequence[int]
    group: dist.ProcessGroup | None  # torch's; None for all ranks
    link: tuple[links.Link, int] | None  # link between the ranks, and how many ranks share it


def collectives(subject: Subject) -> Finding:
    """Time all-reduce, all-gather and reduce-scatter by size over all ranks, within hosts and between hosts.

    All groups run at once. A rate counts the bytes that a rank sends in a ring, so it compares with the link's.
    """
    found: list[dict[str, Any]] = []
    backend, texts, low = dist.get_backend(), [], ""
    for each in _groups(subject, backend):
        measured = [dict(record, group=each.name, ranks=list(each.ranks)) for record in _measured(each)]
        found += measured
        rates = {record["collective"]: record["rate"] for record in measured if record["bytes"] > SIZES[-1] // 2}
        text = f"{each.name}: " + ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
        if each.link is not None:
            link, sharing = each.link
            expected, best = link.rate / sharing, max(rates.values())
            share = best / expected
            text += f", {share:.0%} of {link.name}'s {expected / 1e9:.3g} GB/s a rank"
            for record in measured:
                record |= {"link": link.name, "expected_rate": expected}
            if share < LEAST_SHARE:
                low = low or f"{each.name}: {best / 1e9:.2f} GB/s a rank, {share:.0%} of {link.name}'s rate"
        texts.append(text)
    slowest = min(record["rate"] for record in found if record["bytes"] > SIZES[-1] // 2)
    latency = min(record["seconds"] for record in found)
    numbers = {"backend": backend, "sizes": found, "least_share": LEAST_SHARE}
    text = f"{'; '.join(texts)}; at least {1e6 * latency:.0f} us, over {backend}"
    if low and backend == "nccl":
        return failed(f"{low}; {text}", REMEDY, numbers, -slowest)
    return passed(text + (f"; less than half of a link's rate ({low})" if low else ""), numbers, -slowest)


def _groups(subject: Subject, backend: str) -> Iterator[Together]:
    """This rank's groups: all ranks and, with several hosts, those of its host, and one rank of each host."""
    hosts = subject.ranks.hosts
    by_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    on_gpu = comm.device().type == "cuda"
    own = links.of_gpu(place_of(comm.device())) if on_gpu else None
    within, between = (own, 1) if own else None, links.of_host(backend, os.environ)
    sharing = len(subject.same_host())
    if len(by_host) == 1:
        yield Together("all ranks", range(len(hosts)), None, within)
        return
    yield Together("all ranks", range(len(hosts)), None, None)
    if max(map(len, by_host)) > 1:
        yield from _made("within a host", by_host, within)
    crossing = [list(ranks) for ranks in zip(*by_host, strict=False)]
    left = sorted(set(range(len(hosts))) - {rank for ranks in crossing for rank in ranks})
    yield from _made("between hosts", [*crossing, *([rank] for rank in left)], (between, sharing) if between else None)


def _made(name: str, groups: Sequence[Sequence[int]], link: tuple[links.Link, int] | None) -> Iterator[Together]:
    """Make disjoint groups, on every rank, and yield this rank's unless the rank is alone in it."""
    made: list[tuple[Sequence[int], Any]] = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    try:
        for ranks, group in made:
            if comm.rank() in ranks and len(ranks) > 1:
                yield Together(name, ranks, group, link)
    finally:
        comm.barrier()
        for ranks, group in made:
            if comm.rank() in ranks:
                dist.destroy_process_group(group)


def _measured(together: Together) -> Iterator[dict[str, Any]]:
    num, device, group = len(together.ranks), comm.device(), together.group
    for num_bytes in SIZES:
        whole = torch.ones(num_bytes // 4 // num * num, device=device)
        part = torch.ones(whole.numel() // num, device=device)
        operations: dict[str, tuple[int, Callable[[], Any]]] = {
            "all-reduce": (2, lambda: dist.all_reduce(whole.zero_(), group=group)),  # noqa: B023
            "all-gather": (1, lambda: dist.all_gather_into_tensor(whole, part, group=group)),  # noqa: B023
            "reduce-scatter": (1, lambda: dist.reduce_scatter_tensor(part, whole.zero_(), group=group)),  # noqa: B023
        }
        for name, (times, operation) in operations.items():
            seconds = fastest(operation)
            sent = sent_in_ring(times, whole.nbytes, num)
            yield {"collective": name, "bytes": whole.nbytes, "seconds": seconds, "rate": sent / seconds}
