"""Running means that never stall the step: summed on the device, copied to the host once per report."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigsgan.errors import UserError

_NO_FLOAT64 = {"mps"}  # device types without float64
_MOST_SHOWN = 8


class Statistics:
    """Means by name (such as ``"loss/discriminator"``) over everything added since the last ``reduce``, on all ranks.

    Sums and counts are kept, not means, so that ranks and steps that hold more elements weigh more. The sums are
    float64 if the device has it: sums over the logits of a whole report would lose digits in float32.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._dtype = torch.float32 if device.type in _NO_FLOAT64 else torch.float64
        self._device_sums: dict[str, Tensor] = {}
        self._host_sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._declared: set[str] = set()

    def declare(self, *names: str) -> None:
        """Announce names that only some ranks add to, so that all ranks reduce the same names."""
        self._declared.update(names)

    def add(self, name: str, value: Tensor, num: int = 1) -> None:
        """Count every element of ``value``, a tensor of any shape and float dtype on the device, into the mean.

        A mean of ``num`` elements counts as often, so that means of parts of a batch weigh what the parts do.

        Enqueues two small operations (a sum and an addition) and waits for nothing.
        """
        # Detached, as a graph held by a running sum would keep the activations of every step alive.
        # Moved, as DeepSpeed computes some norms on the host (ZeRO 3 with offload).
        held = value.detach().to(self.device, non_blocking=True)
        total = (held if num == 1 else held.expand(num)).sum(dtype=self._dtype)
        before = self._device_sums.get(name)
        # Out of place: a sum that was made in inference mode must not be changed outside it.
        self._device_sums[name] = total if before is None else before + total
        self._counts[name] += value.numel() * num

    def add_host(self, name: str, value: float, num: int = 1) -> None:
        """Count one number on the host, such as a learning rate, into the mean; see ``add``."""
        self._host_sums[name] += value * num
        self._counts[name] += num

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the mean of each name, sorted, over everything that the ranks added since the last call; start afresh.

        A collective: every rank calls it at the same point, and has added to or declared the same names, as
        ``check_names`` sees. It waits for the device once. A declared name that no rank added to is left out. A name to
        which only empty tensors were added has the mean NaN.

        ``sum_over_ranks`` sums a vector on the device elementwise over the ranks; it is the identity on one rank.
        """
        names = self.names
        sums, counts = sum_over_ranks(self._vector(names)).cpu().view(2, -1)
        self.clear()
        means = zip(names, (sums / counts).tolist(), counts.tolist(), strict=True)
        return {name: mean for name, mean, count in means if count or name not in self._declared}

    def check_names(self, sum_over_ranks: Callable[[Tensor], Tensor], compare: Callable[[list[str]], object]) -> None:
        """Let ``compare`` have this rank's names, on all ranks, unless all have the same. A collective.

        ``compare`` gathers them, and raises the error of ``refuse_other_names`` on all ranks.
        """
        names = self.names
        fingerprint = zlib.crc32("\n".join(names).encode()) % 2**20  # sums of squares are exact in float64
        header = torch.tensor([1, fingerprint, fingerprint**2], dtype=self._dtype, device=self.device)
        num_ranks, total, squares = (int(each) for each in sum_over_ranks(header).tolist())
        if num_ranks * squares != total**2:  # a variance other than 0: the same answer on all ranks
            compare(names)

    @property
    def names(self) -> list[str]:
        """All names that were added to or declared, sorted."""
        return sorted(self._counts.keys() | self._declared)

    def held(self) -> Tensor:
        """Return what this rank has added since the last ``reduce``, in the form that ``hold`` takes.

        For n names these are (3 n,) on the host: n sums of numbers on the device, n of numbers on the host, n counts.
        """
        names = self.names
        sums = self.empty(len(names))
        on_device, on_host, counts = sums.split(len(names)) if names else (sums, sums, sums)
        if self._device_sums:
            zero = torch.zeros((), dtype=self._dtype, device=self.device)
            on_device.copy_(torch.stack([self._device_sums.get(name, zero) for name in names]))
        on_host.copy_(torch.tensor([self._host_sums.get(name, 0.0) for name in names], dtype=sums.dtype))
        counts.copy_(torch.tensor([self._counts[name] for name in names]))
        return sums

    def hold(self, names: Sequence[str], sums: Tensor) -> None:
        """Add what ``held`` returned to the sums; names without counts are only declared."""
        values = zip(names, *(part.tolist() for part in sums.split(max(1, len(names)))), strict=True)
        for name, on_device, on_host, count in values:
            if not count:
                self.declare(name)
                continue
            self._counts[name] += int(count)
            if on_host:
                self._host_sums[name] += on_host
            if on_device or not on_host:
                total = torch.tensor(on_device, dtype=self._dtype, device=self.device)
                before = self._device_sums.get(name)
                self._device_sums[name] = total if before is None else before + total

    def empty(self, num: int) -> Tensor:
        """Return a tensor for ``num`` names in the form of ``held``."""
        return torch.zeros(3 * num, dtype=torch.float64)

    def clear(self) -> None:
        """Drop everything added since the last ``reduce``."""
        self._device_sums.clear()
        self._host_sums.clear()
        self._counts.clear()

    def _vector(self, names: list[str]) -> Tensor:
        """Return sums and counts, (2 * len(names),) on the device."""
        host_sums = [self._host_sums.get(name, 0.0) for name in names]
        counts = [self._counts[name] for name in names]
        vector = torch.tensor([*host_sums, *counts], dtype=self._dtype, device=self.device)
        if self._device_sums:
            zero = vector.new_zeros(())
            vector[: len(names)] += torch.stack([self._device_sums.get(name, zero) for name in names])
        return vector


def refuse_other_names(by_rank: Sequence[Sequence[str]]) -> None:
    """Refuse statistics that only some ranks have; ``by_rank`` holds the names of each.

    Raises:
        UserError: Names differ.
    """
    everywhere = set[str]().union(*by_rank)
    for name in sorted(everywhere):
        ranks = [str(rank) for rank, names in enumerate(by_rank) if name in names]
        if len(ranks) < len(by_rank):
            where = ", ".join(ranks[:_MOST_SHOWN]) + (", ..." if len(ranks) > _MOST_SHOWN else "")
            problem = f"is a statistic on rank{'s' if len(ranks) > 1 else ''} {where} alone, of {len(by_rank)}"
            remedy = f"let what adds it also declare it, on all ranks: statistics.declare({name!r})"
            others = [other for other in sorted(everywhere) if not all(other in names for names in by_rank)][1:]
            raise UserError("statistics", name, problem, remedy, f"so are {', '.join(others)}" if others else "")
