"""Makes a few updates of the recipe on this machine: their speed, what limits it, and their memory."""

from __future__ import annotations

import contextlib
from typing import Any

from bigsgan.bench.arithmetic import arithmetic_of, speed
from bigsgan.bench.measure import Settings, Visit, visit
from bigsgan.bench.product import build_engine_loop
from bigsgan.config import RunPlan
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.engines.build import on_this_machine
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.memory import size

MOST_MEMORY_ERROR = 0.1
"""Largest error of the planner's prediction, relative to what the allocator held."""

MOST_WORKSPACES = 512 << 20
"""Bytes by which more may be held than planned in any case: the plan leaves out workspaces, which the allocator holds.

On Hopper cuBLAS has 32 MiB for each thread and stream that calls it, and cuDNN what a convolution asks for. Next to a
small recipe that is more than a tenth.
"""

_SETTINGS = Settings(rounds=1, warmup=2, steps=4, looks_at_talk=True)
_COMPILED = _SETTINGS._replace(warmup=4)
"""The first update compiles, and CUDA graphs are recorded in later ones."""

_WAITS, _TALKS, _BUSY = 0.1, 0.2, 0.8
"""Shares of the time: data and other ranks limit updates above theirs; the host does below the last."""


def updates(subject: Subject) -> Finding:
    """Make six updates of the recipe, time the last four, and compare the planner's memory with the allocator's."""
    if subject.recipe_plan().recipe.compiles:
        return not_applicable("the recipe compiles, which takes minutes: see recipe.compiled")
    return _measured(subject.recipe_plan(), subject, _SETTINGS)


def compiled_updates(subject: Subject) -> Finding:
    """Make the updates of a recipe that compiles, and compare memory in the same way."""
    if not subject.recipe_plan().recipe.compiles:
        return not_applicable("the recipe compiles nothing")
    return _measured(subject.recipe_plan(), subject, _COMPILED)


def _measured(plan: RunPlan, subject: Subject, settings: Settings) -> Finding:
    choose_kernels(plan.recipe.deterministic, searches=not plan.has_messages)
    own = visit(lambda: build_engine_loop(plan), contextlib.nullcontext, settings)
    assert own is not None, "every rank takes part"
    arithmetic = arithmetic_of(plan, {})
    visits: list[Visit] = subject.ranks.gather(own)
    seconds = max(each.seconds for each in visits)
    numbers: dict[str, Any] = {
        "images_per_second": plan.recipe.batch / seconds,
        "seconds_per_update": seconds,
        "busy_share": min(each.busy for each in visits),
        "communication_share": min(each.talking for each in visits),  # the least, as others also wait for a slow rank
        "data_wait_share": max(each.data_seconds for each in visits) / seconds,
        "waiting_share": next((each.idle for each in visits if each.idle is not None), None),
        **speed(arithmetic, seconds),
    }
    numbers["idle_share"] = max(0.0, 1 - numbers["busy_share"])
    has_device = own.device_peak is not None
    text = f"{numbers['images_per_second']:.3g} images/s; {limit(numbers, has_device)}; {shares(numbers, has_device)}"
    if not has_device:
        return passed(text, numbers)
    return _with_memory(on_this_machine(plan), visits, text, numbers)


def limit(numbers: dict[str, Any], has_device: bool) -> str:
    """What limits updates, as a clause.

    Args:
        numbers: ``data_wait_share``, ``communication_share`` and ``busy_share`` of the time, and ``waiting_share``:
            that of an update in which ranks wait for each other, None where networks take turns on all ranks.
        has_device: Whether a GPU computes.
    """
    if numbers["data_wait_share"] > _WAITS:
        return f"limited by reading data ({numbers['data_wait_share']:.0%} of the time)"
    if (numbers["waiting_share"] or 0.0) > _TALKS:
        return f"limited by ranks that wait for each other ({numbers['waiting_share']:.0%} of the time)"
    if numbers["communication_share"] > _TALKS:
        return f"limited by communication ({numbers['communication_share']:.0%} of the time)"
    if has_device and numbers["busy_share"] < _BUSY:
        return "limited by the host, which launches kernels"
    return f"limited by the {_device(has_device)}"


def shares(numbers: dict[str, Any], has_device: bool) -> str:
    """How much of the time the device is idle, and how near it comes to a matrix product's speed, as a clause."""
    text = f"the {_device(has_device)} is idle {numbers['idle_share']:.0%} of the time"
    share = numbers["achieved_share"]
    if share is None:
        return f"{text}; operations of stages are not counted"
    return f"{text}, and at {share:.0%} of a matrix product's speed"


def _device(has_device: bool) -> str:
    return "GPU" if has_device else "CPU"


def _with_memory(plan: RunPlan, visits: list[Visit], text: str, numbers: dict[str, Any]) -> Finding:
    planned = max(each.updating for each in predict_each(plan, Traces()))
    held = max(each.device_peak or 0 for each in visits)
    error = planned / held - 1
    numbers |= {"planned_bytes": planned, "held_bytes": held, "memory_error": error}
    text += f"; {size(held)} of memory, {size(planned)} planned"
    may_be_workspaces = 0 <= held - planned <= MOST_WORKSPACES
    if abs(error) > MOST_MEMORY_ERROR and not may_be_workspaces:
        remedy = (
            "plan with that much more or less than `bigsgan plan --gpu-memory` says, and report the numbers (--json)"
        )
        return failed(f"{text}, which is {error:+.0%}", remedy, numbers)
    return passed(text, numbers)
