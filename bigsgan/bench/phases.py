"""Names the parts of an update by phase and task, for `bigsgan bench profile`.

This covers networks without pipeline stages; a run with stages writes its own timeline.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bigsgan.engines import Phase, Task
from bigsgan.engines.deepspeed.collectives import wrapped_collectives
from bigsgan.runtime import comm
from bigsgan.training.loop import Run

Entering = Callable[[str], AbstractContextManager[Any]]
"""Makes the context of a part of an update, given its name."""

DATA, REDUCE, AVERAGE, REST = "data wait", "reduce", "EMA", "rest"


def name_of(phase: Phase, task: Task) -> str:
    """The part of an update that a task belongs to, by its phase's label.

    Passes whose graphs G's update completes have a name of their own, and so have the passes and the step of an
    update; waiting for gradients in a step counts as the step.
    """
    if phase.step:
        return f"{phase.label}: {task.kind}"
    return f"{phase.label}, graphs kept" if phase.forward and phase.keeps_graphs else phase.label


PHASES = (
    DATA,
    "G makes images",
    "D checks",
    "D differentiates",
    "D trains: forward",
    "D trains: backward",
    "D trains: step",
    "G differentiates",
    "G makes images, graphs kept",
    "D judges",
    "G pulls back: forward",
    "G pulls back: backward",
    "G pulls back: step",
    "D keeps",
    REDUCE,
    AVERAGE,
    REST,
)
"""All parts in the order of an update, by ``name_of``; no update has all of them."""


def label_phases(run: Run, entering: Entering) -> None:
    """Wrap the parts of a run's updates in ``entering``, permanently."""
    run.step.executor.around = lambda phase, task: entering(name_of(phase, task))
    for owner, name, label in ((run.reals, "next_phase", DATA), (run.ema, "update", AVERAGE)):
        setattr(owner, name, _around(getattr(owner, name), label, entering))


def labelled_collectives(entering: Entering) -> AbstractContextManager[None]:
    """Wrap every collective inside the block in ``entering``, as the part ``reduce``."""
    return wrapped_collectives(lambda function: _around(function, REDUCE, entering))


def _around(function: Callable[..., Any], label: str, entering: Entering) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        with entering(label):
            return function(*args, **kwargs)

    return around


class OpenPhases:
    """The open phases, one inside the other; counts go to the innermost one."""

    def __init__(self) -> None:
        self._names = [REST]

    @property
    def innermost(self) -> str:
        """Name of the innermost phase."""
        return self._names[-1]

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Count the block for a phase."""
        self.turn()
        self._names.append(label)
        try:
            yield
        finally:
            self.turn()
            self._names.pop()

    def turn(self) -> None:
        """Count everything up to now for the innermost phase, which another is about to replace."""


class PhaseClock(OpenPhases):
    """Counts seconds in each phase, without the phases inside it; waits for the device at every border.

    Attributes:
        seconds: Seconds by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begin to count anew."""
        self.turn()
        self.seconds.clear()

    def stop(self) -> dict[str, float]:
        """Return the seconds so far, by phase, in the order of an update."""
        self.turn()
        return {phase: self.seconds[phase] for phase in (*PHASES, *self.seconds) if phase in self.seconds}

    def turn(self) -> None:
        """Count the time since the last turn."""
        comm.synchronize()
        now = time.perf_counter()
        self.seconds[self.innermost] += now - self._since
        self._since = now
