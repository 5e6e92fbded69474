"""Counts parameters and operations of a recipe's networks and updates, on a device without memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.config.families.features import FeaturesNetwork
from bigsgan.config.families.outside import is_outside
from bigsgan.config.objective import PathLength, num_images
from bigsgan.engines.phases import UpdateGame, game_of
from bigsgan.engines.pipeline.layout import check_divisible, divide_layers, meta_inputs
from bigsgan.engines.pipeline.profile import count
from bigsgan.models.build import network_on_meta
from bigsgan.models.frozen import has_frozen, num_frozen
from bigsgan.models.network import LayerStack, frozen_programs, frozen_tensors
from bigsgan.planner.teaching import PROGRAMS, trace_program

_FLOP_OF_LAYERS: dict[tuple[str, int, bool, str], list[int]] = {}
"""By network, micro-batch, whether images are judged, and recipe: what ``count_layers`` has found."""
LONGEST_PERIOD = 4096
"""Updates in which lazy penalties are counted; where they repeat later, their shares are near enough."""

METHODS = {"double_backward": "by a double backward", "forward_mode": "in forward mode"}


def count_work(plan: RunPlan) -> dict[str, Any]:
    """Count parameters and work of both networks, and the work of an update for each image of its batch.

    Forward passes are counted on a device without memory; a multiplication and an addition are two operations. An
    update makes images for D's steps and for G's, once for both if they are reused and their graphs can be kept. A
    student that learns from its own images makes those of the steps before, too. G's
    images cost a forward pass, and later a backward pass of twice the work. D goes forward and backward over real and
    fake images, and again forward and backward to the images for G, also over real ones if G's objective pairs them.
    A frozen program at the beginning of a network goes backward only there, to G's images. Other frozen parts go
    backward only where something before them needs gradients, and D from outside may compute more where images do.
    D's heads for a teacher's features go forward and backward over real images; ``heads_flop`` is their forward pass.
    ``teacher_flop`` is what the teacher's program adds to an update, and not part of it; None if there is no file.
    ``perceptual_flop`` is the same of a perceptual distance, with its gradient at G's images.
    D's penalties and G's path length are averaged over updates, as a lazy one is only in some: by the plan's method,
    and by each. Recomputation by activation checkpointing does not count, as in model FLOP utilization.
    """
    counted = {network: count_network(plan, network) for network in NETWORKS}
    d_steps = plan.recipe.objective.d_steps
    segments = 1 + plan.recipe.objective.pairs
    generator, discriminator = (counted[network][1] for network in NETWORKS)
    made_for_g = not plan.recipe.objective.reuse_fakes or not plan.keeps_generator_graphs
    num_made = d_steps + made_for_g if plan.recipe.has_discriminator else 1
    heads, (program, distance) = count_heads(plan), (trace_program(plan.recipe, name) for name in PROGRAMS)
    trained = {network: _count_backward(plan, network) for network in NETWORKS}
    num_before = plan.recipe.generator.num_steps - 1 if plan.recipe.generator.simulates_steps else 0
    update = num_batches_made(plan) * num_before * generator
    update += num_made * generator + trained["generator"] + 3 * d_steps * heads
    update += 2 * d_steps * (discriminator + trained["discriminator"])
    update += segments * (discriminator + sum(count_layers(plan, "discriminator", judged=True)))
    update -= 2 * count_frozen(plan, "generator") + 4 * d_steps * count_frozen(plan, "discriminator")
    networks: dict[str, Any] = {n: {"parameters": numel, "forward_flop": flop} for n, (numel, flop) in counted.items()}
    for network in plan.recipe.networks:
        if frozen := num_frozen(network_on_meta(plan.recipe, network)):
            networks[network]["frozen_parameters"] = frozen
    penalties = {method: _count_penalties(plan, discriminator, method) for method in METHODS}
    lengths = {method: _count_path_length(plan, method) for method in METHODS}
    taken = {"penalties_flop": penalties[method_of(plan, "discriminator")]}
    taken |= {"path_length_flop": lengths[method_of(plan, "generator")]}
    by_method = {"penalties_flop": penalties, "path_length_flop": lengths}
    taught = {"heads_flop": heads, "teacher_flop": d_steps * program.flop if program else None}
    taught |= {"perceptual_flop": distance.flop if distance else None}
    return {**networks, "update_flop": update, **taken, **taught, "by_method": by_method}


def mean_flop(counted: Mapping[str, Any]) -> int:
    """Operations of the mean update for an image of its batch, with penalties, path length and frozen programs.

    ``counted`` is what ``count_work`` has found. Shares of a peak (MFU) are measured and given by this number.
    """
    names = ("update", "penalties", "path_length", *PROGRAMS)
    return sum(counted[f"{name}_flop"] or 0 for name in names)


def method_of(plan: RunPlan, network: str) -> str:
    """Name of the method by which a network's exact penalties are computed."""
    return "forward_mode" if plan.differentiates_forward(network) else "double_backward"


def count_games(plan: RunPlan) -> Counter[UpdateGame]:
    """Count how often each game is played, in as many updates as it takes until lazy penalties repeat."""
    path = plan.objective.path_length
    period = min(math.lcm(*plan.objective.intervals.values(), path.every if path else 1), LONGEST_PERIOD)
    return Counter(game_of(plan, number) for number in range(period))


def _count_penalties(plan: RunPlan, discriminator: int, method: str) -> int:
    """Operations of D's penalties in the mean update, for an image of its batch.

    A forward pass has ``discriminator`` operations. A segment that a penalty adds goes forward and backward: 3 passes.
    A double backward goes to the images, and back through that, in all segments: 1 + 2. In forward mode, D first goes
    forward and back to the images, with R1 alone to real ones: 2; then tangents accompany the values in training: 3.
    All but the last is for the part of the images that penalties use.
    """
    games, passes, shrink = count_games(plan), 0, plan.objective.batch_shrink
    for game, times in games.items():
        trains, differentiated, _ = game.segments
        units = num_images(trains, shrink, shrink)  # a part of a segment each
        exact = 3 * units + 2 * differentiated
        if method == "double_backward":
            exact = 3 * (units if shrink == 1 else differentiated)
        passes += times * (3 * (trains - 2) + exact * (differentiated > 0))
    return plan.recipe.objective.d_steps * passes * discriminator // (games.total() * shrink)


def _count_path_length(plan: RunPlan, method: str) -> int:
    """Operations of G's path length in the mean update, for an image of its batch.

    They count as those of a penalty on D, for the layers after the styles. All samples carry tangents; the rest is only
    for samples that take part.
    """
    section = plan.recipe.objective.path_length
    if section is None:
        return 0
    flop, ahead = count_layers(plan, "generator"), PathLength.ahead
    mapping, synthesis = sum(flop[:ahead]), sum(flop[ahead:])
    if method == "double_backward":
        return 3 * synthesis // (section.batch_shrink * section.every)
    return ((mapping + 2 * synthesis) // section.batch_shrink + 3 * synthesis) // section.every


def count_network(plan: RunPlan, network: str) -> tuple[int, int]:
    """Parameters, and floating-point operations of a forward pass for one image."""
    return count_parameters(plan, network), sum(count_layers(plan, network))


def count_parameters(plan: RunPlan, network: str) -> int:
    """Parameters of a network."""
    return sum(parameter.numel() for parameter in network_on_meta(plan.recipe, network).parameters())


def stage_bounds(plan: RunPlan, network: str, whole: LayerStack) -> list[int]:
    """Bounds of a network's stages; layers that would have to be measured are divided by parameters instead.

    Raises:
        UserError: There are fewer layers than stages.
    """
    if not whole.layers:  # there is no such network
        return [0] * (plan.placement(network).num_stages + 1)
    layers, partition = count(whole), plan.engines[network].section.partition
    check_divisible(plan, network, layers)
    by = "parameters" if partition == "profile" else partition
    return divide_layers(layers, by, plan.placement(network).num_stages)


def num_batches_made(plan: RunPlan) -> int:
    """Return of how many batches G makes images in an update: one for each of D's steps, and maybe one of its own."""
    return plan.recipe.objective.d_steps + (not plan.recipe.objective.reuse_fakes)


def count_frozen(plan: RunPlan, network: str) -> int:
    """Operations of a forward pass for one image through the frozen program with which a network begins, if any."""
    if not isinstance(getattr(plan.recipe, network), FeaturesNetwork):
        return 0
    layers = network_on_meta(plan.recipe, network).layers.values()
    return sum(
        flop
        for flop, layer in zip(count_layers(plan, network), layers, strict=True)
        if any(each is not None for each in frozen_programs(layer))
    )


def _count_backward(plan: RunPlan, network: str) -> int:
    """Operations of a backward pass for one image where a network trains: two forward passes without frozen parts."""
    stack, num_samples = network_on_meta(plan.recipe, network).eval(), plan.engines[network].micro_batch_size
    forward = sum(count_layers(plan, network))
    if not has_frozen(stack):
        return 2 * forward
    outputs = stack(*meta_inputs(plan, network, num_samples))
    with FlopCounterMode(display=False) as counter:
        outputs.sum().backward()
    return counter.get_total_flops() // num_samples


def count_heads(plan: RunPlan) -> int:
    """Operations of what D predicts of a teacher's features of one real image; 0 without a teacher."""
    if plan.recipe.objective.teacher is None:
        return 0
    num_samples = plan.engines["discriminator"].micro_batch_size
    stack = network_on_meta(plan.recipe, "discriminator").eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        stack.with_predictions(*meta_inputs(plan, "discriminator", num_samples), num=num_samples)
    return counter.get_total_flops() // num_samples - sum(count_layers(plan, "discriminator"))


def count_layers(plan: RunPlan, network: str, judged: bool = False) -> list[int]:
    """Operations of a forward pass for one image, layer by layer; without D's heads for a teacher's features.

    Where G's images are ``judged`` they need gradients.
    """
    judged = judged and is_outside(getattr(plan.recipe, network).family)  # others compute the same
    num_samples = plan.engines[network].micro_batch_size  # layers that look across samples can divide this number
    key = network, num_samples, judged, plan.recipe.model_dump_json(exclude={"engines", "batch", "accumulation"})
    if key not in _FLOP_OF_LAYERS:  # a survey asks for dozens of layouts of the same network
        stack = network_on_meta(plan.recipe, network).eval().requires_grad_(False)
        stack.train(network == "generator" and bool(plan.recipe.outputs))  # two translators make more in training
        frozen_tensors(stack)  # opens programs, which tries them
        carry, found = meta_inputs(plan, network, num_samples), []
        carry[0].requires_grad_(judged)
        for number in range(len(stack.layers)):
            with FlopCounterMode(display=False) as counter:
                carry = stack.part(number, number + 1).fold(*carry)
            found.append(counter.get_total_flops() // num_samples)
        _FLOP_OF_LAYERS[key] = found
    return [*_FLOP_OF_LAYERS[key]]
