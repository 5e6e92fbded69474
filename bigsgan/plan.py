"""`bigsgan plan`: what a recipe's networks cost, and how they would be divided into stages, without training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.flop_counter import FlopCounterMode

from bigsgan import comm, memory
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.pipeline.layout import (
    Division,
    describe_bubble,
    divide_network,
    measure_layers,
    meta_inputs,
    samples_of,
)
from bigsgan.errors import UserError
from bigsgan.models.build import build_network


def describe_networks(plan: RunPlan) -> str:
    """Parameters and work of both networks, and the work of an update for each image of its batch.

    Forward passes are counted on a device without memory, a multiplication and an addition as two operations. An update
    makes images for D's steps and its own, which cost G a forward and later a backward pass of twice the work; D goes
    forward and backward over real and fake images, and once more forward and backward to the images for G.
    """
    flops = {}
    lines = [f"{'':14}{'parameters':>15}{'forward, GFLOP an image':>26}"]
    for network in NETWORKS:
        numel, flops[network] = count_network(plan, network)
        lines.append(f"{network:14}{numel:>15,}{flops[network] / 1e9:>26.3f}")
    lines.append(f"{'an update':14}{'':15}{update_flops(plan, flops) / 1e9:>26.3f}  without penalties")
    return "\n".join(lines)


def update_flops(plan: RunPlan, flops: Mapping[str, int]) -> int:
    """Operations of an update for each image of its batch, without penalties, from each network's forward pass."""
    d_steps = plan.recipe.objective.d_steps
    judged = 4 if plan.recipe.objective.loss == "relativistic" else 2  # reals too, forward and backward
    return (d_steps + 3) * flops["generator"] + (6 * d_steps + judged) * flops["discriminator"]


def count_network(plan: RunPlan, network: str) -> tuple[int, int]:
    """Parameters, and floating-point operations of a forward pass for one image."""
    num_samples = plan.micro_batch_size(network)  # which layers that look across samples can divide
    with torch.device("meta"):
        stack = build_network(plan.recipe, network).eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        stack(*meta_inputs(plan, network, num_samples))
    return sum(parameter.numel() for parameter in stack.parameters()), counter.get_total_flops() // num_samples


def main(plan: RunPlan, pipeline: bool) -> None:
    """Print what the networks cost, or the division of each that has stages and the bubble to expect of an update.

    Raises:
        UserError: No network has stages though their division is asked for, or there are fewer layers than stages.
    """
    if not pipeline:
        print(describe_networks(plan))
        return
    staged = [network for network in NETWORKS if plan.placement(network).num_stages > 1]
    if not staged:
        remedy = "set engines.generator.pipeline_stages=2, or the discriminator's, or both"
        raise UserError("--pipeline", None, "has nothing to show: no network has stages", remedy)
    divisions: dict[str, Division] = {}
    for network in staged:
        field = f"engines.{network}.partition"
        with memory.naming_remedy(f"while the layers of the {network} were measured", f"set {field}=parameters"):
            measured = measure_layers(plan, network, comm.device())
        divisions[network] = divide_network(plan, network, measured)
        print(divisions[network].table(samples_of(plan, network)))
    if text := describe_bubble(plan, divisions):
        print(text)
