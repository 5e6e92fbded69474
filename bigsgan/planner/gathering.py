"""Predicts how much of a network ZeRO 3 has gathered on a rank while modules run.

Follows DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: parameters are fetched when a module needs
them, and given back after it unless the order of modules says that they are needed again soon. That order is recorded
in a pass, kept for the next of its kind (engines/deepspeed/prefetching.py), and discarded when a pass differs from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from bigsgan.planner.census import Use

_NEVER = -1


class Limits(NamedTuple):
    """A DeepSpeed file's limits of gathering, in elements."""

    prefetch: int  # most that is gathered ahead of its use
    reuse_distance: int  # parameters needed again within so many others are kept
    max_live: int  # beyond so many, nothing is gathered ahead
    persistence: int  # parameters up to this size stay gathered


@dataclass
class _Group:
    """Parameters that one collective gathers into a buffer, which stays until each of them was waited for.

    If there is more than one, they are then copied out of the buffer.
    """

    size: int
    missing: set[int]
    landed: bool = False


@dataclass
class _Record:
    """The order in which passes of one kind use modules, which are identified by their parameters."""

    mode: Literal["invalid", "record", "complete"] = "invalid"
    order: list[tuple[int, ...]] = field(default_factory=list)


class Gathering:
    """The parameters of one network on one of the ranks that share them.

    Attributes:
        held: Elements gathered now, with the buffers of their collectives.
        whole: Elements of all parameters.
    """

    def __init__(self, sizes: Sequence[int], limits: Limits) -> None:
        """Begin with a new engine, whose parameters have ``sizes`` elements."""
        self._sizes, self._limits = sizes, limits
        self._records: dict[Hashable, _Record] = {}
        self._record = _Record()
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._step = self._num_available = 0
        self._available: set[int] = set()
        self._in_flight: dict[int, _Group] = {}
        self._active: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
        self._persistent = {p for p, size in enumerate(sizes) if size <= limits.persistence}
        self.held, self.whole = 0, sum(sizes)

    def begin(self, kind: Hashable) -> None:
        """Begin a forward pass of the whole network; passes of one kind use the modules in the same order."""
        self._drop_groups()
        record = self._record = self._records.setdefault(kind, _Record())
        if record.mode == "record":
            record.mode = "complete"
        elif record.mode == "invalid":
            record.mode, record.order = "record", []
        known = record.order if record.mode == "complete" else []
        self._queue = deque((p, i) for i, used in enumerate(known) for p in used)
        self._fetched_for, self._step, self._num_available = {}, 0, 0

    def update(self) -> None:
        """Give all parameters back, as an update does."""
        self._drop_groups()
        self._give_back(set(self._available))

    def run(self, uses: Sequence[Use], num_moments: int) -> np.ndarray:
        """Elements gathered at each moment of a stretch with these uses, (T,) int64."""
        moments = [(use.start, True, use.parameters) for use in uses]
        moments += [(use.stop, False, use.parameters) for use in uses]
        held = np.empty(num_moments, np.int64)
        before = 0
        for moment, begins, used in sorted(moments):
            held[before:moment] = self.held
            most = self._fetch(used) if begins else self._release(used)
            held[moment : moment + 1] = most
            before = moment + 1
        held[before:] = self.held
        return held

    def _fetch(self, used: tuple[int, ...]) -> int:
        """Gather a module's parameters, and some for the next modules; return the most held meanwhile."""
        record = self._record
        if record.mode == "complete" and record.order[self._step : self._step + 1] != [used]:
            record.mode, record.order = "invalid", []
            self._drop_groups()
        if record.mode == "record":
            record.order.append(used)
        self._launch([p for p in used if p not in self._available and p not in self._in_flight])
        most = self.held
        for p in used:
            self._active[p] += 1
            if p in self._in_flight:
                most = max(most, self._wait(p))
        if record.mode == "complete":
            self._prefetch(used)
        self._step += 1
        return max(most, self.held)

    def _launch(self, parameters: list[int]) -> None:
        if parameters:
            group = _Group(sum(self._sizes[p] for p in parameters), set(parameters))
            self._in_flight.update(dict.fromkeys(parameters, group))
            self._num_available += group.size
            self.held += group.size

    def _wait(self, parameter: int) -> int:
        group = self._in_flight.pop(parameter)
        if not group.landed:
            self._add(group.missing)
            if len(group.missing) == 1:  # one parameter stays in the buffer
                self.held -= group.size
                group.size = 0
            group.landed = True
        most = self.held
        self._leave(group, parameter)
        return most

    def _leave(self, group: _Group, parameter: int) -> None:
        """Give a group's buffer back after the last of its parameters."""
        group.missing.discard(parameter)
        if not group.missing:
            self.held -= group.size

    def _add(self, parameters: set[int]) -> None:
        self._available |= parameters
        self.held += sum(self._sizes[p] for p in parameters)

    def _give_back(self, parameters: set[int]) -> None:
        self._available -= parameters
        self.held -= sum(self._sizes[p] for p in parameters)

    def _prefetch(self, used: tuple[int, ...]) -> None:
        new = {p for p in used if self._fetched_for.get(p, _NEVER) < self._step}
        for _ in range(len(new)):
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = step
        room = min(self._limits.max_live - self._num_available, self._limits.prefetch)
        chosen: list[int] = []
        size = 0
        while self._queue and size < room:
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, _NEVER), step)
            if parameter not in self._available and parameter not in self._in_flight and parameter not in chosen:
                chosen.append(parameter)
                size += self._sizes[parameter]
        self._launch(chosen)

    def _release(self, used: tuple[int, ...]) -> int:
        """Give back parameters that no module needs soon; return the elements held before."""
        before = self.held
        for p in used:
            self._active[p] -= 1
        for p in self._not_needed_soon(used) & self._available:
            if not self._active[p]:
                self._give_back({p})
                self._num_available -= self._sizes[p]
        return before

    def _not_needed_soon(self, used: tuple[int, ...]) -> set[int]:
        if self._record.mode != "complete":
            return set(used)
        found = {p for p in used if p not in self._persistent and self._fetched_for.get(p, _NEVER) <= self._step}
        passed = 0
        for following in self._record.order[self._step :]:
            if passed >= self._limits.reuse_distance or not found:
                break
            found -= set(following)
            passed += sum(self._sizes[p] for p in following)
        return found

    def _drop_groups(self) -> None:
        for parameter, group in self._in_flight.items():
            if group.landed:
                self._give_back({parameter})
            self._leave(group, parameter)
        self._in_flight.clear()
