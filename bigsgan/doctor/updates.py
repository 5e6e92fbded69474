"""A few updates of the recipe on this machine: how fast they are, what limits them, and what memory they take."""

from __future__ import annotations

import contextlib
from typing import Any

from bigsgan.bench.arithmetic import arithmetic_of, speed
from bigsgan.bench.measure import Settings, Visit, visit
from bigsgan.bench.product import build_engine_loop
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.memory import size

MOST_MEMORY_ERROR = 0.1
"""Of the planner's prediction, relative to what the allocator held."""

_SETTINGS = Settings(rounds=1, warmup=2, steps=4)
_WAITS, _BUSY = 0.1, 0.8
"""Share of the time from which data is what limits updates, and below which the host is."""


def updates(subject: Subject) -> Finding:
    """Make six updates of the recipe, time the last four, and compare the planner's memory with the allocator's."""
    plan = subject.recipe_plan()
    if any(plan.engines[network].section.compile != "none" for network in NETWORKS):
        return not_applicable("compiling takes minutes; `bigsgan bench train` measures compiled recipes")
    choose_kernels(plan.recipe.deterministic)
    own = visit(lambda: build_engine_loop(plan), contextlib.nullcontext, _SETTINGS)
    assert own is not None, "every rank takes part"
    arithmetic = arithmetic_of(plan, {})
    visits: list[Visit] = subject.ranks.gather(own)
    seconds = max(each.seconds for each in visits)
    numbers: dict[str, Any] = {
        "images_per_second": plan.recipe.batch / seconds,
        "seconds_per_update": seconds,
        "busy_share": min(each.busy for each in visits),
        "data_wait_share": max(each.data_seconds for each in visits) / seconds,
        **speed(arithmetic, seconds),
    }
    text = f"{numbers['images_per_second']:.3g} images/s; {limit(numbers, own.device_peak is not None)}"
    if own.device_peak is None:
        return passed(text, numbers)
    return _with_memory(plan, visits, text, numbers)


def limit(numbers: dict[str, Any], has_device: bool) -> str:
    """What limits updates, as a clause.

    Args:
        numbers: ``data_wait_share``, ``busy_share``, and ``achieved_share`` of a matrix product's speed, or None.
        has_device: Whether a GPU computes.
    """
    if numbers["data_wait_share"] > _WAITS:
        return f"limited by reading data ({numbers['data_wait_share']:.0%} of the time)"
    if has_device and numbers["busy_share"] < _BUSY:
        return f"limited by the host, which launches kernels (the GPU computes {numbers['busy_share']:.0%} of the time)"
    where = "limited by the GPU" if has_device else "limited by the CPU"
    share = numbers["achieved_share"]
    return where if share is None else f"{where}, at {share:.0%} of a matrix product's speed"


def _with_memory(plan: RunPlan, visits: list[Visit], text: str, numbers: dict[str, Any]) -> Finding:
    prediction = predict(plan, Traces())
    fullest = max([*prediction.update.values(), *prediction.penalised.values()], key=lambda peak: peak.total)
    planned, held = prediction.stays + fullest.total, max(each.device_peak or 0 for each in visits)
    error = planned / held - 1
    numbers |= {"planned_bytes": planned, "held_bytes": held, "memory_error": error}
    text += f"; {size(held)} of memory, {size(planned)} planned"
    if abs(error) > MOST_MEMORY_ERROR:
        remedy = (
            "plan with that much more or less than `bigsgan plan --gpu-memory` says, and report the numbers (--json)"
        )
        return failed(f"{text}, which is {error:+.0%}", remedy, numbers)
    return passed(text, numbers)
