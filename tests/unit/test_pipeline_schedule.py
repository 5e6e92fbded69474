"""Plans of pipelines: their bubble against the formulas, their order against a replay with rules of its own."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pytest

from bigsgan.engines.phases import (
    Checks,
    DifferentiatesImages,
    DifferentiatesStyles,
    Judges,
    Keeps,
    MakesImages,
    MakesOwnImages,
    Phase,
    PullsBack,
    Task,
    Trains,
)
from bigsgan.engines.pipeline.schedule import Cost, Plan, Timed, one_after_the_other, plan

NETWORKS = ("generator", "discriminator")
EXACT = 1e-9
"""Of a relative difference between sums of floats."""


def update(
    num: int,
    keeps: bool = True,
    d_steps: int = 1,
    g_num: int | None = None,
    tangents: bool = False,
    checks: bool = False,
) -> list[Phase]:
    """The phases of an update with micro-batches of one sample, of which D sees a real and a fake one."""
    phases = []
    for _ in range(d_steps):
        phases.append(MakesImages(num, 1, d_step=0))
        batch = {"segments": 2, "images_from": len(phases) - 1, "d_step": 0}
        if checks:
            phases.append(Checks(1, 2, **batch))
        if tangents:
            phases.append(DifferentiatesImages(num, 2, **batch))
        phases.append(Trains(num, 2, **batch, tangents_from=len(phases) - 1 if tangents else None))
    num, along = g_num or num, None
    if tangents and keeps:
        phases.append(DifferentiatesStyles(num, 1, d_step=None))
        along = len(phases) - 1
    first = len(phases)
    phases.append(MakesOwnImages(num, 1, d_step=None, keeps_graphs=keeps, tangents_from=along))
    phases.append(Judges(num, 1, segments=1, images_from=first))
    if tangents and not keeps:
        phases.append(DifferentiatesStyles(num, 1, d_step=None))
        along = len(phases) - 1
    kept = first if keeps else None
    return [*phases, PullsBack(num, 1, grads_from=first + 1, graphs_from=kept, tangents_from=along)]


def overlapped(
    num: int, keeps: bool = True, d_steps: int = 1, tangents: bool = False, first: bool = False
) -> list[Phase]:
    """The phases of an update that overlaps with those around it; of the first one, D trains on images made in it."""
    phases = [MakesOwnImages(num, 1, d_step=None, keeps_graphs=keeps, tangents_from=None)]
    phases.append(Judges(num, 1, segments=1, images_from=0))
    for _ in range(d_steps):
        batch = {"segments": 2, "images_from": len(phases) if first else None, "d_step": 0}
        if first:
            phases.append(MakesImages(num, 1, d_step=0))
        if tangents:
            phases.append(DifferentiatesImages(num, 2, **batch))
        phases.append(Trains(num, 2, **batch, tangents_from=len(phases) - 1 if tangents else None))
    made = range(len(phases), len(phases) + d_steps)
    phases += [MakesImages(num, 1, d_step=0)] * d_steps
    phases.append(PullsBack(num, 1, grads_from=1, graphs_from=0 if keeps else None, tangents_from=None))
    return phases + [Keeps(num, 1, images_from=number, d_step=0) for number in made]


def equal(num_stages: int, forward: float = 1.0, backward: float = 2.0) -> dict[str, Sequence[Cost]]:
    return {network: [Cost(forward, backward)] * num_stages for network in NETWORKS}


def uneven(num_stages: int, seed: int) -> dict[str, Sequence[Cost]]:
    """Costs at random, within a factor of 100 of each other."""
    rng = random.Random(seed)
    return {
        network: [Cost(10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-1, 1)) for _ in range(num_stages)]
        for network in NETWORKS
    }


@dataclass(eq=False)
class Case:
    phases: list[Phase]
    num_stages: int
    costs: dict[str, Sequence[Cost]]

    @cached_property
    def joint(self) -> Plan:
        return plan(self.phases, self.num_stages, self.costs)

    @cached_property
    def apart(self) -> Plan:
        return one_after_the_other(self.phases, self.num_stages, self.costs)

    def stage(self, task: Task, device: int) -> int:
        """Stage of the task's network on a device."""
        return self.num_stages - 1 - device if self.phases[task.phase].network == "discriminator" else device

    def duration(self, task: Task, stage: int) -> float:
        phase = self.phases[task.phase]
        cost = self.costs[phase.network][stage]
        times = {"forward": cost.forward, "backward": cost.backward / (2 if phase.frozen else 1), "step": 0}
        return phase.num_samples * times[task.kind] * (1 if phase.tangents_from is None else 2) * phase.computes


def cases() -> dict[str, Case]:
    found = {}
    for num_stages, num, keeps in product((2, 4), (1, 5), (True, False)):
        name = f"{num_stages}stages-{num}-{'keep' if keeps else 'recompute'}"
        found[f"{name}-equal"] = Case(update(num, keeps), num_stages, equal(num_stages))
        found[f"{name}-uneven"] = Case(update(num, keeps), num_stages, uneven(num_stages, num))
    found["8stages"] = Case(update(3), 8, uneven(8, 0))
    found["own accumulation"] = Case(update(4, g_num=2), 3, uneven(3, 1))
    found["two D steps"] = Case(update(3, d_steps=2), 4, uneven(4, 2))
    found["a check"] = Case(update(5, checks=True), 4, uneven(4, 6))
    found["tangents"] = Case(update(5, d_steps=2, tangents=True), 3, uneven(3, 4))
    for keeps, first in product((True, False), (True, False)):
        name = f"overlapped{'-first' * first}-{'keep' if keeps else 'recompute'}"
        found[name] = Case(overlapped(4, keeps, 2, keeps != first, first), 3, uneven(3, 7))
    # Of one network alone, where the other is not a pipeline.
    train = Trains(5, 2, segments=2, images_from=None, d_step=0, tangents_from=None)
    found["D alone"] = Case([train, train, Judges(5, 2, segments=2, images_from=None)], 4, uneven(4, 3))
    sample = MakesImages(5, 1, d_step=0)
    update_g = PullsBack(5, 1, grads_from=None, graphs_from=1, tangents_from=None)
    found["G alone"] = Case([sample, sample, update_g], 4, uneven(4, 4))
    return found


CASES = cases()


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


class Done(Counter):
    """How many micro-batches of (phase, kind, stage) have ended: passes come in order, so that numbers suffice."""

    def allows(self, case: Case, task: Task, stage: int) -> bool:
        """Whether all that a task on a stage reads is there, and nothing that it changes is still to be read."""
        number, kind, index = task
        phase, last = case.phases[number], case.num_stages - 1
        own = [i for i, other in enumerate(case.phases) if other.network == phase.network]
        earlier = [i for i in own if i < number]
        if self[number, kind, stage] != index:
            return False
        if kind == "step":  # its gradients are complete, earlier phases have used the weights, later ones have not
            complete = all(self[number, "backward", s] == phase.num for s in range(last + 1))
            unused = all(self[i, "forward", stage] == self[i, "backward", stage] == 0 for i in own if i > number)
            return complete and unused and all(self.is_over(case, i, stage) for i in earlier)
        if kind == "forward":
            # Each phase moves the layers' state at its start, and sees the updates before it.
            if not all(self.has_passed(case, i, stage) for i in earlier):
                return False
            if not all(self.is_over(case, i, stage) for i in earlier if isinstance(case.phases[i], Judges)):
                return False
            if stage > 0:
                return self[number, "forward", stage - 1] > index
            if phase.tangents_from is not None and self[phase.tangents_from, "backward", 0] <= index:
                return False
            return phase.images_from is None or self[phase.images_from, "forward", last] > index
        graphs = number if phase.forward else phase.graphs_from
        if self[graphs, "forward", stage] <= index:
            return False
        if stage < last:
            return self[number, "backward", stage + 1] > index
        return phase.grads_from is None or self[phase.grads_from, "backward", 0] > index

    def has_passed(self, case: Case, number: int, stage: int) -> bool:
        """Whether all forward passes of a phase and its step, if it has one, have ended."""
        phase = case.phases[number]
        return self[number, "forward", stage] == phase.num * phase.forward and self[number, "step", stage] == phase.step

    def is_over(self, case: Case, number: int, stage: int) -> bool:
        phase = case.phases[number]
        return self.has_passed(case, number, stage) and self[number, "backward", stage] == phase.num * phase.backward


def replay(case: Case, planned: Plan) -> None:
    """Go through a plan in order of time and check each task against what has ended."""
    done = Done()
    running: list[tuple[float, int, Task]] = []
    queue = [(t.start, t.end, i, device, t) for device, ts in enumerate(planned.devices) for i, t in enumerate(ts)]
    for start, _, _, device, timed in sorted(queue):
        while running and running[0][0] <= start:
            _, other, task = heapq.heappop(running)
            done[task.phase, task.kind, case.stage(task, other)] += 1
        stage = case.stage(timed.task, device)
        assert done.allows(case, timed.task, stage), (timed, device)
        heapq.heappush(running, (timed.end, device, timed.task))


@pytest.mark.parametrize("num_stages, num", [*product((2, 4, 8), (2, 7, 16))])
def test_one_phase_fills_and_drains_once(num_stages, num):
    phase = Trains(num, 3, segments=3, images_from=None, d_step=0, tangents_from=None)
    expected = (num_stages - 1) / (num + num_stages - 1)
    costs = equal(num_stages, backward=1.0 + num % 3)
    assert plan([phase], num_stages, costs).bubble == pytest.approx(expected, rel=EXACT)


def test_an_update_of_4_stages_and_8_micro_batches():
    """One flush of 16 micro-batches instead of five flushes of 8."""
    case = Case(update(8), 4, equal(4))
    assert case.joint.bubble == pytest.approx(3 / 19, rel=EXACT)
    assert case.apart.bubble == pytest.approx(3 / 11, rel=EXACT)


def test_no_update_takes_longer_than_its_phases_one_after_the_other(case):
    assert case.joint.makespan <= case.apart.makespan * (1 + EXACT)
    assert case.joint.bubble <= case.apart.bubble + EXACT


@pytest.mark.parametrize("which", ["joint", "apart"])
def test_each_task_has_what_it_needs(case, which):
    replay(case, getattr(case, which))


@pytest.mark.parametrize("which", ["joint", "apart"])
def test_each_task_is_planned_once_for_its_cost(case, which):
    planned = getattr(case, which)
    expected = []
    for i, phase in enumerate(case.phases):
        expected += [Task(i, "forward", j) for j in range(phase.num * phase.forward)]
        expected += [Task(i, "backward", j) for j in range(phase.num * phase.backward)]
        expected += [Task(i, "step", 0)] * phase.step
    busy = 0.0
    for device, tasks in enumerate(planned.devices):
        own = [task for task in expected if case.phases[task.phase].computes or case.stage(task, device) == 0]
        assert Counter(timed.task for timed in tasks) == Counter(own)
        now = 0.0
        for task, start, end in tasks:
            assert start >= now, "the device still computes the task before"
            duration = case.duration(task, case.stage(task, device))
            assert end - start == pytest.approx(duration, rel=EXACT, abs=EXACT)
            now, busy = end, busy + duration
    assert planned.makespan == max(tasks[-1].end for tasks in planned.devices)
    whole = case.num_stages * planned.makespan
    assert planned.bubble == pytest.approx(1 - busy / whole, abs=EXACT)


def test_a_stage_keeps_no_more_activations_than_1f1b(case):
    for device, tasks in enumerate(case.joint.devices):
        kept: Counter[int] = Counter()
        for task, *_ in tasks:
            phase = case.phases[task.phase]
            if phase.forward and phase.backward:
                kept[task.phase] += {"forward": 1, "backward": -1, "step": 0}[task.kind]
                assert kept[task.phase] <= case.num_stages - case.stage(task, device)


def execute(case: Case, devices: list[list[Timed]]) -> None:
    """Let devices compute their lists as ranks do: they wait for messages, never to send one, and meet at a step.

    Receiving in the order of sending, such devices get to the same point whoever runs first, so one run is a proof.
    """
    left = [deque(timed.task for timed in tasks) for tasks in devices]
    channels: dict[tuple[str, str, int], deque[Task]] = {}
    done: set[tuple[Task, int]] = set()

    def channel(task: Task, stage: int) -> deque[Task]:
        """Messages to a stage of the task's network, in one direction."""
        return channels.setdefault((case.phases[task.phase].network, task.kind, stage), deque())

    def compute(device: int) -> bool:
        """Compute a device's next task, unless it waits."""
        task = left[device][0]
        if task.kind == "step":
            if not all(tasks and tasks[0] == task for tasks in left):
                return False
            for tasks in left:
                tasks.popleft()
            return True
        phase, stage, last = case.phases[task.phase], case.stage(task, device), case.num_stages - 1
        ahead = 1 if task.kind == "forward" else -1
        if 0 <= stage - ahead <= last:
            messages = channel(task, stage)
            if not messages:
                return False
            assert messages.popleft() == task, f"another message than that of {task} on device {device}"
        else:  # across the seam nothing is sent
            source = phase.images_from if task.kind == "forward" else phase.grads_from
            assert source is None or (task._replace(phase=source), device) in done, (task, device)
            if task.kind == "forward" and phase.tangents_from is not None:
                assert (Task(phase.tangents_from, "backward", task.micro_batch), device) in done, (task, device)
        if 0 <= stage + ahead <= last and phase.computes:
            channel(task, stage + ahead).append(task)
        done.add((left[device].popleft(), device))
        return True

    while any(left):
        moved = [compute(device) for device, tasks in enumerate(left) if tasks]
        assert any(moved), f"all devices wait: {[tasks[0] if tasks else None for tasks in left]}"
    assert not any(channels.values()), "a message was not received"


def test_devices_never_wait_for_each_other(case):
    execute(case, case.joint.devices)


# At the last ones the rule of the longest chain alone would take longer than the phases one after the other.
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(s, marks=pytest.mark.slow) for s in range(12, 70)), 741, 1194, 2202]
)
def test_devices_never_wait_for_each_other_at_random(seed):
    rng = random.Random(seed)
    num_stages, num, g_num = rng.randint(2, 6), rng.randint(1, 6), rng.randint(1, 6)
    phases = update(num, rng.random() < 0.5, rng.randint(1, 3), g_num, seed % 2 == 1, seed % 3 == 1)
    if seed % 5 == 1:
        phases = overlapped(num, g_num > 3, rng.randint(1, 3), seed % 2 == 1, seed % 3 == 1)
    case = Case(phases, num_stages, uneven(num_stages, seed))
    planned = case.joint
    replay(case, planned)
    execute(case, planned.devices)
    assert planned.makespan <= case.apart.makespan * (1 + EXACT)


@pytest.mark.timeout(20)
def test_phases_that_wait_for_each_other_are_refused():
    first = Judges(1, 1, segments=1, images_from=1)
    second = Judges(1, 1, segments=1, images_from=0)
    with pytest.raises(RuntimeError, match="wait for each other"):
        plan([first, second], 2, equal(2))
