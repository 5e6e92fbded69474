"""`bigsgan plan`: the cost of a recipe, its partition into stages, and the layouts that fit, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.engines.pipeline.layout import (
    StageDivision,
    describe_bubble,
    divide_network,
    expected_bubble,
    measure_layers,
    samples_of,
)
from bigsgan.errors import UserError
from bigsgan.planner import report
from bigsgan.planner.counting import METHODS, count_work, mean_flop, method_of
from bigsgan.planner.layouts import Resources, Surveyor
from bigsgan.planner.teaching import PROGRAMS, left_out, programs_left_out
from bigsgan.runtime import comm, memory
from bigsgan.table import span


def describe_networks(plan: RunPlan, counted: Mapping[str, Any]) -> str:
    """Return what ``count_work`` has found as a table."""
    lines = [f"{'':14}{'parameters':>15}{'forward, GFLOP an image':>26}"]
    for network in plan.recipe.networks:
        cost = counted[network]
        frozen = f"  and {cost['frozen_parameters']:,} frozen parameters" if "frozen_parameters" in cost else ""
        lines.append(f"{network:14}{cost['parameters']:>15,}{cost['forward_flop'] / 1e9:>26.3f}{frozen}")
    if counted["heads_flop"]:
        text = "of D for a teacher's features, at a real image"
        lines.append(f"{'heads':14}{'':15}{counted['heads_flop'] / 1e9:>26.3f}  {text}")
    lines.append(f"{'an update':14}{'':15}{counted['update_flop'] / 1e9:>26.3f}  without penalties")
    for label, name, network in (
        ("penalties", "penalties_flop", "discriminator"),
        ("path length", "path_length_flop", "generator"),
    ):
        if not counted[name]:
            continue
        line = f"{label:14}{'':15}{counted[name] / 1e9:>26.3f}  of {network[0].upper()} in the mean update"
        if name == "path_length_flop" or plan.objective.exact_penalties:
            method = method_of(plan, network)
            (other,) = METHODS.keys() - {method}
            line += f", {METHODS[method]} ({METHODS[other]} {counted['by_method'][name][other] / 1e9:.3f})"
        lines.append(line)
    for name in PROGRAMS:
        flop = counted[f"{name}_flop"]
        if flop is not None:
            lines.append(f"{name:14}{'':15}{flop / 1e9:>26.3f}  of its program in an update")
        lines.append(left_out(plan.recipe, flop is not None, name))
    lines += [*programs_left_out(plan.recipe), _describe_statistics(plan.recipe, "ranks")]
    return "\n".join(filter(None, lines))


def _describe_statistics(recipe: Recipe, ranks: str) -> str:
    """Say over which ranks batch norm takes its statistics; ``ranks`` are those of a host."""
    own = [network for network in NETWORKS if getattr(recipe, network).has_batch_norm]
    where = f"the {ranks} of each host" if recipe.batch_statistics == "host" else "all ranks"
    return f"batch norm of the {' and the '.join(own)}: statistics over {where}" if own else ""


class Speed(NamedTuple):
    """How fast a GPU computes."""

    utilization: float  # share of the peak that it reaches on the operations of `mean_flop` (MFU)
    peak: float  # operations a second


def estimate_time(plan: RunPlan, counted: Mapping[str, Any], speed: Speed) -> dict[str, float]:
    """Seconds of a mean update, images a second, and days of the run, on the plan's ranks at a given speed.

    ``counted`` is what ``count_work`` has found.
    """
    images = plan.world_size * speed.utilization * speed.peak / mean_flop(counted)
    days = plan.recipe.total_nimg / images / 86_400
    return {"update_seconds": plan.recipe.batch / images, "images_per_second": images, "days": days}


def _describe_time(plan: RunPlan, speed: Speed, estimate: Mapping[str, float]) -> str:
    num = plan.world_size
    gpus = f"{num:,} GPU{'s' if num > 1 else ''} at {speed.utilization:.0%} of {speed.peak / 1e12:g} TFLOP/s"
    rate = f"{estimate['update_seconds']:.3g} s an update, {estimate['images_per_second']:,.4g} images/s"
    return f"{gpus}: {rate}, {span(86_400 * estimate['days'], '.3g')} for {plan.recipe.total_nimg:,} images"


def main(plan: RunPlan, pipeline: bool, as_json: bool, speed: Speed | None = None) -> None:
    """Print the cost of the networks, or with ``pipeline`` their division into stages and the expected bubble.

    Raises:
        UserError: ``pipeline`` is set and no network has stages, or there are fewer layers than stages.
    """
    if not pipeline:
        counted = count_work(plan)
        times = {} if speed is None else estimate_time(plan, counted, speed)
        print(json.dumps({**counted, **times}, indent=2) if as_json else describe_networks(plan, counted))
        if speed is not None and not as_json:
            print(_describe_time(plan, speed, times))
        return
    staged = [network for network in plan.recipe.networks if plan.placement(network).num_stages > 1]
    if not staged:
        remedy = "set engines.generator.pipeline_stages=2, or the discriminator's, or both"
        raise UserError("--pipeline", None, "needs a network with pipeline stages", remedy)
    divisions: dict[str, StageDivision] = {}
    for network in staged:
        field = f"engines.{network}.partition"
        with memory.naming_remedy(f"while the layers of the {network} are measured", f"set {field}=parameters"):
            measured = measure_layers(plan, network, comm.device())
        divisions[network] = divide_network(plan, network, measured)
    if as_json:
        print(json.dumps(_pipelines_as_json(plan, divisions), indent=2))
        return
    for network, division in divisions.items():
        print(division.table(samples_of(plan, network)))
    if text := describe_bubble(plan, divisions):
        print(text)


def _pipelines_as_json(plan: RunPlan, divisions: Mapping[str, StageDivision]) -> dict[str, Any]:
    found: dict[str, Any] = {"bubble": expected_bubble(plan, divisions)}
    for network, division in divisions.items():
        num_samples = samples_of(plan, network)
        found[network] = [
            {
                "layers": division.bounds[stage : stage + 2],
                "parameters": division.of_stage(stage).numel,
                "forward_seconds": num_samples * division.of_stage(stage).forward,
                "backward_seconds": num_samples * division.of_stage(stage).backward,
                "sent_bytes": sum(spec.num_bytes for spec in division.boundaries.at(stage + 1, num_samples)),
            }
            for stage in range(division.num_stages)
        ]
    return found


def survey(path: Path, overrides: Sequence[str], resources: Resources, as_json: bool) -> None:
    """Print the memory of a recipe's layouts, and the cheapest that fits as overrides to paste.

    Raises:
        UserError: Nothing fits.
    """
    surveyor = Surveyor(path, overrides, resources)
    found = surveyor.survey()
    if as_json:
        print(json.dumps(report.as_json(found, resources), indent=2))
    else:
        recipe = surveyor.recipe([])
        about = [left_out(recipe, surveyor.traces.program(recipe, name) is not None, name) for name in PROGRAMS]
        about += programs_left_out(recipe)
        about.append(_describe_statistics(recipe, f"{resources.gpus // resources.nodes} ranks"))
        print("\n".join(filter(None, [report.table(found, resources), *about])))
    report.check(found, resources)
    if not as_json:
        print(report.advice(found))
