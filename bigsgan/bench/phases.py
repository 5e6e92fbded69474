"""Names for the parts of an update in `bigsgan bench profile`, by phase and task.

Only of networks that lie whole on each rank; a pipeline's timeline is written by the run itself.
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
"""Gives what stands around a part of an update, by its name."""

DATA, IMAGES, SEAM, REDUCE, AVERAGE, REST = "data wait", "G makes images", "seam", "reduce", "EMA", "rest"
PHASES = (
    DATA, IMAGES, "D forward", "D backward", "D optimizer", "G forward", SEAM, "G backward", "G optimizer", REDUCE,
    AVERAGE, REST,
)  # fmt: skip
"""In the order of an update; ``seam`` is D's judgement of G's images and the gradient at them."""


def label_phases(run: Run, entering: Entering) -> None:
    """Lay names around the parts of a run's updates, for good."""
    run.step.executor.around = lambda phase, task: entering(name_of(phase, task))
    for owner, name, label in ((run.reals, "next_phase", DATA), (run.ema, "update", AVERAGE)):
        setattr(owner, name, _around(getattr(owner, name), label, entering))


def name_of(phase: Phase, task: Task) -> str:
    """The part of an update that a task belongs to; a step's wait for gradients is the optimizer's."""
    if phase.does == "judges":
        return SEAM
    if phase.does == "makes images" and not phase.keeps_graphs:
        return IMAGES
    return f"{phase.network[0].upper()} {'optimizer' if task.kind == 'step' else task.kind}"


def labelled_collectives(entering: Entering) -> AbstractContextManager[None]:
    """Lay ``reduce`` around every collective inside the block."""
    return wrapped_collectives(lambda function: _around(function, REDUCE, entering))


def _around(function: Callable[..., Any], label: str, entering: Entering) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        with entering(label):
            return function(*args, **kwargs)

    return around


class OpenPhases:
    """The phases that are open, one inside the other; what is counted is the innermost one's."""

    def __init__(self) -> None:
        self._names = [REST]

    @property
    def innermost(self) -> str:
        """Its name."""
        return self._names[-1]

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Count what the block does for a phase."""
        self.turn()
        self._names.append(label)
        try:
            yield
        finally:
            self.turn()
            self._names.pop()

    def turn(self) -> None:
        """Count what there is so far for the innermost phase, which another is about to replace."""


class PhaseClock(OpenPhases):
    """Seconds in each phase, without the phases inside it; waits for the device at every border.

    Attributes:
        seconds: By phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Forget what was counted."""
        self.turn()
        self.seconds.clear()

    def stop(self) -> dict[str, float]:
        """Return the seconds so far, by phase, in the order of an update."""
        self.turn()
        return {phase: self.seconds[phase] for phase in PHASES if phase in self.seconds}

    def turn(self) -> None:
        """Count the time since the last turn."""
        comm.synchronize()
        now = time.perf_counter()
        self.seconds[self.innermost] += now - self._since
        self._since = now
