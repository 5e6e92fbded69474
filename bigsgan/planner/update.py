"""An update on one rank, task by task, and what is held meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bigsgan.engines.pipeline.schedule import Phase, Task
from bigsgan.planner.census import Stretch
from bigsgan.planner.gathering import Gathering
from bigsgan.planner.passes import Passes, WholePass
from bigsgan.planner.states import States

_AHEAD = 2
"""Tasks whose messages are expected ahead (engines/pipeline/program.py)."""
_UPDATES = 3
"""After which stage 3 gathers in each update as in the last."""


@dataclass(frozen=True)
class RankPhase:
    """A phase as one rank computes it, on each of its micro-batches.

    Attributes:
        phase: What it is.
        passes: Through this rank's layers.
        name: Of its moments.
        keeps_graph: Whether its forward pass is for a backward pass.
        reads: Numbers of the phases whose outputs it reads.
        inputs: Bytes of what is put together for the first layer.
        received: Bytes that come from the stage before, and go back to it as gradients.
        outputs: Bytes of images that stay for the phases that read them, and gradients at images.
        sends: Bytes that go to the next stage, and come back as gradients.
        data: Bytes of real images of the whole phase, which stay to the end of the update.
        num_beyond: Micro-batches that are not gone through.
    """

    phase: Phase
    passes: Passes | WholePass
    name: str
    keeps_graph: bool
    reads: tuple[int, ...] = ()
    inputs: int = 0
    received: tuple[int, int] = (0, 0)
    outputs: int = 0
    sends: tuple[int, int] = (0, 0)
    data: int = 0
    num_beyond: int = 0


class Moment(NamedTuple):
    """A part of an update.

    Attributes:
        name: What is going on.
        network: Whose task it is.
        held: Bytes that are held beside what stays and what the task itself needs.
        stretch: The task's pass; None where it is none.
        extra: Bytes that the task needs, where it is no pass.
        begins: Whether it is a forward pass from the first layer on.
        takes_gradients: Whether gradients of parameters arrive.
        earlier: Whether those of other micro-batches did before.
        updates: Whether the parameters change.
    """

    name: str
    network: str
    held: int
    stretch: Stretch | None = None
    extra: int = 0
    begins: bool = False
    takes_gradients: bool = False
    earlier: bool = False
    updates: bool = False


class Update:
    """Goes through the tasks of a rank and keeps account of what is held."""

    def __init__(self, phases: Sequence[RankPhase], order: Sequence[Task], states: Mapping[str, States]) -> None:
        """Keep what is to be gone through.

        Args:
            phases: All of the update.
            order: This rank's tasks.
            states: By network.
        """
        self._phases, self._order, self._states = phases, order, states
        self._held: Counter[object] = Counter()
        self._left = Counter(task.phase for task in order)

    def moments(self) -> Iterator[Moment]:
        """What happens, in order."""
        for number, task in enumerate(self._order):
            self._held["ahead"] = sum(self._message(other) for other in self._order[number + 1 : number + 1 + _AHEAD])
            phase = self._phases[task.phase]
            if task.kind == "forward":
                yield from self._forward(phase, task)
            elif task.kind == "backward":
                yield from self._backward(phase, task)
            else:
                yield from self._step(phase)
            self._left[task.phase] -= 1
            if not self._left[task.phase]:
                self._let_go()

    def _message(self, task: Task) -> int:
        """Bytes of what a task waits for."""
        phase = self._phases[task.phase]
        return {"forward": phase.received[0], "backward": phase.sends[1], "step": 0}[task.kind]

    def _forward(self, phase: RankPhase, task: Task) -> Iterator[Moment]:
        number, _, index = task
        if index == 0:
            self._held["data"] = max(self._held["data"], phase.data)
            self._held["out", number] += phase.outputs * phase.num_beyond
        self._held["in", number, index] = phase.inputs + phase.received[0]
        passes = phase.passes
        stretch = passes.plain if isinstance(passes, Passes) and not phase.keeps_graph else passes.forward
        yield Moment(phase.name, phase.phase.network, self._total(), stretch, begins=True)
        if phase.keeps_graph:
            self._held["graph", number, index] = passes.kept
        else:
            del self._held["in", number, index]
        self._held["sent"] += phase.sends[0]
        if not phase.phase.frozen:
            self._held["out", number] += phase.outputs

    def _backward(self, phase: RankPhase, task: Task) -> Iterator[Moment]:
        number, _, index = task
        owner = number if phase.phase.graphs_from is None else phase.phase.graphs_from
        takes = not phase.phase.frozen
        gradients = self._states[phase.phase.network].gradients
        self._held.pop(("graph", owner, index), None)
        self._held["gradients", phase.phase.network] = 0
        self._held["messages"] = phase.sends[1] + (phase.inputs if phase.phase.graphs_from is not None else 0)
        yield Moment(
            phase.name, phase.phase.network, self._total(), phase.passes.backward,
            takes_gradients=takes, earlier=takes and index > 0,
        )  # fmt: skip
        self._held["messages"] = 0
        self._held.pop(("in", owner, index), None)
        self._held["sent"] += phase.received[1]
        if phase.phase.frozen:
            self._held["out", number] += phase.outputs
        elif phase.phase.grads_from is not None and self._held["out", phase.phase.grads_from]:
            self._held["out", phase.phase.grads_from] -= self._phases[phase.phase.grads_from].outputs
        if takes:
            yield Moment(phase.name, phase.phase.network, self._total(), extra=gradients.ending)
            self._held["gradients", phase.phase.network] = gradients.between

    def _step(self, phase: RankPhase) -> Iterator[Moment]:
        gradients = self._states[phase.phase.network].gradients
        self._held["gradients", phase.phase.network] = 0
        yield Moment(
            f"{phase.name}: step", phase.phase.network, self._total(), extra=gradients.updating, updates=True
        )

    def _let_go(self) -> None:
        """Drop outputs that no phase reads any more."""
        for number in range(len(self._phases)):
            readers = [i for i, other in enumerate(self._phases) if number in other.reads]
            if not self._left[number] and not any(self._left[reader] for reader in readers):
                self._held.pop(("out", number), None)

    def _total(self) -> int:
        return sum(self._held.values())


def peaks(
    moments: Sequence[Moment], states: Mapping[str, States], gathered: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, int]:
    """Most bytes that are held beside what stays, by the name of the moment.

    Args:
        moments: Of an update.
        states: By network.
        gathered: By network with gathering, elements that are gathered at each of its moments; see ``gather``.
    """
    found: dict[str, int] = {}
    now = {network: int(arrays[-1][-1]) * states[network].itemsize for network, arrays in gathered.items()}
    left = {network: iter(arrays) for network, arrays in gathered.items()}
    for moment in moments:
        own = np.array([moment.extra], np.int64) if moment.stretch is None else moment.stretch.live
        if moment.takes_gradients and moment.stretch is not None:
            own = own + states[moment.network].gradients.during(moment.stretch.arrived, moment.earlier)
        others = sum(size for network, size in now.items() if network != moment.network)
        if moment.network in gathered:
            array = next(left[moment.network]) * states[moment.network].itemsize
            own, now[moment.network] = own + array, int(array[-1])
        peak = moment.held + others + int(own.max(initial=0))
        found[moment.name] = max(found.get(moment.name, 0), peak)
    return found


def gather(moments: Sequence[Moment], network: str, gathering: Gathering) -> list[np.ndarray]:
    """Elements that stage 3 has gathered of a network, for each of its moments, once that repeats itself."""
    gathering.update()
    arrays = [np.array([gathering.held], np.int64)]
    for _ in range(_UPDATES if any(moment.network == network for moment in moments) else 0):
        arrays = []
        for moment in moments:
            if moment.network != network:
                continue
            if moment.begins:
                gathering.begin()
            before = gathering.held
            if moment.updates:
                gathering.update()
            empty = np.array([before, gathering.held], np.int64) if moment.updates else np.array([before], np.int64)
            arrays.append(empty if moment.stretch is None else gathering.run(moment.stretch))
    return arrays
