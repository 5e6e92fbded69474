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

from bigsgan import comm
from bigsgan.engines import Phase, Task
from bigsgan.engines.deepspeed_collectives import wrapped_collectives
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
    _wrap(run.reals, "next_phase", DATA, entering)
    _wrap(run.ema, "update", AVERAGE, entering)


def name_of(phase: Phase, task: Task) -> str:
    """The part of an update that a task belongs to; a step's wait for gradients is the optimizer's."""
    if phase.frozen:
        return SEAM
    if phase.does == "makes images" and not phase.keeps_graphs:
        return IMAGES
    return f"{phase.network[0].upper()} {'optimizer' if task.kind == 'step' else task.kind}"


@contextmanager
def labelled_collectives(entering: Entering) -> Iterator[None]:
    """Lay ``reduce`` around every collective inside the block."""
    with wrapped_collectives(lambda function: _around(function, REDUCE, entering)):
        yield


def _wrap(owner: Any, name: str, label: str, entering: Entering) -> None:
    setattr(owner, name, _around(getattr(owner, name), label, entering))


def _around(function: Callable[..., Any], label: str, entering: Entering) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        with entering(label):
            return function(*args, **kwargs)

    return around


class PhaseClock:
    """Seconds in each phase, without the phases inside it; waits for the device at every border.

    Attributes:
        seconds: By phase.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = [REST]
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Count the block's time for a phase."""
        self._turn()
        self._open.append(label)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def restart(self) -> None:
        """Forget what was counted."""
        self._turn()
        self.seconds.clear()

    def stop(self) -> dict[str, float]:
        """Return the seconds so far, by phase, in the order of an update."""
        self._turn()
        return {phase: self.seconds[phase] for phase in PHASES if phase in self.seconds}

    def _turn(self) -> None:
        comm.synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
