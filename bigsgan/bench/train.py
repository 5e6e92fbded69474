"""`bigsgan bench train`: compares variants of one recipe with its baseline, in one run."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bigsgan.bench.about import on_all_ranks, print_results
from bigsgan.bench.arithmetic import Arithmetic, arithmetic_of, speed
from bigsgan.bench.lazy import partly_timed
from bigsgan.bench.measure import Builder, Setting, Settings, Visit, take_turns
from bigsgan.bench.plain import build_plain_loop
from bigsgan.bench.product import build_engine_loop
from bigsgan.bench.table import NOTHING, Table, mebibytes, number, percent
from bigsgan.bench.variants import Planned
from bigsgan.config import Recipe
from bigsgan.data import build_dataset
from bigsgan.engines.compile_checks import check_compiler, check_cuda_graphs
from bigsgan.engines.deepspeed_config import checked_config
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels, kernels
from bigsgan.runtime.tf32 import tf32

CONTROL = "control"
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("variant", "variant", str),
    ("s/update", "update_seconds", number),
    ("images/s", "images_per_second", number),
    ("s/epoch", "epoch_seconds", partial(number, digits=4)),
    ("time per image", "time_ratio", lambda quartiles: f"{quartiles[1]:.3f}"),
    ("quartiles", "time_ratio", lambda quartiles: f"{quartiles[0]:.3f} - {quartiles[2]:.3f}"),
    ("TFLOP/s", "flops_per_second", lambda flops: number(flops and flops / 1e12)),
    ("of peak", "achieved_share", percent),
    ("device MiB", "device_peak_bytes", mebibytes),
    ("host MiB", "host_peak_bytes", mebibytes),
    ("added MiB", "host_added_bytes", mebibytes),
    ("busy", "busy_share", percent),
    ("idle", "idle_share", percent),
    ("data wait", "data_wait_share", percent),
    ("D loss", "d_loss", "{:.4f}".format),
    ("G loss", "g_loss", "{:.4f}".format),
    ("D differs", "d_loss_difference", lambda off: NOTHING if off is None else f"{off:.1e}"),
    ("G differs", "g_loss_difference", lambda off: NOTHING if off is None else f"{off:.1e}"),
)
"""Headings, the keys of a variant's record below them, and how their values are shown."""

_MEANING = (
    "the first updates of a round warm up, the others are timed",
    "time per image: over the first variant's, median of the rounds; control: the first variant a second time",
    "TFLOP/s: operations of the mean update and a rank over its time; of peak: of a matrix product's speed (--mfu)",
    "device MiB, host MiB: peak of a rank in the last round; added: beyond what the process held before it was built",
    "idle: of one update, that ranks wait for each other, in pipelines and on ranks of their own",
    "busy: of the time, that the GPU computed, or the threads of a CPU; data wait: for images",
    "losses: mean of the timed updates of the last round; differs: relative difference of the first update's loss",
)


class Result(NamedTuple):
    """Measurements of one variant."""

    name: str  # of the variant, or `control`
    title: str  # description of the variant
    recipe: Recipe | None  # None if it could not run
    rounds: list[list[Visit]]  # visits of its ranks, by round; empty if it could not run
    reason: str = ""  # why it could not run
    arithmetic: Arithmetic | None = None  # work of the mean update, if it is counted

    @property
    def image_seconds(self) -> list[float]:
        """Seconds for an image, by round, on the slowest rank: an update waits for it."""
        assert self.recipe is not None
        return [max(visit.seconds for visit in ranks) / self.recipe.batch for ranks in self.rounds]


def main(recipe: Recipe, planned: Sequence[Planned], settings: Settings, form: str | None) -> int:
    """Measure, print, and return the exit status. Every rank calls this."""

    def measure() -> list[dict[str, Any]]:
        choose_kernels(recipe.deterministic)
        num_images = len(build_dataset(recipe.data))
        results = _measure([_on_machine(each) for each in planned], settings)
        return [record(result, results, num_images) for result in results] if comm.rank() == 0 else []

    return on_all_ranks(measure, lambda records: _show(recipe, records, settings, form))


def _on_machine(planned: Planned) -> Planned:
    """Replace the plan of a variant that cannot run on this machine by a reason."""
    variant, plan = planned.variant, planned.plan
    if plan is None:
        return planned
    if variant.is_plain:
        if plan.recipe.objective.schedule != "exact":
            return Planned(variant, None, "networks take turns in the plain loop, as objective.schedule=exact has it")
        if plan.recipe.objective.pool:
            return Planned(variant, None, "the plain loop has no images of earlier updates, as objective.pool has")
        if plan.recipe.batch_statistics == "host":
            return Planned(variant, None, "the plain loop takes batch norm's statistics over all ranks")
        if plan.recipe.generator.simulates_steps:
            return Planned(variant, None, "the plain loop has no generator.noised=samples")
        if key := plan.recipe.objective.adversarial.weighs:
            return Planned(variant, None, f"the plain loop has no weight as objective.adversarial.{key}")
        if variant.tf32 is not None and comm.device().type != "cuda":
            return Planned(variant, None, "needs a CUDA device, which alone has TF32")
        if variant.tf32 and not torch.cuda.is_tf32_supported():
            return Planned(variant, None, "needs a CUDA device that has TF32")
        return planned
    try:
        for network in plan.engines:
            checked_config(plan, network)
            check_compiler(plan, network)
            check_cuda_graphs(plan, network)
    except UserError as error:
        return Planned(variant, None, str(error))
    return planned


def _setting(planned: Planned) -> Setting:
    """The context in which a variant is built and run, and in which the peak that it is compared with is measured."""
    if planned.variant.tf32 is not None:
        return partial(tf32, planned.variant.tf32)
    plan = planned.plan
    deterministic, searches = (plan.recipe.deterministic, not plan.has_messages) if plan else (False, True)
    return partial(kernels, deterministic, searches) if deterministic or not searches else contextlib.nullcontext


def _builder(planned: Planned) -> Builder:
    assert planned.plan is not None
    if not planned.variant.is_plain:
        return partial(build_engine_loop, planned.plan)
    if planned.variant.single and comm.rank() > 0:
        return lambda: None
    return partial(build_plain_loop, planned.plan, distributed=not planned.variant.single)


def _measure(planned: Sequence[Planned], settings: Settings) -> list[Result]:
    """Measure variants that can run, the first of them twice; results are in order, the control after that first."""
    possible = [each for each in planned if each.plan is not None]
    if not possible:
        raise UserError("--variants", None, f"cannot run here: {planned[0].reason}", "choose others")
    visited = [*possible, possible[0]]  # the control comes last: no variant is farther from the first
    names = [each.variant.name for each in possible] + [CONTROL]

    def announce(turn: int, i: int, seconds: float | None) -> None:
        if comm.rank() == 0:
            took = "" if seconds is None else f": {number(seconds)} s/update"
            print(f"round {turn + 1} of {settings.rounds}: {names[i]}{took}", file=sys.stderr, flush=True)

    rounds, failed = take_turns([(_builder(each), _setting(each)) for each in visited], settings, announce)
    if len(failed) == len(visited):
        tried = ",".join(each.variant.name for each in possible)
        raise UserError("--variants", tried, f"cannot run here: {failed[0]}", "choose others, or change the recipe")
    results = {p.variant.name: Result(p.variant.name, p.variant.title, None, [], p.reason) for p in planned}
    peaks: dict[str, float] = {}
    for i, (name, each) in enumerate(zip(names, visited, strict=True)):
        assert each.plan is not None
        title = f"{possible[0].variant.name} again" if name == CONTROL else each.variant.title
        if i in failed:
            results[name] = Result(name, title, None, [], failed[i])
            continue
        with _setting(each)():
            arithmetic = arithmetic_of(each.plan, peaks)
        results[name] = Result(name, title, each.plan.recipe, rounds[i], arithmetic=arithmetic)
    control = results.pop(CONTROL)
    ordered = list(results.values())
    ordered.insert(planned.index(possible[0]) + 1, control)
    return ordered


def record(result: Result, results: Sequence[Result], num_images: int) -> dict[str, Any]:
    """The record of one variant, compared with the first that ran; an epoch has ``num_images``."""
    about_it: dict[str, Any] = {"variant": result.name, "what": result.title}
    if result.recipe is None:
        return {**about_it, "reason": result.reason}
    first = next(each for each in results if each.recipe is not None)
    assert first.recipe is not None
    seconds = result.image_seconds
    ratios = [a / b for a, b in zip(seconds, first.image_seconds, strict=True)]
    visits = [visit for ranks in result.rounds for visit in ranks]
    mine, others = _losses(result, "first_losses", 0), _losses(first, "first_losses", 0)
    comparable = result.recipe.batch == first.recipe.batch
    last = _losses(result, "losses", -1)
    total = sum(visit.seconds for visit in visits)
    idle = [visit.idle for visit in visits if visit.idle is not None]
    settled = result.rounds[-1]  # the first round includes memory that is loaded once in a process
    devices = [visit.device_peak for visit in settled if visit.device_peak is not None]
    middle = statistics.median(seconds)
    return {
        **about_it,
        "data": result.recipe.data.kind,
        "batch": result.recipe.batch,
        "update_seconds": middle * result.recipe.batch,
        "images_per_second": 1 / middle,
        "epoch_seconds": middle * num_images,
        "time_ratio": statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3,
        **speed(result.arithmetic, middle * result.recipe.batch),
        "device_peak_bytes": max(devices, default=None),
        "host_peak_bytes": max(visit.host_peak for visit in settled),
        "host_added_bytes": max(visit.host_peak - visit.host_before for visit in settled),
        "busy_share": statistics.fmean(visit.busy for visit in visits),
        "idle_share": statistics.median(idle) if idle else None,
        "data_wait_share": sum(visit.data_seconds for visit in visits) / total,
        "d_loss": last["d"],
        "g_loss": last["g"],
        "d_loss_difference": _difference(mine["d"], others["d"]) if comparable else None,
        "g_loss_difference": _difference(mine["g"], others["g"]) if comparable else None,
        "image_seconds": seconds,
    }


def _losses(result: Result, kind: str, turn: int) -> dict[str, float]:
    """D's loss, and G's with all its terms, in one round."""
    assert result.recipe is not None
    means, section = getattr(result.rounds[turn][0], kind), result.recipe.objective
    weights = {**section.of_targets, "feature_matching": section.feature_matching}
    weights |= {term.label: term.weight for term in section.terms if term.network == "generator"}
    if section.consistency:
        weights["consistency"] = section.consistency.weight
    extra = sum(weight * means[f"loss/{name}"] for name, weight in weights.items() if weight)
    return {"d": means["loss/discriminator"], "g": means["loss/generator"] + extra}


def _difference(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)


def _show(recipe: Recipe, records: Sequence[dict[str, Any]], settings: Settings, form: str | None) -> None:
    name, untimed = label(recipe), partly_timed(recipe, settings.steps)
    ran = [each for each in records if "reason" not in each]
    notes = [
        f"{each['variant']} ({each['what']}): cannot run here: {each['reason']}" for each in records if "reason" in each
    ]
    peaks = {each["matrix_precision"]: each["matrix_flops_per_second"] for each in ran if each["flops"]}
    notes += [f"matrix product in {kind}: {number(peak / 1e12)} TFLOP/s" for kind, peak in peaks.items()]
    title = f"{name}; rounds: {settings.rounds}, each of {settings.warmup} + {settings.steps} updates"
    headings = [heading for heading, _, _ in _COLUMNS]
    table = Table(title, headings, [_row(each) for each in ran], [*notes, *untimed, *_MEANING])
    print_results(form, {"recipe": name, **settings._asdict(), "variants": records, "notes": untimed}, table)


def label(recipe: Recipe) -> str:
    """Describe a recipe by family, resolution, batch and data; generated data is called synthetic."""
    data = recipe.data
    what = "synthetic data (generated, no photographs)" if data.kind.startswith("synthetic") else f"{data.kind} data"
    return f"{recipe.generator.family} at {data.resolution}, batch {recipe.batch}, {what}"


def _row(each: dict[str, Any]) -> list[str]:
    return [shown(each[key]) for _, key, shown in _COLUMNS]
