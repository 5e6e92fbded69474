"""Checks of what the ranks tell each other: numbers that each can compute by itself, and the same bits each time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.doctor.games import both
from bigsgan.doctor.runs import Game, exact, played
from bigsgan.runtime import comm

SIZES = (1, 1000, 1 << 20)
"""Elements: a scalar, less than a ring's piece, and several pieces on each rank."""

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
ROUNDS = 3
REMEDY = (
    "repeat with NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL on CPUs), and run the all_reduce_perf of nccl-tests "
    "with its check on these hosts; take the host or link that is wrong out of use"
)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers (numel,) that each rank knows of all: sums of 32 ranks are exact even in bf16."""
    return ((torch.arange(numel, device=comm.device()) * 5 + rank * 3) % 9 - 4).to(dtype)


def collectives(subject: Subject) -> Finding:
    """Sums, means, maxima, copies, gathers, scattered sums, and sends to the next rank, against computed values."""
    rank, num, wrong, errors = comm.rank(), comm.world_size(), "", {}
    for dtype in DTYPES:
        for numel in SIZES:
            for name, (found, expected) in _cases(rank, num, numel, dtype).items():
                error = float((found.double() - expected.double()).abs().max())
                case = f"{name} of {numel:,} x {str(dtype).removeprefix('torch.')}"
                errors[case] = error
                wrong = wrong or (case if error else "")
    numbers = {"errors": errors, "bound": 0.0}
    if wrong:
        text = f"{wrong}: off by {errors[wrong]:g}, where the sum is exact"
        return failed(text, REMEDY, numbers, errors[wrong])
    return passed(f"{len(errors)} collectives of {num} rank{'s' if num > 1 else ''} give the computed values", numbers)


def _cases(rank: int, num: int, numel: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """By collective, what came and what should have."""
    own = values(rank, numel, dtype)
    whole = [values(each, numel, dtype) for each in range(num)]
    total = torch.stack([each.double() for each in whole]).sum(0)
    cases = {"sum": (comm.sum_over_ranks(own.clone()), total)}
    largest = own.clone()
    comm.largest_over_ranks(largest)
    cases["maximum"] = largest, torch.stack(whole).amax(0)
    for source in {0, num - 1}:
        copied = own.clone()
        comm.broadcast([copied], source)
        cases[f"copy of rank {source}'s"] = copied, whole[source]
    gathered = own.new_empty(num * numel)
    dist.all_gather_into_tensor(gathered, own)
    cases["gather"] = gathered, torch.cat(whole)
    if dtype.is_floating_point:
        scattered, parts = own.new_empty(numel), values(rank, num * numel, dtype)
        dist.reduce_scatter_tensor(scattered, parts)
        sums = torch.stack([values(each, num * numel, dtype).double() for each in range(num)]).sum(0)
        cases["scattered sum"] = scattered, sums[rank * numel : (rank + 1) * numel]
        cases["mean"] = comm.mean_over_ranks(own), (total / num).to(dtype)
    if num > 1:
        arrived = torch.empty_like(own)
        comm.exchange([(own, (rank + 1) % num)], [(arrived, (rank - 1) % num)])
        cases["send to the next rank"] = arrived, whole[(rank - 1) % num]
    return cases


def repeats(subject: Subject) -> Finding:
    """The same sums and the same updates, made again, have the same bits; and sums have them on all ranks."""
    generator = torch.Generator().manual_seed(comm.rank())
    own = torch.randn(SIZES[-1], generator=generator).to(comm.device())
    sums = [_bits(comm.sum_over_ranks(own.clone())) for _ in range(ROUNDS)]
    by_rank = subject.ranks.gather(sums[0])
    remedy = "set NCCL_ALGO=Ring, look for links that fail, and see `deterministic` in the recipe"
    if len(set(sums)) > 1:
        return failed("a sum over ranks has other bits when it is made again", remedy)
    if len(set(by_rank)) > 1:
        others = [rank for rank, each in enumerate(by_rank) if each != by_rank[0]]
        return failed(f"a sum over ranks has other bits on rank {others[0]} than on rank 0", remedy)
    games = [Game("ZeRO 0", ["accumulation=2"], both(0)), Game("ZeRO 3", [], both(3))]
    for game in games if comm.device().type == "cpu" else ():
        with exact():
            first, second = ([_flat(state) for state in played(game)] for _ in range(2))
        for update, (one, other) in enumerate(zip(first, second, strict=True)):
            if where := next((name for name in one if one[name] != other[name]), None):
                return failed(f"{game.name}: {where} has other bits {update} updates after the start", remedy)
    num_games = len(games) if comm.device().type == "cpu" else 0
    text = f"{ROUNDS} sums of {SIZES[-1]:,} numbers and 2 runs of {num_games} games have the same bits"
    return passed(text, {"differences": 0, "bound": 0})


def _bits(tensor: Tensor) -> int:
    """Of all elements, as one number, which is the same for the same bits."""
    words = tensor.view(torch.int32).long()
    return int((words * (torch.arange(words.numel(), device=words.device) * 2 + 1)).sum())


def _flat(state: Any) -> dict[str, bytes]:
    """Bits by name."""

    def bits(value: Any) -> bytes:
        return b"".join(part.tobytes() for _, part in value) if isinstance(value, list) else bytes(value.tobytes())

    return {f"{entry}.{name}": bits(value) for entry, named in state.items() for name, value in named.items()}
