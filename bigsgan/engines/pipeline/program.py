"""The phases of an update that were asked for and are not yet computed, and how a rank computes its part of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.observer import Observer
from bigsgan.engines.pipeline.schedule import Cost, Phase, Task

_AHEAD = 2
"""Tasks whose messages are expected ahead of the one that runs, so that they arrive while it computes."""


class Run(Protocol):
    """A phase with all that its tasks need on this rank."""

    phase: Phase

    def expect(self, task: Task) -> None:
        """Prepare to receive what the task needs."""
        ...

    def receive(self, task: Task) -> None:
        """Wait for it."""
        ...

    def compute(self, task: Task) -> None:
        """Compute the task."""
        ...

    @property
    def settle(self) -> Callable[[], None]:
        """Waits until all that the network's tasks sent has arrived."""
        ...


class Program:
    """Collects phases of the networks that share one row of devices, and computes them together.

    Attributes:
        costs: By network, of each stage.
        observer: Measures a program, if given.
    """

    def __init__(self, device: int, num_stages: int, costs: dict[str, Sequence[Cost]], joint: bool) -> None:
        """Begin without phases.

        Args:
            device: This rank's place in the row.
            num_stages: Of each network.
            costs: By network, of each stage.
            joint: Let phases overlap; else each is computed as soon as it is asked for.
        """
        self.costs = costs
        self.observer: Observer | None = None
        self._device, self._num_stages, self._joint = device, num_stages, joint
        self._runs: list[Run] = []
        self._is_computing = False
        self._plans: dict[tuple[Phase, ...], schedule.Plan] = {}

    def add(self, run: Run) -> None:
        """Ask for a phase."""
        self._runs.append(run)
        if not self._joint:
            self.flush()

    def number(self, run: Run) -> int | None:
        """Return the number of a phase that was asked for and not yet computed."""
        return next((i for i, other in enumerate(self._runs) if other is run), None)

    def plan(self, phases: tuple[Phase, ...]) -> schedule.Plan:
        """Plan phases, once."""
        if phases not in self._plans:
            self._plans[phases] = schedule.plan(phases, self._num_stages, self.costs, ["discriminator"])
        return self._plans[phases]

    def finish(self) -> None:
        """Compute all that was asked for, which completes an update. Every rank calls this."""
        self.flush()
        if self.observer is not None:
            self.observer.end()

    def flush(self, observed: bool = True) -> None:
        """Compute all that was asked for. Every rank calls this.

        Args:
            observed: Whether it belongs to an update.
        """
        if self._is_computing or not self._runs:
            return
        phases = tuple(run.phase for run in self._runs)
        tasks = [timed.task for timed in self.plan(phases).devices[self._device]]
        runs = dict(enumerate(self._runs))  # the only reference to each, which is dropped with its last task
        self._runs = []
        observer = self.observer if observed else None
        if observer is not None:
            observer.begin()
        self._is_computing = True
        try:
            self._compute(runs, tasks, observer if observer and observer.is_watching else None)
        finally:
            self._is_computing = False
        if observer is not None:
            observer.program_ended(len(phases))

    def _compute(self, runs: dict[int, Run], tasks: list[Task], observer: Observer | None) -> None:
        # Nothing in here may wait for the whole device: messages that are expected ahead need other ranks to go on.
        settle = {run.settle for run in runs.values()}  # of each network once
        left = Counter(task.phase for task in tasks)
        expected = 0
        for i, task in enumerate(tasks):
            for other in tasks[expected : i + 1 + _AHEAD]:
                runs[other.phase].expect(other)
            expected = max(expected, min(i + 1 + _AHEAD, len(tasks)))
            run = runs[task.phase]
            run.receive(task)
            start = observer.now() if observer else 0.0
            run.compute(task)
            if observer:
                observer.add(task, run.phase, start)
            left[task.phase] -= 1
            if left[task.phase] == 0:
                del runs[task.phase], run  # with its images, as far as no other phase reads them
        for wait in settle:
            wait()


class Deferred(Sequence[Tensor]):
    """What a phase will yield by micro-batch; looking at it computes the program.

    On ranks where the items do not arise they are empty.
    """

    def __init__(self, program: Program, run: Run, num: int, results: dict[int, Tensor]) -> None:
        self.run = run
        self._program, self._num, self._results = program, num, results

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        if not 0 <= index < self._num:
            raise IndexError(index)
        if index not in self._results:
            self._program.flush()
        return self._results.get(index, torch.empty(0))
