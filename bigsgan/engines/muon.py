"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) on matrices whose parts lie on any ranks.

Muon moves a momentum, element by element, and replaces it by the nearest orthogonal matrix, which takes the whole
matrix. So each rank moves the momentum of its own parts and sends them to one rank, which orthogonalizes the matrix and
sends the parts of the result back. Parts travel in bf16, in which torch.optim.Muon orthogonalizes too: the update is
torch's, to the last bit if the gradients are. A rank that has most of a matrix takes it; ranks with equal parts share
the work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigsgan.config.sections import Muon as MuonSection
from bigsgan.engines.base import Piece
from bigsgan.runtime import comm

LR_MULTIPLIER = "lr_multiplier"
"""Key of the groups of matrices: their learning rate, relative to the others'."""
_MOMENTUM = "momentum_buffer"
_MOST = 0.75
"""Share of a matrix with which a rank has most of it."""

Parts: TypeAlias = dict[str, Tensor]
"""By a matrix's name, this rank's elements of it, flat."""


class _Route(NamedTuple):
    """Who orthogonalizes the matrices of an update, and what this rank sends and receives for it."""

    owners: dict[str, int]  # by name, the rank that orthogonalizes a matrix
    away: dict[int, dict[str, int]]  # by owner, names and lengths of this rank's parts
    here: dict[int, dict[str, int]]  # by rank, names and lengths of its parts of this rank's matrices
    crosses: bool  # whether any rank sends anything


@dataclass(frozen=True)
class _Places:
    """Where matrices lie.

    Attributes:
        shapes: By name.
        parts: By name, a part for each rank: its offset in the flat matrix, and its length.
        within: By id of an optimizer's tensor, the pieces of matrices in it.
        names: By id of an optimizer's tensor, the matrices in it and in the other ranks' tensors of the same place.
        rank: This rank.
        copied: Whether each rank has all of each matrix.
        group: Process group of the ranks; None for all.
    """

    shapes: Mapping[str, torch.Size]
    parts: Mapping[str, Sequence[tuple[int, int]]]
    within: Mapping[int, Sequence[Piece]]
    names: Mapping[int, Sequence[str]]
    rank: int = 0
    copied: bool = False
    group: dist.ProcessGroup | None = None

    def route(self, names: Iterable[str]) -> _Route:
        """Choose who orthogonalizes these matrices."""
        owners, rank = self.owners(names), self.rank
        own = {name: owner for name, owner in owners.items() if self.parts[name][rank][1]}
        away: dict[int, dict[str, int]] = {}
        for name, owner in own.items():
            if owner != rank:
                away.setdefault(owner, {})[name] = self.parts[name][rank][1]
        here: dict[int, dict[str, int]] = {}
        for name in (name for name, owner in owners.items() if owner == rank):
            for other, (_, length) in enumerate(self.parts[name]):
                if other != rank and length:
                    here.setdefault(other, {})[name] = length
        held = {name: sum(length > 0 for _, length in self.parts[name]) for name in owners}
        crosses = any(held[name] > (self.parts[name][owner][1] > 0) for name, owner in owners.items())
        return _Route(owners, away, here, crosses)

    def owners(self, names: Iterable[str]) -> dict[str, int]:
        """Choose the rank that orthogonalizes each matrix: one that has most of it, or else any, so that all work."""
        num_ranks = len(next(iter(self.parts.values())))
        load, chosen = [0] * num_ranks, dict[str, int]()
        free = [(0, rank) for rank in range(num_ranks)]  # a heap
        for name in sorted(names, key=lambda name: -_work(self.shapes[name])):
            numel = self.shapes[name].numel()
            holders = [rank for rank, (_, length) in enumerate(self.parts[name]) if length >= _MOST * numel]
            if 0 < len(holders) < num_ranks:
                rank = min(holders, key=load.__getitem__)
            else:
                while free[0][0] != load[free[0][1]]:  # it has got work since
                    heapq.heapreplace(free, (load[free[0][1]], free[0][1]))
                rank = free[0][1]
            chosen[name] = rank
            load[rank] += _work(self.shapes[name])
        return chosen


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for some matrices, beside another optimizer for all other parameters.

    Until ``spread`` is called, its tensors are the matrices themselves.
    """

    def __init__(self, groups: list[dict[str, Any]], rest: torch.optim.Optimizer, lr: float, section: MuonSection):
        """Take over the groups and the state of ``rest``.

        Args:
            groups: Of matrices, each with its ``weight_decay``. Those of a group are handled together.
            rest: Updates the other parameters.
            lr: Learning rate of both.
            section: The recipe's.
        """
        self._section = section
        groups = [{**group, "lr": lr * section.lr_multiplier, LR_MULTIPLIER: section.lr_multiplier} for group in groups]
        super().__init__([*groups, *rest.param_groups], {"lr": lr})
        rest.state = self.state
        self.rest = rest
        matrices: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        shapes = {str(i): matrix.shape for i, matrix in enumerate(matrices)}
        pieces = [[Piece(name, 0, shape.numel(), 0)] for name, shape in shapes.items()]
        self._place(matrices, shapes, [pieces])

    def spread(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]],
        shapes: Mapping[str, torch.Size],
        **place: Any,
    ) -> None:
        """Take note of the tensors that replace the parameters. Every rank of the network's replicas calls this.

        Args:
            tensors: Flat, of any layout, or whole parameters, in an order that is the same on all ranks.
            pieces: What lies in each of them.
            shapes: Of the matrices, by name.
            place: Further attributes of ``_Places``.
        """
        group = place.get("group")
        all_pieces: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_pieces, pieces, group=group)
        self._place(tensors, shapes, all_pieces, rank=dist.get_rank(group), **place)

    def _place(
        self,
        tensors: Sequence[Tensor],
        shapes: Mapping[str, torch.Size],
        all_pieces: Sequence[Sequence[Sequence[Piece]]],
        rank: int = 0,
        **place: Any,
    ) -> None:
        parts = {name: [(0, 0)] * len(all_pieces) for name in shapes}
        names: list[dict[str, None]] = [{} for _ in tensors]
        for other, of_tensors in enumerate(all_pieces):
            for found, pieces in zip(names, of_tensors, strict=True):
                for piece in pieces:
                    if piece.name in shapes:
                        parts[piece.name][other] = piece.offset, piece.numel
                        found[piece.name] = None
        own = {id(tensor): pieces for tensor, pieces in zip(tensors, all_pieces[rank], strict=True)}
        found_in = {id(tensor): list(found) for tensor, found in zip(tensors, names, strict=True)}
        self._places, self._routes = _Places(shapes, parts, own, found_in, rank, **place), dict[Any, _Route]()

    def state_of(self, tensor: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what belongs to one of the optimizer's tensors of a state that a checkpoint has of all parameters."""
        has_matrices = bool(self._places.names[id(tensor)])
        return {kind: value for kind, value in state.items() if (kind == _MOMENTUM) == has_matrices}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients; ``closure``, which DeepSpeed's signature has, is not used."""
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if LR_MULTIPLIER in group and tensors:
                self._update(group, tensors)
        # DeepSpeed takes away the groups that it does not update yet (0.19.8, zero/stage_1_and_2.py).
        self.rest.param_groups = [group for group in self.param_groups if LR_MULTIPLIER not in group]
        self.rest.step()

    def _update(self, group: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        parts: dict[str, tuple[Tensor, slice]] = {}
        for tensor in tensors:
            state = self.state[tensor]
            if _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(tensor)
            state[_MOMENTUM].lerp_(tensor.grad, 1 - self._section.momentum)
            for piece in self._places.within[id(tensor)]:
                parts[piece.name] = tensor, slice(piece.start, piece.start + piece.numel)
        names = tuple(name for tensor in tensors for name in self._places.names[id(tensor)])
        if names not in self._routes:
            self._routes[names] = self._places.route(names)
        waiting = self._orthogonalized(parts, self._routes[names])
        lr, decay = group["lr"], group["weight_decay"]
        for name in list(waiting):
            tensor, where = parts[name]
            update = waiting.pop(name).to(tensor.device)
            rate = lr * _ratio(self._section.adjust_lr_fn, self._places.shapes[name])
            tensor.view(-1)[where].mul_(1 - lr * decay).add_(update, alpha=-rate)

    def _orthogonalized(self, parts: Mapping[str, tuple[Tensor, slice]], route: _Route) -> Parts:
        """Return this rank's parts of the orthogonalized matrices, bf16."""
        places, rank = self._places, self._places.rank
        arrived: dict[int, Parts] = {}
        if route.crosses and not places.copied:
            sent = {r: {name: self._direction(*parts[name]) for name in names} for r, names in route.away.items()}
            arrived = self._exchange(sent, route.here)
            del sent
        wholes: Parts = {}
        for name in (name for name, owner in route.owners.items() if owner == rank):
            wholes[name] = torch.empty(places.shapes[name].numel(), dtype=torch.bfloat16, device=comm.device())
            if name in parts:
                self._part_of(wholes, name, rank).copy_(self._direction(*parts[name]))
        for other, got in arrived.items():
            for name, part in got.items():
                self._part_of(wholes, name, other).copy_(part)
        arrived.clear()
        for name, whole in wholes.items():
            wholes[name] = orthogonalized(whole.view(places.shapes[name]), self._section).reshape(-1)
        found = {name: self._part_of(wholes, name, rank) for name in wholes if name in parts}
        if route.crosses:
            back = {r: {name: self._part_of(wholes, name, r) for name in names} for r, names in route.here.items()}
            for got in self._exchange(back, route.away).values():
                found.update(got)
        return found

    def _part_of(self, wholes: Parts, name: str, rank: int) -> Tensor:
        offset, length = self._places.parts[name][rank]
        return wholes[name][offset : offset + length]

    def _direction(self, tensor: Tensor, where: slice) -> Tensor:
        """Return the momentum of a part, moved on if it is Nesterov's, bf16, on the device."""
        assert tensor.grad is not None
        momentum, gradient = self.state[tensor][_MOMENTUM].view(-1)[where], tensor.grad.view(-1)[where]
        found = gradient.lerp(momentum, self._section.momentum) if self._section.nesterov else momentum
        return found.bfloat16().to(comm.device())

    def _exchange(self, sent: Mapping[int, Parts], lengths: Mapping[int, Mapping[str, int]]) -> dict[int, Parts]:
        """Send parts to other ranks; return those that come from them, whose names and lengths are known."""
        ranks = range(dist.get_world_size(self._places.group))
        leaving_by_rank = [sum(part.numel() for part in sent.get(r, {}).values()) for r in ranks]
        arriving_by_rank = [sum(lengths.get(r, {}).values()) for r in ranks]
        leaving, arriving = (
            torch.empty(sum(numbers), dtype=torch.bfloat16, device=comm.device())
            for numbers in (leaving_by_rank, arriving_by_rank)
        )
        if sent:
            torch.cat([part for rank in sorted(sent) for part in sent[rank].values()], out=leaving)
        dist.all_to_all_single(arriving, leaving, arriving_by_rank, leaving_by_rank, group=self._places.group)
        found: dict[int, Parts] = {}
        start = 0
        for rank in sorted(lengths):
            found[rank] = {}
            for name, length in lengths[rank].items():
                found[rank][name] = arriving[start : start + length]
                start += length
        return found


def orthogonalized(matrix: Tensor, section: MuonSection) -> Tensor:
    """Return what torch.optim.Muon makes of a matrix in bf16, which it overwrites."""
    a, b, c = section.ns_coefficients
    make: Callable[..., Tensor] = torch.optim._muon._zeropower_via_newtonschulz  # type: ignore[attr-defined]
    return make(matrix, (a, b, c), section.ns_steps, section.eps)


def _ratio(adjust_lr_fn: str, shape: torch.Size) -> float:
    """Return the factor on the learning rate, as torch.optim.Muon has it for a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1, ratio))


def _work(shape: torch.Size) -> int:
    """Operations of a matrix's products, but for a factor."""
    return shape.numel() * min(shape)
