"""The tasks of a phase, and what a task of one stage waits for of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bigsgan.engines.phases import Phase, Placed, Task, Weighs


def awaited(task: Task, stage: int, phases: Sequence[Phase], last: Mapping[str, int]) -> Placed | None:
    """Return the task of another stage, or of the other network, whose result a task reads, and its stage.

    ``stage`` is the task's own, and ``last`` the number of each network's last stage.
    """
    phase = phases[task.phase]
    if task.kind == "step":  # it reads the gradients of all stages; the first stage's come last
        return Placed(Task(task.phase, "backward", phase.num - 1), 0) if stage else None
    is_forward = task.kind == "forward"
    if stage != (0 if is_forward else last[phase.network]):
        return Placed(task, stage + (-1 if is_forward else 1))
    source = phase.images_from if is_forward else phase.grads_from
    if source is None:
        return None
    if isinstance(phases[source], Weighs):  # over all its micro-batches
        return Placed(Task(source, task.kind, phases[source].num - 1), stage)
    return Placed(Task(source, task.kind, task.micro_batch), last[phases[source].network] if is_forward else 0)


def in_turn(number: int, phase: Phase, phases: Sequence[Phase] = ()) -> Iterator[Task]:
    """Yield the tasks of a phase of a network without stages: micro-batch by micro-batch.

    Given all phases, each micro-batch with tangents comes right after the one that gives their direction.
    """
    for index in range(phase.num):
        if phases and phase.tangents_from is not None:
            yield from of_micro_batch(phase.tangents_from, phases[phase.tangents_from], index)
        yield from of_micro_batch(number, phase, index)
    if phase.step:
        yield Task(number, "step", 0)


def of_micro_batch(number: int, phase: Phase, index: int) -> Iterator[Task]:
    """Yield the passes of a micro-batch of a phase."""
    if phase.forward:
        yield Task(number, "forward", index)
    if phase.backward:
        yield Task(number, "backward", index)
