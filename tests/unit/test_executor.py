"""The executor: which task reads what, what is held meanwhile, and what an error tells of where it arose."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from bigsgan.engines import Task, Work
from bigsgan.engines.executor import Executor
from bigsgan.engines.orders import Turn, all_in_turn, hold_back_steps
from bigsgan.engines.phases import Judges, MakesImages, MakesOwnImages, Placed, PullsBack, Trains

G, D = "generator", "discriminator"
PHASES = [
    MakesImages(2, 1, d_step=0),
    Trains(2, 2, 1, segments=2, images_from=0, d_step=0, tangents_from=None),
    MakesOwnImages(2, 1, 1, d_step=None, keeps_graphs=True, tangents_from=None),
    Judges(2, 1, segments=1, images_from=2),
    PullsBack(2, 1, grads_from=3, graphs_from=2, tangents_from=None),
]
TASKS = [
    *[(0, "forward", 0), (0, "forward", 1)],
    *[(1, "forward", 0), (1, "backward", 0), (1, "forward", 1), (1, "backward", 1), (1, "step", 0)],
    *[(2, "forward", 0), (3, "forward", 0), (3, "backward", 0), (4, "backward", 0)],
    *[(2, "forward", 1), (3, "forward", 1), (3, "backward", 1), (4, "backward", 1), (4, "step", 0)],
]


class Noting:
    """An engine that takes note of its tasks: what each reads, and which phases are alive."""

    replays = False

    def __init__(self, seen, alive):
        self.seen, self.alive, self.outputs = seen, alive, []

    def expect(self, phase, task): ...

    def receive(self, phase, task): ...

    def settle(self): ...

    def _note(self, kind, work, index, reads):
        gc.collect()
        number = next(n for n, phase in enumerate(PHASES) if phase == work.phase)
        alive = [n for n, reference in self.alive.items() if reference() is not None]
        self.seen.append(((number, kind, index), None if reads is None else reads.item(), alive))
        held = {n: sorted(self.alive[n]().outputs) for n in alive}
        self.outputs.append({n: found for n, found in held.items() if found})

    def forward(self, work, index, images, tangents=None):
        assert tangents is None
        self._note("forward", work, index, images)
        if isinstance(work.phase, MakesImages):
            work.outputs[index] = torch.tensor(10.0 * PHASES.index(work.phase) + index)

    def backward(self, work, index, grads):
        self._note("backward", work, index, grads)
        if work.phase.frozen:
            work.outputs[index] = torch.tensor(30.0 + index)

    def step(self, work):
        self._note("step", work, 0, None)


def works(alive):
    for number, phase in enumerate(PHASES):
        work = Work(phase, lambda index, images: ())
        alive[number] = weakref.ref(work)
        yield work
        del work


@pytest.mark.slow
def test_an_update_of_whole_networks():
    seen, alive = [], {}
    engines = {n: Noting(seen, alive) for n in (G, D)}
    executor = Executor(engines, lambda phases: [Turn(task) for task in all_in_turn(phases)])
    executor(works(alive))
    # What D has been given nobody holds; neither what G has.
    assert engines[D].outputs == [{0: [1]}, {0: [1]}, {}, {}, {}, *2 * [{}], *2 * [{}]]
    assert engines[G].outputs == [{}, {0: [0]}, {}, {}, {}, {}, {}]
    assert [task for task, _, _ in seen] == TASKS
    read = {task: value for task, value, _ in seen if value is not None}
    assert read == {
        **{(1, "forward", j): float(j) for j in range(2)},
        **{(3, "forward", j): 20.0 + j for j in range(2)},
        **{(4, "backward", j): 30.0 + j for j in range(2)},
    }
    # A phase lives until its last task and the last task of those that read it.
    assert [phases for _, _, phases in seen[:7]] == [[0, 1, 2, 3, 4]] * 7
    assert [phases for _, _, phases in seen[7:]] == [[2, 3, 4]] * 7 + [[3, 4]] * 2
    assert [reference() for reference in alive.values()] == [None] * 5


def test_steps_that_are_held_back_come_before_the_networks_next_task():
    tasks = [Placed(Task(*task), 0) for task in TASKS]
    held = hold_back_steps(tasks, PHASES)
    step = tasks.pop(6)
    tasks.insert(tasks.index(Placed(Task(3, "forward", 0), 0)), step)
    assert held == tasks
    last = [Placed(Task(1, "backward", 1), 0), step]
    assert hold_back_steps(last, PHASES) == last


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes come with Python 3.11")
def test_an_error_tells_in_which_phase_it_arose():
    seen, alive = [], {}
    engines = {n: Noting(seen, alive) for n in (G, D)}

    def fail(work, index, grads):
        raise RuntimeError("out of memory")

    engines[D].backward = fail
    executor = Executor(engines, lambda phases: [Turn(task) for task in all_in_turn(phases)])
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        executor(works(alive))
    assert caught.value.__notes__ == ["D trains: backward of micro-batch 0"]
    assert executor.doing == "D trains: backward"
