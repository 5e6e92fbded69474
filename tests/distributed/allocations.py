"""What torch's allocator on the host gives out while ranks train: the measured side of the planner's tests."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.profiler import ProfilerActivity, profile, record_function

from bigsgan.config import NETWORKS, Recipe
from bigsgan.draws import Draws
from bigsgan.runtime import comm
from bigsgan.training.loop import Run
from bigsgan.training.sampling import generator_inputs, making
from tests.distributed import scenarios

GRACE_SECONDS = 0.005


def peaks(
    overrides: list[str],
    ds: dict[str, Any],
    num_updates: int,
    recipe: Path | None = None,
    inspect: Callable[[Run], Any] | None = None,
) -> dict[str, Any]:
    """Most bytes that this rank's tensors hold in the last of some updates and while it makes samples from the EMA.

    Beside the run's own, nothing counts: neither what an earlier run left nor the libraries, nor real images for the
    grid, which stay in the host's memory. ``scratch`` is by how much the update's peak would be higher with what
    convolutions and collectives hold on a CPU while they compute, and ``inspected`` what ``inspect`` found at the end.
    ``discriminator`` and ``generator`` are the most between the end of the last backward pass and of the step.
    """
    gc.collect()
    with (
        _giving_back(),
        mock.patch("bigsgan.training.build.samples_to_show", _nothing_to_show),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        with record_function("#build"):
            run = scenarios.build(overrides, ds, recipe=recipe)
        for network, engine in run.step.executor.engines.items():
            if engine.is_held:
                _mark_ends(network, engine._engine)
        num = run.step._sources.slices["generator"]["generator"].num_samples
        labels = torch.arange(num) % max(run.recipe.data.num_classes, 1)
        inputs = generator_inputs(run.recipe, Draws(0), "standing", 0, labels, None, comm.device())
        if run.recipe.translates:
            inputs = _zeros(run.recipe, num), *inputs[1:]
        for update in range(num_updates):
            with record_function(f"#update{update}"):
                scenarios.update(run, 1)
        with record_function("#samples"), run.ema.swapped():
            if run.step.generator.is_held:
                making(run.recipe, run.step.generator.infer_everywhere)(inputs, False)
    inspected = inspect(run) if inspect else None
    scenarios.destroy(run)
    allocations, marks = _read(profiler)
    last = f"#update{num_updates - 1}"
    exact, all_of_it = (_peaks(allocations, marks, counted) for counted in (_is_result, lambda _: True))
    return {
        "update": exact[last] - exact["#build"],
        "samples": exact["#samples"] - exact["#build"],
        **{
            n: max((peak for name, peak in exact.items() if name.startswith(f"#{n} ")), default=0) - exact["#build"]
            for n in NETWORKS
        },
        "scratch": all_of_it[last] - all_of_it["#build"] - (exact[last] - exact["#build"]),
        "inspected": inspected,
    }


def _nothing_to_show(recipe: Recipe, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    num = int(recipe.translates)
    return _zeros(recipe, num), torch.zeros(num, dtype=torch.int64)


def _zeros(recipe: Recipe, num: int) -> torch.Tensor:
    return torch.zeros(num, recipe.data.channels, *recipe.data.resolution)


def _mark_ends(network: str, engine: DeepSpeedEngine) -> None:
    """Mark what an engine does after each backward pass: it reduces gradients, and makes the update."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(f"#{network} {next(numbers)}"):
                return function(*arguments, **options)

        return call

    numbers = itertools.count()
    for name in ("_backward_epilogue", "step"):
        setattr(engine, name, marked(getattr(engine, name)))


class _Allocation(NamedTuple):
    """Bytes that are given out at a time, or given back if they are negative, and by which operations."""

    time: int
    place: int
    size: int
    inside: tuple[str, ...]


def _read(profiler: profile) -> tuple[list[_Allocation], dict[str, tuple[int, int]]]:
    """What was given out, in order of time, and beginnings and ends of the marks."""
    allocations, marks = [], {}
    events = [(event, ()) for event in profiler.profiler.kineto_results.experimental_event_tree()]  # type: ignore[union-attr]
    while events:
        event, inside = events.pop()
        events += [(child, (*inside, event.name)) for child in event.children]
        if event.name == "[memory]":
            fields = event.extra_fields
            allocations.append(_Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, inside))
        elif event.name.startswith("#"):
            marks[event.name] = event.start_time_ns, event.end_time_ns
    return sorted(allocations, key=lambda allocation: allocation.time), marks


def _is_result(allocation: _Allocation) -> bool:
    """Whether an operation's result is put there, and not what oneDNN's convolutions or gloo's collectives need."""
    inside = allocation.inside
    asked = inside[-1:] in (("aten::mkldnn_convolution",), ("aten::convolution_backward",))
    return not asked and not any(name.startswith(("c10d::", "gloo:")) for name in inside)


def _peaks(
    allocations: Iterable[_Allocation], marks: dict[str, tuple[int, int]], counted: Callable[[_Allocation], bool]
) -> dict[str, int]:
    """The most that is held inside each mark; of ``#build`` what was held before."""
    live: dict[int, int] = {}
    held, found = 0, dict.fromkeys(marks, 0)
    for allocation in allocations:
        if allocation.size < 0:
            held -= live.pop(allocation.place, 0)
        elif counted(allocation):
            live[allocation.place] = allocation.size
            held += allocation.size
        for name, (start, end) in marks.items():
            if name == "#build":
                found[name] = held if allocation.time < start else found[name]
            elif start <= allocation.time <= end:
                found[name] = max(found[name], held)
    return found


@contextmanager
def _giving_back() -> Iterator[None]:
    """Let gloo's threads drop a collective's tensors first: what they free does not count as freed (torch 2.15)."""
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce")
    places: list[tuple[Any, str]] = [(comm, "_all_gather"), *((dist, name) for name in names)]
    places += [(deepspeed_comm.cdb, name) for name in ("all_gather_function", "reduce_scatter_function")]
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, _patient(getattr(place, name))))
        yield


def _patient(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        work = collective(*arguments, **options)
        if work is not None:
            return _Patient(work, (arguments, options))
        time.sleep(GRACE_SECONDS)
        return None

    return call


class _Patient:
    """A collective under way, whose tensors are held here until gloo has let them go."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._work = None
        time.sleep(GRACE_SECONDS)
        self._tensors = None

    def is_completed(self) -> bool:
        return bool(self._work is None or self._work.is_completed())
