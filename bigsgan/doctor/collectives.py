"""Checks of what the ranks tell each other: numbers that each can compute by itself, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.bench.comm import sent_in_ring
from bigsgan.bench.measure import fastest
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.doctor.games import both
from bigsgan.doctor.runs import Game, exact, played
from bigsgan.engines.exchange import Route
from bigsgan.engines.pipeline.transport import MESSAGES
from bigsgan.errors import counted
from bigsgan.runtime import comm
from bigsgan.runtime.mean import mean_over_ranks

SIZES = (1, 1000, 1 << 20)
"""Elements: a scalar, less than a ring's piece, and several pieces on each rank."""

RATED_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes."""

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MOST_GATHERED = 1 << 22
"""Elements of all ranks that a gather brings together; with many ranks each has fewer of them."""

MOST_RANKS_IN_BF16 = 200
"""Up to which sums of ``values`` are whole numbers below 256 in any order, which bf16 holds exactly."""

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
"""Of a mean, relative: CUDA multiplies by the number's reciprocal, which is rounded too. All else is exact."""

ROUNDS = 3
REMEDY = (
    "repeat with NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL on CPUs), and run the all_reduce_perf of nccl-tests "
    "with its check on these hosts; take the host or link that is wrong out of use"
)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """Small whole numbers (numel,) that each rank knows of all, from number ``start``; nine ranks' add up to 0."""
    return ((torch.arange(start, start + numel, device=comm.device()) * 5 + rank * 2) % 9 - 4).to(dtype)


def collectives(subject: Subject) -> Finding:
    """Sums, means, maxima, copies, gathers, scattered sums, and sends to the next rank, against computed values."""
    rank, num, wrong, errors = comm.rank(), comm.world_size(), "", dict[str, float]()
    pass_on = _Ring(num)
    for dtype in DTYPES if num <= MOST_RANKS_IN_BF16 else (torch.float32, torch.int64):
        for numel in SIZES:
            for name, found, expected in _cases(rank, num, numel, dtype, pass_on):
                difference, allowed = (found.double() - expected).abs(), ROUNDING[dtype] if name == "mean" else 0.0
                case = f"{name} of {numel:,} x {str(dtype).removeprefix('torch.')}"
                errors[case] = float(difference.max())
                if not wrong and not (difference <= allowed * expected.abs()).all():
                    wrong = case
    numbers = {"errors": errors, "bound": 0.0, "bound_of_means": {str(dtype): each for dtype, each in ROUNDING.items()}}
    if wrong:
        text = (
            f"{wrong}: off by {errors[wrong]:g}, where {'a rounding is allowed' if 'mean' in wrong else 'it is exact'}"
        )
        return failed(text, REMEDY, numbers, errors[wrong])
    return passed(f"{len(errors)} collectives of {counted(num, 'rank')} give the computed values", numbers)


def rates(subject: Subject) -> Finding:
    """Time all-reduce, all-gather and reduce-scatter over all ranks, by size; a rate is what a rank sends in a ring."""
    num, device, found = comm.world_size(), comm.device(), list[dict[str, Any]]()
    for num_bytes in RATED_SIZES:
        whole = torch.ones(num_bytes // 4 // num * num, device=device)
        part = torch.ones(whole.numel() // num, device=device)
        operations: dict[str, tuple[int, Callable[[], Any]]] = {
            "all-reduce": (2, lambda: dist.all_reduce(whole.zero_())),  # noqa: B023
            "all-gather": (1, lambda: dist.all_gather_into_tensor(whole, part)),  # noqa: B023
            "reduce-scatter": (1, lambda: dist.reduce_scatter_tensor(part, whole.zero_())),  # noqa: B023
        }
        for name, (times, operation) in operations.items():
            seconds = fastest(operation)
            rate = sent_in_ring(times, whole.nbytes, num) / seconds
            found.append({"collective": name, "bytes": whole.nbytes, "seconds": seconds, "rate": rate})
    largest = ", ".join(f"{each['collective']} {each['rate'] / 1e9:.2f} GB/s" for each in found[-3:])
    latency, slowest = min(each["seconds"] for each in found), min(each["rate"] for each in found[-3:])
    numbers = {"backend": dist.get_backend(), "sizes": found}
    return passed(f"{largest}; at least {1e6 * latency:.0f} us, over {dist.get_backend()}", numbers, -slowest)


class _Ring:
    """Sends to the next rank, as images and gradients travel where G and D have ranks of their own (exchange.py)."""

    def __init__(self, num: int) -> None:
        """Connect even ranks to the next ones and then odd ranks, all at the same time. Every rank calls this."""
        senders = [range(first, num, 2) for first in (0, 1)] if num > 1 else []
        following = [[(rank + 1) % num for rank in ranks] for ranks in senders]
        groups = [dist.new_group(group_desc=MESSAGES) for _ in senders]  # ranks get ready before they send
        self._routes = [Route(*each, (1,)) for each in zip(groups, senders, following, strict=True)]

    def __call__(self, own: Tensor) -> Tensor:
        """Return what the rank before this one sends, while ``own`` (numel,) goes to the next one."""
        (arriving,) = [route for route in self._routes if route.receives]
        arriving.expect(len(own))
        for route in self._routes:
            route.send(own[:, None])
        arrived = arriving.receive().flatten()
        for route in self._routes:
            route.settle()
        return arrived


def _cases(
    rank: int, num: int, numel: int, dtype: torch.dtype, pass_on: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Collectives: the name, what came, and what should have, in float64."""
    own, part = values(rank, numel, dtype), max(1, min(numel, MOST_GATHERED // num))
    yield "sum", comm.sum_over_ranks(own.clone()), (total := _total(num, numel))
    largest, expected = own.clone(), values(0, numel).double()
    comm.largest_over_ranks(largest)
    for other in range(1, min(num, 9)):  # the tenth rank has the first one's
        expected = torch.maximum(expected, values(other, numel).double())
    yield "maximum", largest, expected
    for source in {0, num - 1}:
        copied = own.clone()
        comm.broadcast([copied], source)
        yield f"copy of rank {source}'s", copied, values(source, numel).double()
    gathered = own.new_empty(num * part)
    dist.all_gather_into_tensor(gathered, values(rank, part, dtype))
    yield "gather", gathered, torch.cat([values(each, part, dtype) for each in range(num)]).double()
    if dtype.is_floating_point:
        scattered = own.new_empty(part)
        dist.reduce_scatter_tensor(scattered, values(rank, num * part, dtype))
        yield "scattered sum", scattered, _total(num, part, rank * part)
        yield "mean", mean_over_ranks(own), total / num
    if num > 1 and dtype == torch.float32:  # as images and gradients travel
        yield "send to the next rank", pass_on(own), values((rank - 1) % num, numel).double()


def _total(num: int, numel: int, start: int = 0) -> Tensor:
    """Sum of all ranks' ``values``, in float64."""
    total = torch.zeros(numel, dtype=torch.float64, device=comm.device())
    for rank in range(num):
        total += values(rank, numel, start=start)
    return total


def repeats(subject: Subject) -> Finding:
    """The same sums and the same updates, made again, have the same bits; and sums have them on all ranks."""
    generator = torch.Generator().manual_seed(comm.rank())
    own = torch.randn(SIZES[-1], generator=generator).to(comm.device())
    sums = [_bits(comm.sum_over_ranks(own.clone())) for _ in range(ROUNDS)]
    by_rank, problems = subject.ranks.gather(sums[0]), []
    if len(set(sums)) > 1:
        problems.append("a sum over ranks has other bits when it is made again")
    if others := [rank for rank, each in enumerate(by_rank) if each != by_rank[0]]:
        problems.append(f"a sum over ranks has other bits on rank {others[0]} than on rank 0")
    text = f"{ROUNDS} sums of {SIZES[-1]:,} numbers have the same bits; updates on GPUs are not made again"
    if comm.device().type == "cpu":
        games = [Game("ZeRO 0", ["accumulation=2"], both(0)), Game("ZeRO 3", [], both(3))]
        problems += [problem for game in games if (problem := _changes(game))]  # all ranks play all of them
        text = f"{ROUNDS} sums of {SIZES[-1]:,} numbers and 2 runs of {len(games)} games have the same bits"
    if problems:
        return failed(
            problems[0], "set NCCL_ALGO=Ring, look for links that fail, and see `deterministic` in the recipe"
        )
    return passed(text, {"differences": 0, "bound": 0})


def _changes(game: Game) -> str:
    """What has other bits on this rank when a game is played again; empty if nothing has."""
    with exact():
        first, second = ([_flat(state) for state in played(game)] for _ in range(2))
    for update, (one, other) in enumerate(zip(first, second, strict=True)):
        if where := next((name for name in one if one[name] != other[name]), None):
            return f"{game.name}: {where} has other bits {update} updates after the start"
    return ""


def _bits(tensor: Tensor) -> int:
    """Of all elements, as one number, which is the same for the same bits."""
    words = tensor.view(torch.int32).long()
    return int((words * (torch.arange(words.numel(), device=words.device) * 2 + 1)).sum())


def _flat(state: Any) -> dict[str, bytes]:
    """Bits by name."""
    return {
        f"{entry}.{name}": b"".join(values.tobytes() for _, values in pieces)
        for entry, named in state.items()
        for name, pieces in named.items()
    }
