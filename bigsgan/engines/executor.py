"""Computes the phases of an update on this rank, task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from bigsgan.engines.base import Engine, Work
from bigsgan.engines.deepspeed.leftovers import unite_ranks
from bigsgan.engines.exchange import Arrival, Exchange
from bigsgan.engines.orders import Turn
from bigsgan.engines.phases import Phase, Task
from bigsgan.engines.pipeline.observer import Observer
from bigsgan.engines.replays import begin_update


def named(phase: Phase, task: Task) -> AbstractContextManager[Any]:
    """Name a task in a profile."""
    return record_function(f"{phase.label}: {task.kind}")


class Executor:
    """Walks the tasks of an update and hands images and gradients from phase to phase.

    Attributes:
        engines: By network.
        doing: What is being computed, for logs; empty between updates.
        num_tasks: Tasks that have begun since the start, a sign of progress.
        around: Gives what stands around each task.
        observer: Measures an update, if given.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        order: Callable[[Sequence[Phase]], Sequence[Turn]],
        exchange: Exchange | None = None,
        observer: Observer | None = None,
        end_update: Callable[[Sequence[Phase]], None] = lambda phases: None,
    ) -> None:
        """Prepare.

        Args:
            engines: By network.
            order: Gives this rank's turns in some phases; see Order.
            exchange: Takes images to the ranks that read them, where they arise on others.
            observer: Measures one of the first updates.
            end_update: Called on every rank with the phases of an update that has been computed.
        """
        self.engines, self.observer = engines, observer
        self.doing, self.num_tasks = "", 0
        self.around: Callable[[Phase, Task], AbstractContextManager[Any]] = named
        self._order, self._exchange, self._end_update = order, exchange, end_update

    def __call__(self, works: Iterable[Work]) -> None:
        """Compute an update, given its phases in order. Every rank calls this.

        ``works`` is an iterator, so that nobody else holds what is computed.
        """
        begin_update(*self.engines.values())
        alive = dict(enumerate(works))
        phases = [work.phase for work in alive.values()]
        turns = self._order(phases)
        tasks = [turn.task for turn in turns]
        arrivals = self._exchange.arrivals(phases, tasks) if self._exchange is not None else {}
        update = _Progress(phases, Counter(task.phase for task in tasks), arrivals)
        if self.observer is not None:
            self.observer.begin()
        self._compute(turns, alive, update)
        for engine in self.engines.values():
            engine.settle()
        if self._exchange is not None:
            self._exchange.settle()
        self.doing = ""
        if self.observer is not None:
            self.observer.end()
        self._end_update(phases)

    def awaited(self) -> tuple[str, list[int]] | None:
        """Which phase of other ranks this rank waits for, if it does, and which ranks; any thread may ask."""
        return None if self._exchange is None else self._exchange.awaited()

    def destroy(self) -> None:
        """Release the engines; neither they nor this can be used afterwards. Every rank calls this."""
        for engine in self.engines.values():
            engine.destroy()
        unite_ranks()

    def _compute(self, turns: Sequence[Turn], alive: dict[int, Work], update: _Progress) -> None:
        # Anything in here may wait for the whole device, as the first use of a kernel does: see orders.py.
        observer = self.observer if self.observer is not None and self.observer.is_watching else None
        for task, receives in turns:
            for other in receives:
                self._expect(other, update)
            phase = update.phases[task.phase]
            self.doing = f"{phase.label}: {task.kind}"
            self.num_tasks += 1
            try:
                self._receive(task, alive, update)
                start = observer.now() if observer else 0.0
                with self.around(phase, task):
                    self._compute_one(task, alive, update)
            except Exception as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(self.doing + (f" of micro-batch {task.micro_batch}" if task.kind != "step" else ""))
                raise
            if observer:
                observer.add(task, phase, start)
            for number in update.done_with(task):
                del alive[number]

    def _expect(self, task: Task, update: _Progress) -> None:
        phase = update.phases[task.phase]
        self.engines[phase.network].expect(phase, task)
        if self._exchange is not None and (arrival := update.arrivals.get(task)) is not None:
            self._exchange.expect(update.phases[arrival.source], arrival.num_samples)

    def _receive(self, task: Task, alive: Mapping[int, Work], update: _Progress) -> None:
        phase = update.phases[task.phase]
        self.engines[phase.network].receive(phase, task)
        if self._exchange is not None and (arrival := update.arrivals.get(task)) is not None:
            outputs = alive[arrival.source].outputs
            outputs[task.micro_batch] = self._exchange.receive(update.phases[arrival.source])

    def _compute_one(self, task: Task, alive: Mapping[int, Work], update: _Progress) -> None:
        work, index = alive[task.phase], task.micro_batch
        phase, engine = work.phase, self.engines[work.phase.network]

        def output(of: int | None) -> Tensor | None:
            if of is None:
                return None
            outputs = alive[of].outputs  # which the last phase that reads them takes away
            return outputs.pop(index, None) if update.is_last_reader(task.phase, of) else outputs.get(index)

        if not phase.computes:
            work.inputs(index, output(phase.images_from))
        elif task.kind == "forward":
            engine.forward(work, index, output(phase.images_from), output(phase.tangents_from))
        elif task.kind == "backward":
            engine.backward(work, index, output(phase.grads_from))
        else:
            engine.step(work)
        if self._exchange is not None and phase.sends and index in work.outputs:
            self._exchange.send(phase, work.outputs.pop(index))


class _Progress:
    """Which phases of an update are still to be computed or read."""

    def __init__(self, phases: Sequence[Phase], left: Counter[int], arrivals: Mapping[Task, Arrival]) -> None:
        self.phases, self.arrivals, self._left = phases, arrivals, left
        reads = [set(phase.reads) for phase in phases]
        self._concerns = [(number, *sorted(read)) for number, read in enumerate(reads)]
        self._readers = [[n for n, read in enumerate(reads) if number in read] for number in range(len(phases))]

    def is_last_reader(self, number: int, of: int) -> bool:
        """Whether no later phase reads what phase ``of`` yields."""
        return number == self._readers[of][-1]

    def done_with(self, task: Task) -> list[int]:
        """Take note of a task; return the phases that nothing needs any more."""
        self._left[task.phase] -= 1
        if self._left[task.phase]:
            return []
        return [n for n in self._concerns[task.phase] if not any(self._left[m] for m in (n, *self._readers[n]))]
