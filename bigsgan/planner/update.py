"""Goes through an update on one rank, task by task, and counts the memory held at each moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bigsgan.engines.orders import Turn
from bigsgan.engines.phases import Phase, Task, Weighs
from bigsgan.planner.census import Stretch
from bigsgan.planner.passes import Passes, WholePass
from bigsgan.planner.states import States


@dataclass(frozen=True)
class RankPhase:
    """A phase as one rank computes it. Bytes are for one micro-batch, unless stated otherwise."""

    phase: Phase  # as engines compute it
    # passes through this rank's layers; None where D keeps images, and where G weighs, whose pass is short
    passes: Passes | WholePass | None
    inputs: int  # bytes of the inputs assembled for the first layer
    arriving: int  # bytes of other ranks' images, which are sent once to the first phase that reads them
    received: tuple[int, int]  # bytes received from the previous stage, and of the gradients sent back to it
    outputs: int  # bytes of images kept for the phases that read them, or of gradients at images
    # bytes sent to the next stage, and of the gradients that come back; or gradients at other ranks' images
    sends: tuple[int, int]
    data: int  # bytes of the whole phase's real images, which stay until the end of the update
    num_beyond: int  # number of micro-batches that the planner does not go through
    pinned: bool  # whether ZeRO 3 keeps all parameters gathered
    exposed: int = 0  # bytes that the graph from an exposed parameter to the images keeps until G weighs
    before: int = 0  # bytes that a teacher's program needs before each forward pass
    after: int = 0  # bytes that a perceptual distance and its gradient need after each backward pass

    @property
    def num(self) -> int:
        """Number of all micro-batches."""
        return self.phase.num + self.num_beyond

    def shows(self, task: Task) -> bool:
        """Whether the planner goes through a task of this phase."""
        return task.micro_batch < self.phase.num


class Moment(NamedTuple):
    """A part of an update."""

    name: str  # label of the phase or step
    network: str  # network that the task belongs to
    held: int  # bytes of images and activations held beside those of the task itself
    gradients: int  # bytes of gradients left by other passes, or needed to reduce them and step
    stretch: Stretch | None = None  # the task's pass; None if it has none
    opens_graph: bool = False  # whether a graph is left, with whose parameters a backward pass goes on
    takes_gradients: bool = False  # whether gradients of parameters arrive
    earlier: bool = False  # whether gradients of earlier micro-batches have arrived
    updates: bool = False  # whether the parameters change
    pinned: bool = False  # whether ZeRO 3 keeps all parameters gathered


class Update:
    """Goes through the tasks of a rank and counts the bytes held."""

    def __init__(
        self, phases: Sequence[RankPhase], turns: Sequence[Turn], states: Mapping[str, States], kept: int = 0
    ) -> None:
        """Take the update's phases, this rank's turns, states by network, and bytes of kept images."""
        self._phases, self._turns, self._states = phases, turns, states
        self._held: Counter[object] = Counter({"kept": kept})
        self._gradients: Counter[str] = Counter()
        self._left = Counter(task.phase for task, _ in turns if phases[task.phase].shows(task))

    def moments(self) -> Iterator[Moment]:
        """Yield the moments of all tasks in order."""
        for task, receives in self._turns:
            self._held["ahead"] += sum(map(self._message, receives)) - self._message(task)
            phase = self._phases[task.phase]
            if not phase.shows(task):
                continue
            if isinstance(phase.phase, Weighs):
                yield self._weigh(phase, task)
            elif phase.passes is None:
                yield self._keep(phase, task)
            elif task.kind == "forward":
                yield from self._forward(phase, task)
            elif task.kind == "backward":
                yield from self._backward(phase, task)
            else:
                yield from self._step(phase)
            self._left[task.phase] -= 1
            if not self._left[task.phase]:
                self._drop_unread()

    def _message(self, task: Task) -> int:
        """Bytes of the message that a task waits for."""
        phase = self._phases[task.phase]
        received = phase.received[0] + (phase.arriving if self._reads_first(task) else 0)
        return {"forward": received, "backward": phase.sends[1], "step": 0}[task.kind]

    def _reads_first(self, task: Task) -> bool:
        """Whether no phase before reads the same micro-batch of images."""
        source = self._phases[task.phase].phase.images_from
        before = self._phases[: task.phase]
        return not any(each.phase.images_from == source and task.micro_batch < each.num for each in before)

    def _reads_last(self, number: int, source: int) -> bool:
        """Whether no phase after ``number`` reads what phase ``source`` yields."""
        return not any(source in later.phase.reads for later in self._phases[number + 1 :])

    def _take(self, task: Task) -> int:
        """Take a micro-batch of other ranks' images; return the bytes that its last reader alone still holds.

        Before, it is held with the micro-batches that the planner does not go through; their outputs replace these.
        """
        phase, source = self._phases[task.phase], self._phases[task.phase].phase.images_from
        if not phase.arriving or source is None:
            return 0
        one, others = ("arrived", source, task.micro_batch), ("arrived", source, "beyond")
        if self._reads_last(task.phase, source):
            self._held.pop(one, None)
            if task.micro_batch == 0:
                self._held[others] = max(0, self._held[others] - phase.outputs * phase.num_beyond)
            return phase.arriving
        self._held[one], self._held[others] = phase.arriving, phase.arriving * phase.num_beyond
        return 0

    def _forward(self, phase: RankPhase, task: Task) -> Iterator[Moment]:
        number, _, index = task
        if index == 0:
            self._held["data"] = max(self._held["data"], phase.data)
            self._held["out", number] += phase.outputs * phase.num_beyond
            self._held["exposed", number] = phase.exposed * phase.num
        self._held["in", number, index] = phase.inputs + phase.received[0] + self._take(task)
        if phase.before:
            moment = self._moment(phase, None)
            yield moment._replace(held=moment.held + phase.before)
        passes = phase.passes
        assert passes is not None
        stretch = passes.plain if isinstance(passes, Passes) and not phase.phase.opens_graphs else passes.forward
        yield self._moment(phase, stretch, opens_graph=phase.phase.opens_graphs)
        self._has_read(number)
        if phase.phase.opens_graphs:
            self._held["graph", number, index] = passes.kept
        else:
            del self._held["in", number, index]
        self._held["sent"] += phase.sends[0]
        if not phase.phase.frozen:
            self._held["out", number] += phase.outputs

    def _has_read(self, number: int) -> None:
        """Drop a micro-batch of what a forward pass has read, if no later phase reads it."""
        phase = self._phases[number].phase
        for source in (phase.images_from, phase.tangents_from):
            if source is not None and self._reads_last(number, source):
                self._held["out", source] = max(0, self._held["out", source] - self._phases[source].outputs)

    def _keep(self, phase: RankPhase, task: Task) -> Moment:
        """Copy a micro-batch of images."""
        self._held["kept"] += phase.outputs * (1 + (phase.num_beyond if task.micro_batch == 0 else 0))
        self._held["messages"] = self._take(task)
        moment = self._moment(phase, None)
        self._held["messages"] = 0
        self._has_read(task.phase)
        return moment

    def _weigh(self, phase: RankPhase, task: Task) -> Moment:
        """Hand the gradients at a micro-batch's images on to the phase that pulls back."""
        source, num = phase.phase.grads_from, 1 + (phase.num_beyond if task.micro_batch == 0 else 0)
        moment = self._moment(phase, None)
        self._held["out", task.phase] += phase.outputs * num
        self._held["out", source] = max(0, self._held["out", source] - phase.outputs * num)
        if task.micro_batch == phase.phase.num - 1:
            self._held.pop(("exposed", phase.phase.graphs_from), None)
        return moment

    def _backward(self, phase: RankPhase, task: Task) -> Iterator[Moment]:
        number, _, index = task
        owner = number if phase.phase.graphs_from is None else phase.phase.graphs_from
        takes = not phase.phase.frozen
        assert phase.passes is not None
        gradients = self._states[phase.phase.network].gradients
        self._held.pop(("graph", owner, index), None)
        self._gradients[phase.phase.network] = 0
        self._held["messages"] = phase.sends[1] + (phase.inputs if phase.phase.graphs_from is not None else 0)
        yield self._moment(phase, phase.passes.backward, takes_gradients=takes, earlier=takes and index > 0)
        self._held["messages"] = 0
        self._held.pop(("in", owner, index), None)
        self._held["sent"] += phase.received[1]
        if phase.phase.frozen:
            self._held["out", number] += phase.outputs
            if phase.after:
                moment = self._moment(phase, None)
                yield moment._replace(held=moment.held + phase.after)
        elif phase.phase.grads_from is not None and self._held["out", phase.phase.grads_from]:
            self._held["out", phase.phase.grads_from] -= self._phases[phase.phase.grads_from].outputs
        if takes:
            self._gradients[phase.phase.network] = gradients.ending
            yield self._moment(phase, None)
            self._gradients[phase.phase.network] = gradients.between

    def _step(self, phase: RankPhase) -> Iterator[Moment]:
        network = phase.phase.network
        self._gradients[network] = self._states[network].gradients.updating
        yield self._moment(phase, None, updates=True)._replace(name=f"{phase.phase.label}: step")
        self._gradients[network] = 0

    def _drop_unread(self) -> None:
        """Drop outputs that no later task reads."""
        for number in range(len(self._phases)):
            readers = [i for i, other in enumerate(self._phases) if number in other.phase.reads]
            if not self._left[number] and not any(self._left[reader] for reader in readers):
                self._held.pop(("out", number), None)
                self._held.pop(("arrived", number, "beyond"), None)

    def _moment(self, phase: RankPhase, stretch: Stretch | None, **more: bool) -> Moment:
        held, gradients = sum(self._held.values()), sum(self._gradients.values())
        name, network = phase.phase.label, phase.phase.network
        return Moment(name, network, held, gradients, stretch, pinned=phase.pinned, **more)


class Peak(NamedTuple):
    """Bytes at the fullest moment of one name, beyond the states that stay."""

    activations: int  # activations of passes, and images
    gradients: int  # gradients of parameters
    gathered: int  # parameters that ZeRO 3 has gathered

    @property
    def total(self) -> int:
        """Sum of the three."""
        return sum(self)


def peaks(moments: Sequence[Moment], states: Mapping[str, States]) -> dict[str, Peak]:
    """The fullest moment of an update by name."""
    found: dict[str, Peak] = {}
    known: dict[tuple, Peak] = {}
    gathered = dict.fromkeys(states, 0)
    for moment in moments:
        network, own = moment.network, states[moment.network]
        if moment.stretch is not None:
            gathered[network] = own.whole if moment.pinned else own.gathers
        others = sum(gathered.values()) - gathered[network]
        # The same passes repeat, on other micro-batches.
        key = network, id(moment.stretch), moment.takes_gradients, moment.earlier, gathered[network]
        if key not in known:
            known[key] = _fullest(moment, own, gathered[network])
        inside = known[key]
        peak = Peak(inside.activations + moment.held, inside.gradients + moment.gradients, inside.gathered + others)
        if moment.name not in found or peak.total > found[moment.name].total:
            found[moment.name] = peak
        if moment.updates:
            gathered[network] = 0
        elif moment.stretch is not None and not moment.opens_graph:
            gathered[network] = own.persistent
    return found


_NOTHING = np.zeros(1, np.int64)


def _fullest(moment: Moment, states: States, gathered: int) -> Peak:
    """The fullest moment of a pass that has ``gathered`` bytes of parameters at most, without what others hold."""
    if moment.stretch is None:
        return Peak(0, 0, gathered)
    live, gradients, weights = moment.stretch.live, _NOTHING, np.array([gathered])
    if moment.takes_gradients:
        arrived = moment.stretch.arrived
        gradients = states.gradients.during(arrived, moment.earlier)
        if not moment.pinned:  # a layer that has its gradients is not needed again in the pass
            least = max(states.largest, states.persistent)
            weights = np.clip(states.whole - arrived * states.gathered_each, least, gathered)
    at = int((live + gradients + weights).argmax())
    return Peak(*(int(array[min(at, len(array) - 1)]) for array in (live, gradients, weights)))
