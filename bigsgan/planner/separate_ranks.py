"""Layouts in which each network has ranks of its own, compared with those in which every rank holds both."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from bigsgan.config import both_engines
from bigsgan.errors import UserError
from bigsgan.planner.balance import RankDivision, divide, one_of_each
from bigsgan.planner.layouts import WITHOUT_STAGES, Kind, Layout, Resources, Survey, Surveyor
from bigsgan.planner.sides import EXACT, OVERLAPPED, Timing, count_update, time_update
from bigsgan.planner.traffic import Machine, Model, sent_bytes
from bigsgan.table import aligned

_WORTH = 0.9
"""A recommended layout takes at most this share of the time of the others, because the model of time is simple."""

_LEAST = 0.01
"""For updates of fewer seconds, it is recommended only if nothing else fits: kernel launches matter there."""

_MICRO_BATCHES = (1, 2, 4)
"""Multiples of the recipe's number of micro-batches to try."""

SCHEDULES = (EXACT, OVERLAPPED)


@dataclass(frozen=True)
class SplitLayout:
    """A layout in which each network has ranks of its own."""

    layout: Layout  # its overrides, and the memory of its fullest rank
    division: RankDivision  # ranks of G and of D
    timings: dict[str, Timing]  # times of a mean update, by schedule; overlapping work takes as long as its longer side
    sent: float  # bytes of images and of gradients at images in a mean update, over all ranks
    schedule: str  # the recipe's schedule

    @property
    def seconds(self) -> float:
        """Seconds of an update with the recipe's schedule."""
        return self.timings[self.schedule].seconds


@dataclass(frozen=True)
class Comparison:
    """Layouts with ranks for each network, and the best layout without."""

    layouts: list[SplitLayout]  # a layout for each ZeRO stage: the first that fits, else the last that was tried
    refused: dict[str, str]  # ZeRO stages without such a layout, and why
    # seconds of an update in the cheapest layout that fits in which every rank holds both; None if none does. Pipelines
    # count without a bubble, and an offloaded optimizer costs nothing.
    shared: float | None
    machine: Machine  # that times are for

    @property
    def winner(self) -> SplitLayout | None:
        """The fastest layout that fits, if it is much faster than ranks that hold both, or if these do not fit."""
        fitting = [each for each in self.layouts if each.layout.fits]
        best = min(fitting, key=lambda each: each.seconds, default=None)
        if best is None or self.shared is None:
            return best
        return best if self.shared >= _LEAST and best.seconds <= _WORTH * self.shared else None


def machine_of(resources: Resources) -> Machine:
    """The assumed machine, with the given number of GPUs on each host."""
    return Machine(per_node=-(-resources.gpus // resources.nodes))


def compare(surveyor: Surveyor, survey: Survey, machine: Machine) -> Comparison:
    """Try networks on ranks of their own at each ZeRO stage, and compare times with the survey's best."""
    shared = None
    if survey.best is not None:
        plan = surveyor.plan(survey.best.overrides)
        if not plan.is_split:
            model = Model(count_update(plan), count_update(one_of_each(plan.recipe, surveyor.directory)), machine)
            shared = model.shared_seconds(plan.world_size)
    found, refused = [], dict[str, str]()
    for kind in WITHOUT_STAGES if surveyor.resources.gpus > 1 else ():
        try:
            found.append(_find(surveyor, kind, machine))
        except UserError as error:
            refused[kind.name] = str(error)
    return Comparison(found, refused, shared, machine)


def _find(surveyor: Surveyor, kind: Kind, machine: Machine) -> SplitLayout:
    """The first layout that fits: without recomputation, then with it, then with more micro-batches."""
    found = None
    for times, recomputes in ((1, False), *((times, True) for times in _MICRO_BATCHES)):
        accumulation = times * surveyor.recipe([]).accumulation
        try:
            found = _lay_out(surveyor, kind, machine, accumulation, recomputes)
        except UserError:
            if found is None:
                raise
            break
        if found.layout.fits:
            break
    assert found is not None
    return found


def _lay_out(surveyor: Surveyor, kind: Kind, machine: Machine, accumulation: int, recomputes: bool) -> SplitLayout:
    changes = surveyor.changes(kind, accumulation, recomputes)
    changes = [text for text in changes if ".ranks=" not in text]
    numbers = both_engines("ranks=auto")
    recipe = surveyor.recipe([*changes, *numbers])
    work = count_update(one_of_each(recipe, surveyor.directory))
    division = divide(recipe, surveyor.resources.gpus, surveyor.directory, work)
    numbers = [f"engines.{network}.ranks={number}" for network, number in division.numbers.items()]
    layout = surveyor.layout(f"{kind.name}, {division.text} ranks", [*changes, *numbers], recomputes)
    speed = Model(work, work, machine).speed(division.numbers)
    timings = {
        schedule: time_update(work, division.numbers, schedule, speed)
        for schedule in SCHEDULES
        if schedule == work.schedule or (schedule == OVERLAPPED and not recipe.inputs_from_data)  # see config/recipe.py
    }
    return SplitLayout(layout, division, timings, sum(sent_bytes(work).values()), work.schedule)


def with_winner(survey: Survey, found: Comparison) -> Survey:
    """The survey, with the winner as its best if there is one."""
    return survey if found.winner is None else replace(survey, best=found.winner.layout)


def table(found: Comparison) -> str:
    """A table of these layouts, relative to the cheapest layout in which every rank holds both."""
    if not found.layouts and not found.refused:
        return ""
    heads = ["ranks of their own", "micro-batches", "GiB of a rank", "GB of images"]
    heads += [f"{what}, {schedule}" for schedule in SCHEDULES for what in ("idle", "time")]
    rows = [[*heads, ""]]
    for each in found.layouts:
        layout = each.layout
        cells = [layout.label, f"{layout.accumulation} x {layout.micro_batch}"]
        cells += [f"{layout.prediction.peak / 2**30:.2f}", f"{each.sent / 1e9:.3g}"]
        for schedule in SCHEDULES:
            timing = each.timings.get(schedule)
            ratio = "" if timing is None or found.shared is None else f"{timing.seconds / found.shared:.2f}"
            cells += ["" if timing is None else f"{timing.idle:.0%}", ratio]
        rows.append([*cells, "fits" if layout.fits else ""])
    lines = [*aligned(rows), *(f"{name}: not possible, {reason}" for name, reason in found.refused.items())]
    return "\n".join([*lines, _describe(found)])


def _describe(found: Comparison) -> str:
    machine = found.machine
    text = "time: of an update, over that of the cheapest layout above that fits, " if found.shared else "times are "
    text += f"at {machine.operations / 1e12:.0f} TFLOP/s of a GPU, {machine.inside / 1e9:.0f} GB/s within hosts of "
    return f"{text}{machine.per_node} GPUs and {machine.between / 1e9:.0f} GB/s between them"


def advice(found: Comparison) -> str:
    """Say why the winner is best, and its overrides to paste."""
    winner = found.winner
    assert winner is not None
    why = "which alone fits" if found.shared is None else f"whose updates take {winner.seconds / found.shared:.2f}"
    why += "" if found.shared is None else " of the time of the cheapest above that fits"
    return f"best: {winner.layout.name}, {why}\n{shlex.join(winner.layout.overrides)}"


def as_json(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON, in bytes and seconds."""
    return {
        "machine": found.machine._asdict(),
        "together_seconds": found.shared,
        "layouts": [
            {
                "name": each.layout.name,
                "overrides": each.layout.overrides,
                "ranks": each.division.numbers,
                "fits": each.layout.fits,
                "peak": each.layout.prediction.peak,
                "sent": each.sent,
                "schedules": {name: timing._asdict() for name, timing in each.timings.items()},
            }
            for each in found.layouts
        ],
        "refused": found.refused,
    }
