"""`bigsgan plan`: the cost of a recipe, its partition into stages, and the layouts that fit, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.adversarial.path_length import PathLengthPenalty
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.pipeline.layout import (
    Division,
    describe_bubble,
    divide_network,
    expected_bubble,
    measure_layers,
    meta_inputs,
    samples_of,
)
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.monitor import Statistics
from bigsgan.planner import report
from bigsgan.planner.layouts import Resources, Surveyor
from bigsgan.runtime import comm, memory

_META = torch.device("meta")
_METHODS = {"double_backward": "by a double backward", "forward_mode": "in forward mode"}


def count_work(plan: RunPlan) -> dict[str, Any]:
    """Parameters and work of both networks, and the work of an update for each image of its batch.

    Forward passes are counted on a device without memory, a multiplication and an addition as two operations. An update
    makes images for D's steps and its own, once for both where they are reused and their graphs can be kept. They cost
    G a forward and later a backward pass of twice the work; D goes forward and backward over real and fake images, and
    once more forward and backward to the images for G, with the reals where G's objective pairs them. What D's
    penalties and G's path length add is for the mean update, of which a lazy one is in some: as the plan has it, and by
    each method. What activation checkpointing computes again
    is left out, as model FLOP utilisation has it.
    """
    counted = {network: count_network(plan, network) for network in NETWORKS}
    d_steps = plan.recipe.objective.d_steps
    segments = GeneratorObjective(plan.recipe.objective, Statistics(_META)).num_segments
    generator, discriminator = (counted[network][1] for network in NETWORKS)
    made_again = not plan.recipe.objective.reuse_fakes or not plan.keeps_generator_graphs
    num_made = d_steps + made_again
    update = (num_made + 2) * generator + (6 * d_steps + 2 * segments) * discriminator
    networks = {n: {"parameters": numel, "forward_flop": flop} for n, (numel, flop) in counted.items()}
    penalties = {method: _count_penalties(plan, discriminator, method) for method in _METHODS}
    lengths = {method: _count_path_length(plan, method) for method in _METHODS}
    taken = {"penalties_flop": penalties[_method(plan, "discriminator")]}
    taken |= {"path_length_flop": lengths[_method(plan, "generator")]}
    by_method = {"penalties_flop": penalties, "path_length_flop": lengths}
    return {**networks, "update_flop": update, **taken, "by_method": by_method}


def _method(plan: RunPlan, network: str) -> str:
    return "forward_mode" if plan.differentiates_forward(network) else "double_backward"


def _count_penalties(plan: RunPlan, discriminator: int, method: str) -> int:
    """Operations of D's penalties in the mean update, for an image of its batch; ``discriminator`` of a forward pass.

    A segment that a penalty adds goes forward and backward, 3 passes. A double backward goes to the images and back
    through that, 1 + 2, in all segments. In forward mode D goes to the images and back before it trains, 2, and with
    the values go tangents, 3.
    """
    every = next((penalty.every for penalty in (plan.objective.r1, plan.objective.r2) if penalty), 1)
    passes = 0
    for number, times in ((0, 1), (1, every - 1)):
        loss = DiscriminatorObjective(plan.objective, Statistics(_META), number)
        exact = (3 if method == "double_backward" else 2 + 3) * loss.num_segments * loss.differentiates_inputs
        passes += times * (3 * (loss.num_segments - 2) + exact)
    return plan.recipe.objective.d_steps * passes * discriminator // every


def _count_path_length(plan: RunPlan, method: str) -> int:
    """Operations of G's path length in the mean update, for an image of its batch.

    As those of a penalty on D, of the layers behind the styles; tangents are carried for all samples, all else is for
    those that take part.
    """
    section = plan.recipe.objective.path_length
    if section is None:
        return 0
    mapping, synthesis = _count_forward(plan, "generator", PathLengthPenalty.ahead)
    if method == "double_backward":
        return 3 * synthesis // (section.batch_shrink * section.every)
    return ((mapping + 2 * synthesis) // section.batch_shrink + 3 * synthesis) // section.every


def describe_networks(plan: RunPlan) -> str:
    """What ``count_work`` finds, as a table."""
    counted = count_work(plan)
    lines = [f"{'':14}{'parameters':>15}{'forward, GFLOP an image':>26}"]
    for network in NETWORKS:
        own = counted[network]
        lines.append(f"{network:14}{own['parameters']:>15,}{own['forward_flop'] / 1e9:>26.3f}")
    lines.append(f"{'an update':14}{'':15}{counted['update_flop'] / 1e9:>26.3f}  without penalties")
    for label, name, network in (("penalties", "penalties_flop", "D"), ("path length", "path_length_flop", "G")):
        if not counted[name]:
            continue
        line = f"{label:14}{'':15}{counted[name] / 1e9:>26.3f}  of {network} in the mean update"
        if name == "path_length_flop" or plan.objective.exact_penalties:
            taken = _method(plan, "discriminator" if network == "D" else "generator")
            (other,) = _METHODS.keys() - {taken}
            line += f", {_METHODS[taken]} ({_METHODS[other]} {counted['by_method'][name][other] / 1e9:.3f})"
        lines.append(line)
    return "\n".join(lines)


class Speed(NamedTuple):
    """Of a GPU.

    Attributes:
        utilization: Share of its peak at which it computes what ``count_work`` counts (MFU).
        peak: Operations a second.
    """

    utilization: float
    peak: float


def estimate_time(plan: RunPlan, speed: Speed) -> dict[str, float]:
    """Seconds of a mean update, images a second, and days of the run, on the plan's ranks at a given speed."""
    counted, recipe = count_work(plan), plan.recipe
    flop = counted["update_flop"] + counted["penalties_flop"]
    images = plan.world_size * speed.utilization * speed.peak / flop
    days = recipe.total_nimg / images / 86_400
    return {"update_seconds": recipe.batch / images, "images_per_second": images, "days": days}


def _describe_time(plan: RunPlan, speed: Speed) -> str:
    found, num = estimate_time(plan, speed), plan.world_size
    gpus = f"{num:,} GPU{'s' if num > 1 else ''} at {speed.utilization:.0%} of {speed.peak / 1e12:g} TFLOP/s"
    rate = f"{found['update_seconds']:.3g} s an update, {found['images_per_second']:,.4g} images/s"
    return f"{gpus}: {rate}, {found['days']:.3g} days for {plan.recipe.total_nimg:,} images"


def count_network(plan: RunPlan, network: str) -> tuple[int, int]:
    """Parameters, and floating-point operations of a forward pass for one image."""
    with _META:
        stack = build_network(plan.recipe, network)
    return sum(parameter.numel() for parameter in stack.parameters()), sum(_count_forward(plan, network, 0))


def _count_forward(plan: RunPlan, network: str, ahead: int) -> tuple[int, int]:
    """Operations of a forward pass for one image: of the layers ``ahead``, and of the others."""
    num_samples = plan.engines[network].micro_batch_size  # which layers that look across samples can divide
    with _META:
        stack = build_network(plan.recipe, network).eval().requires_grad_(False)
    carry, found = meta_inputs(plan, network, num_samples), []
    for part in (stack.part(0, ahead), stack.part(ahead, len(stack.layers))):
        with FlopCounterMode(display=False) as counter:
            carry = part.fold(*carry)
        found.append(counter.get_total_flops() // num_samples)
    return found[0], found[1]


def main(plan: RunPlan, pipeline: bool, as_json: bool, speed: Speed | None = None) -> None:
    """Print what the networks cost, or the division of each that has stages and the bubble to expect of an update.

    Raises:
        UserError: No network has stages though their division is asked for, or there are fewer layers than stages.
    """
    if not pipeline:
        times = {} if speed is None else estimate_time(plan, speed)
        print(json.dumps({**count_work(plan), **times}, indent=2) if as_json else describe_networks(plan))
        if speed is not None and not as_json:
            print(_describe_time(plan, speed))
        return
    staged = [network for network in NETWORKS if plan.placement(network).num_stages > 1]
    if not staged:
        remedy = "set engines.generator.pipeline_stages=2, or the discriminator's, or both"
        raise UserError("--pipeline", None, "needs a network with pipeline stages", remedy)
    divisions: dict[str, Division] = {}
    for network in staged:
        field = f"engines.{network}.partition"
        with memory.naming_remedy(f"while the layers of the {network} were measured", f"set {field}=parameters"):
            measured = measure_layers(plan, network, comm.device())
        divisions[network] = divide_network(plan, network, measured)
    if as_json:
        print(json.dumps(_pipelines_as_json(plan, divisions), indent=2))
        return
    for network, division in divisions.items():
        print(division.table(samples_of(plan, network)))
    if text := describe_bubble(plan, divisions):
        print(text)


def _pipelines_as_json(plan: RunPlan, divisions: Mapping[str, Division]) -> dict[str, Any]:
    found: dict[str, Any] = {"bubble": expected_bubble(plan, divisions)}
    for network, division in divisions.items():
        num_samples = samples_of(plan, network)
        found[network] = [
            {
                "layers": division.bounds[stage : stage + 2],
                "parameters": sum(layer.numel for layer in division.of_stage(stage)),
                "forward_seconds": num_samples * sum(layer.forward for layer in division.of_stage(stage)),
                "backward_seconds": num_samples * sum(layer.backward for layer in division.of_stage(stage)),
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
    found = Surveyor(path, overrides, resources).survey()
    print(json.dumps(report.as_json(found, resources), indent=2) if as_json else report.table(found, resources))
    report.check(found, resources)
    if not as_json:
        print(report.advice(found))
