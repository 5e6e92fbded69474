"""The order in which each device computes the phases of an update. Pure planning: no tensors, no ranks.

The phases of one update are planned together. Two pipelines share the devices, the second one reversed, so that
the images that leave the first enter the second on the same device. The drain of one phase overlaps with the fill of
the next wherever nothing forbids it.

Every rank plans for all devices and comes to the same plan, so messages need no negotiation. ``in_one_order`` puts the
tasks of all devices one after the other, in which nobody waits for what comes later.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from bigsgan.config import NETWORKS
from bigsgan.engines.phases import Kind, Phase, Placed, Task
from bigsgan.engines.tasks import awaited, in_turn


class Cost(NamedTuple):
    """Time of one sample in one stage, in any unit."""

    forward: float
    backward: float


EQUAL = Cost(1.0, 2.0)
"""Cost of a stage that was not measured: a backward pass costs about two forward passes."""


class Timed(NamedTuple):
    """A task and the time at which it runs."""

    task: Task
    start: float
    end: float


class Plan(NamedTuple):
    """Each device's tasks in order."""

    devices: list[list[Timed]]  # by device; device d computes stage d of the generator
    makespan: float  # when the last task ends

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they wait."""
        busy = sum(timed.end - timed.start for device in self.devices for timed in device)
        return 1 - busy / (len(self.devices) * self.makespan) if self.makespan else 0.0


def device_of(network: str, stage: int, num_stages: int) -> int:
    """Return the device of a stage; the discriminator's first stage is on the last device, as in ``Placement``."""
    return num_stages - 1 - stage if network == "discriminator" else stage


def plan(
    phases: Sequence[Phase], num_stages: int, costs: dict[str, Sequence[Cost]], numbers: Sequence[int] | None = None
) -> Plan:
    """Plan phases for all devices.

    List scheduling: a free device takes the most urgent of the tasks whose inputs have arrived. Messages of one
    direction are received in the order in which they were sent, so only the oldest counts as arrived. No rule of
    urgency is best for every mixture of phases. So several are tried, and no overlap at all; the shortest plan wins. Of
    equally short plans the one by the time that is left does: where ties were seen, it held least memory.

    Args:
        phases: The phases in the order in which they are asked for; numbers in them point to earlier ones.
        num_stages: Number of stages of each network, and of devices.
        costs: By network, the cost of each stage.
        numbers: Numbers of the phases to plan, as if what they read of others were there; of all, if not given.
    """
    numbers = range(len(phases)) if numbers is None else numbers
    graph = _Graph(phases, num_stages, costs, numbers)
    plans = [
        # Steps come first in every rule: their collectives wait for all stages, so no stage may wait for another task.
        graph.simulate(lambda n: (n[0].kind != "step", n[0].phase, _KIND_ORDER[n[0].kind], n[0].micro_batch)),
        graph.simulate(lambda node: (_KIND_ORDER[node[0].kind], node[0].phase, node[0].micro_batch)),
    ]
    left = graph.time_left()
    by_time = graph.simulate(lambda node: (node[0].kind != "step", -left[node], node[0].phase, node[0].micro_batch))
    if len(numbers) > 1:
        plans.append(one_after_the_other(phases, num_stages, costs))
    return min([by_time, *plans], key=lambda found: found.makespan)


def in_one_order(planned: Plan, phases: Sequence[Phase], num_stages: int) -> list[Placed]:
    """Put the tasks of all devices in one order that respects each device's own.

    No task reads what comes behind it, and a step, at which all stages of a network meet, is in one place. So the order
    would do even if each message and each step kept its ranks until all of them are there. What begins earlier in the
    plan comes first, where there is a choice.

    Raises:
        RuntimeError: Devices of such a plan would wait for each other.
    """
    begins: dict[Placed, float] = {}
    before: dict[Placed, set[Placed]] = defaultdict(set)
    stages: dict[Placed, list[int]] = defaultdict(list)

    def united(one: Placed) -> Placed:
        return one._replace(stage=0) if one.task.kind == "step" else one

    last = dict.fromkeys(NETWORKS, num_stages - 1)
    planned_phases = {timed.task.phase for tasks in planned.devices for timed in tasks}
    for device, tasks in enumerate(planned.devices):
        previous = None
        for task, start, _ in tasks:
            stage = device_of(phases[task.phase].network, device, num_stages)  # which is its own inverse
            own = united(Placed(task, stage))
            begins[own] = min(start, begins.get(own, start))
            stages[own].append(stage)
            before[own] |= {previous} if previous is not None else set()
            if (read := awaited(task, stage, phases, last)) is not None and read.task.phase in planned_phases:
                before[own].add(united(read))
            previous = own
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise RuntimeError(f"devices wait for each other: {error.args[1]}") from error
    found: list[Placed] = []
    ready: list[tuple[float, int, Placed]] = []
    while sorter.is_active():
        for one in sorter.get_ready():
            heapq.heappush(ready, (begins[one], len(found), one))
        *_, one = heapq.heappop(ready)
        found += [one._replace(stage=stage) for stage in stages[one]]
        sorter.done(one)
    return found


def one_after_the_other(phases: Sequence[Phase], num_stages: int, costs: dict[str, Sequence[Cost]]) -> Plan:
    """Plan each phase separately: the pipelines fill and drain once a phase, as in DeepSpeed's own engine."""
    devices: list[list[Timed]] = [[] for _ in range(num_stages)]
    now = 0.0
    for number in range(len(phases)):
        part = plan(phases, num_stages, costs, [number])
        for device, tasks in zip(devices, part.devices, strict=True):
            device += [Timed(task, now + start, now + end) for task, start, end in tasks]
        now += part.makespan
    return Plan(devices, now)


_KIND_ORDER: dict[Kind, int] = {"step": 0, "backward": 1, "forward": 2}


class _Graph:
    """All tasks of some phases, and their dependencies on each other."""

    def __init__(
        self, phases: Sequence[Phase], num_stages: int, costs: dict[str, Sequence[Cost]], numbers: Sequence[int]
    ) -> None:
        self._phases, self._last, self._costs = phases, num_stages - 1, costs
        self.needs: dict[Placed, list[Placed]] = {}
        for number in numbers:
            for stage in phases[number].stages(num_stages):
                for task in in_turn(number, phases[number]):
                    needed = self._needs(task, stage)
                    self.needs[Placed(task, stage)] = [other for other in needed if other.task.phase in numbers]
        self.followers: dict[Placed, list[Placed]] = {node: [] for node in self.needs}
        for node, needed in self.needs.items():
            for other in needed:
                self.followers[other].append(node)

    def cost(self, node: Placed) -> float:
        """Return the time that a task takes on its stage."""
        task, stage = node
        phase = self._phases[task.phase]
        cost, num = self._costs[phase.network][stage], phase.samples_of_work
        if task.kind == "forward":
            return cost.forward * num
        if task.kind == "backward":
            return cost.backward * num * (0.5 if phase.frozen else 1.0)
        return 0.0

    def device(self, node: Placed) -> int:
        """Return the device of a node's stage."""
        task, stage = node
        return device_of(self._phases[task.phase].network, stage, self._last + 1)

    def time_left(self) -> dict[Placed, float]:
        """Return the length of the longest chain that begins with each node; ``simulate`` has refused circles."""
        left: dict[Placed, float] = {}
        for node in TopologicalSorter(self.followers).static_order():
            left[node] = self.cost(node) + max((left[other] for other in self.followers[node]), default=0.0)
        return left

    def simulate(self, urgency: Callable[[Placed], tuple[float, ...]]) -> Plan:
        """Make a plan in which every free device takes the most urgent task; refuse phases that wait for each other."""
        missing = {node: len(needed) for node, needed in self.needs.items()}
        ready: list[list[tuple[tuple[float, ...], Placed]]] = [[] for _ in range(self._last + 1)]
        devices: list[list[Timed]] = [[] for _ in ready]
        is_free = [True] * len(ready)
        under_way: Counter[tuple[int, int]] = Counter()  # activations that a stage holds of a phase
        sent: dict[tuple[str, Kind, int], deque[Task]] = defaultdict(deque)  # messages that wait at a stage
        running: list[tuple[float, Placed]] = []
        now = 0.0
        num_done = 0
        for node, number in missing.items():
            if number == 0:
                bisect.insort(ready[self.device(node)], (urgency(node), node))
        while True:
            for device, nodes in enumerate(ready):
                startable = (i for i, (_, node) in enumerate(nodes) if self._may_begin(node, under_way, sent))
                if not is_free[device] or (i := next(startable, None)) is None:
                    continue
                _, (task, stage) = nodes.pop(i)
                if task.kind != "step" and self._phases[task.phase].only_on is None:
                    network = self._phases[task.phase].network
                    if messages := sent[network, task.kind, stage]:
                        messages.popleft()
                    sent[network, task.kind, stage + (1 if task.kind == "forward" else -1)].append(task)
                end = now + self.cost(Placed(task, stage))
                under_way[task.phase, stage] += {"forward": 1, "backward": -1, "step": 0}[task.kind]
                is_free[device] = False
                devices[device].append(Timed(task, now, end))
                heapq.heappush(running, (end, Placed(task, stage)))
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] <= now:
                node = heapq.heappop(running)[1]
                num_done += 1
                is_free[self.device(node)] = True
                for other in self.followers[node]:
                    missing[other] -= 1
                    if missing[other] == 0:
                        bisect.insort(ready[self.device(other)], (urgency(other), other))
        if num_done < len(self.needs):
            raise RuntimeError(f"the phases wait for each other: {list(self._phases)}")
        return Plan(devices, now)

    def _may_begin(
        self, node: Placed, under_way: Counter[tuple[int, int]], sent: Mapping[tuple[str, Kind, int], deque[Task]]
    ) -> bool:
        """Whether a stage holds fewer activations of a phase than 1F1B lets it, and the task's message comes next."""
        task, stage = node
        phase = self._phases[task.phase]
        limited = task.kind == "forward" and phase.backward
        messages = sent[phase.network, task.kind, stage]
        comes_next = not messages or messages[0] == task
        return comes_next and (not limited or under_way[task.phase, stage] <= self._last - stage)

    def _needs(self, task: Task, stage: int) -> Iterable[Placed]:
        number, kind, index = task
        phase = self._phases[number]
        before = self._before(number, kind, index)
        if before is not None:
            yield Placed(before, stage)
        if (read := awaited(task, stage, self._phases, dict.fromkeys(NETWORKS, self._last))) is not None:
            yield read
        if kind == "forward":
            if stage == 0 and phase.tangents_from is not None:
                yield Placed(Task(phase.tangents_from, "backward", index), 0)
        elif kind == "backward":
            graphs = number if phase.forward else phase.graphs_from
            if graphs is not None:
                yield Placed(Task(graphs, "forward", index), stage)
        else:
            yield Placed(Task(number, "backward", phase.num - 1), stage)
            for earlier, other in enumerate(self._phases[:number]):
                if other.step:  # stages meet at steps, in one order
                    yield Placed(Task(earlier, "step", 0), stage)
                elif other.network == phase.network and other.forward and other.computes:  # with these weights
                    yield Placed(Task(earlier, "forward", other.num - 1), stage)

    def _before(self, number: int, kind: Kind, index: int) -> Task | None:
        """Return the task that must come before on the same stage: passes keep their order, and see earlier updates."""
        if index > 0:
            return Task(number, kind, index - 1)
        if kind == "backward" and number and self._phases[number - 1].is_probe:
            return Task(number - 1, "backward", 0)  # it reads the parameters that this phase's step changes
        if kind != "forward":
            return None
        for earlier in range(number - 1, -1, -1):
            phase = self._phases[earlier]
            if phase.network == self._phases[number].network and (phase.step or phase.forward):
                return Task(earlier, phase.needs_until, 0 if phase.step else phase.num - 1)
        return None
