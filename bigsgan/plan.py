"""`bigsgan plan`: the cost of a recipe, its partition into stages, and the layouts that fit, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
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


def count_work(plan: RunPlan) -> dict[str, Any]:
    """Parameters and work of both networks, and the work of an update for each image of its batch.

    Forward passes are counted on a device without memory, a multiplication and an addition as two operations. An update
    makes images for D's steps and its own, once for both where they are reused and their graphs can be kept. They cost
    G a forward and later a backward pass of twice the work; D goes forward and backward over real and fake images, and
    once more forward and backward to the images for G, with the reals where G's objective pairs them. What D's
    penalties add is for the mean update, of which a lazy one is in some. What activation checkpointing computes again
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
    every = next((penalty.every for penalty in (plan.objective.r1, plan.objective.r2) if penalty), 1)
    passes = _passes_of_penalties(plan, 0) + (every - 1) * _passes_of_penalties(plan, 1)
    penalties = d_steps * passes * discriminator // every
    return {**networks, "update_flop": update, "penalties_flop": penalties}


def _passes_of_penalties(plan: RunPlan, number: int) -> int:
    """Forward passes of D over as many images as its batch has that its penalties cost more, in step ``number``."""
    loss = DiscriminatorObjective(plan.objective, Statistics(_META), number)
    passes = 3 * (loss.num_segments - 2)  # each goes forward and backward
    if loss.differentiates_inputs and plan.differentiates_forward("discriminator"):
        passes += (2 + 3) * loss.num_segments  # to the images and back, then once more as much for the tangents
    elif loss.differentiates_inputs:
        passes += 3 * len(plan.objective.exact_penalties)  # to the images, and back through that and the forward pass
    return passes


def describe_networks(plan: RunPlan) -> str:
    """What ``count_work`` finds, as a table."""
    counted = count_work(plan)
    lines = [f"{'':14}{'parameters':>15}{'forward, GFLOP an image':>26}"]
    for network in NETWORKS:
        own = counted[network]
        lines.append(f"{network:14}{own['parameters']:>15,}{own['forward_flop'] / 1e9:>26.3f}")
    lines.append(f"{'an update':14}{'':15}{counted['update_flop'] / 1e9:>26.3f}  without penalties")
    if counted["penalties_flop"]:
        lines.append(f"{'penalties':14}{'':15}{counted['penalties_flop'] / 1e9:>26.3f}  of D, in the mean update")
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
    num_samples = plan.engines[network].micro_batch_size  # which layers that look across samples can divide
    with _META:
        stack = build_network(plan.recipe, network).eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        stack(*meta_inputs(plan, network, num_samples))
    return sum(parameter.numel() for parameter in stack.parameters()), counter.get_total_flops() // num_samples


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
