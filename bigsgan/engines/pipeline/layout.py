"""The division of a network into stages: their costs, and the bubble of an update."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.config.families.outside import is_outside
from bigsgan.engines.base import DTYPES, MicroBatch
from bigsgan.engines.phases import Phase, game_of, phases_of
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.partition import Boundaries, divide
from bigsgan.engines.pipeline.profile import LayerCost, count, measure, weights
from bigsgan.engines.pipeline.schedule import EQUAL, Cost
from bigsgan.errors import UserError
from bigsgan.models.build import example_labels, initial_seed, network_on_meta
from bigsgan.models.network import LayerStack
from bigsgan.models.precision import avoid_fp16_on_a_cpu


@dataclass
class StageDivision:
    """A network in stages."""

    network: str  # `generator` or `discriminator`
    bounds: list[int]  # stage s has the layers `bounds[s]` up to `bounds[s + 1]`
    layers: list[LayerCost]  # the known cost of each layer
    boundaries: Boundaries  # the carry between the stages

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def of_stage(self, stage: int) -> LayerCost:
        """Return the cost of a stage, the sum over its layers."""
        _, *columns = zip(*self.layers[self.bounds[stage] : self.bounds[stage + 1]], strict=True)
        return LayerCost(f"stage {stage}", *map(sum, columns))

    def costs(self) -> list[Cost]:
        """Return the cost of each stage, in seconds a sample if measured."""
        stages = [self.of_stage(stage) for stage in range(self.num_stages)]
        if not any(layer.forward for layer in self.layers):
            return [EQUAL] * self.num_stages
        return [Cost(stage.forward, stage.backward) for stage in stages]

    def table(self, num_samples: int) -> str:
        """Describe the stages for micro-batches of ``num_samples``."""
        lines = [f"{self.network} in {self.num_stages} stages, micro-batches of {num_samples}:"]
        for stage in range(self.num_stages):
            own = self.of_stage(stage)
            text = f"  stage {stage}  layers {self.bounds[stage]}-{self.bounds[stage + 1] - 1}"
            text += f"  {own.numel:,} parameters" + f", {own.frozen:,} frozen" * bool(own.frozen)
            if own.forward:
                text += f"  forward {num_samples * 1e3 * own.forward:.2f} ms"
                text += f"  backward {num_samples * 1e3 * own.backward:.2f} ms"
                text += f"  activations {num_samples * own.saved_bytes / 2**20:.1f} MiB"
            leaves = self.boundaries.at(stage + 1, num_samples)
            sent = sum(spec.num_bytes for spec in (leaves if stage < self.num_stages - 1 else leaves[:1]))
            lines.append(text + f"  sends {sent / 2**20:.2f} MiB")
        return "\n".join(lines)


def divide_network(
    plan: RunPlan, network: str, measured: list[LayerCost] | None, bounds: list[int] | None = None
) -> StageDivision:
    """Divide a network as the recipe says, with the costs from ``measure_layers`` if it asks for them.

    ``bounds`` are those of a checkpoint's division, which is kept; None to divide anew.

    Raises:
        UserError: There are fewer layers than stages.
    """
    stages, partition = plan.placement(network).num_stages, plan.engines[network].section.partition
    whole = _build_divisible(plan, network)
    layers = measured or count(whole)
    bounds = bounds or divide_layers(layers, partition, stages)
    return StageDivision(network, bounds, layers, Boundaries(whole, bounds, partial(meta_inputs, plan, network)))


def divide_layers(layers: Sequence[LayerCost], partition: str, num_stages: int) -> list[int]:
    """Return bounds of stages, see ``divide``. Each stage has a layer with parameters, maybe frozen ones alone."""
    # A layer without parameters, such as augmentation, goes with the one after it.
    first = [0, *(i for i in range(1, len(layers)) if layers[i - 1].numel + layers[i - 1].frozen)]
    costs = weights(layers, partition)
    joined = [sum(costs[start:stop]) for start, stop in itertools.pairwise([*first, len(layers)])]
    return [*(first[bound] for bound in divide(joined, num_stages)[:-1]), len(layers)]


def measure_layers(plan: RunPlan, network: str, device: torch.device) -> list[LayerCost] | None:
    """Measure each layer on this rank's device, which takes seconds; None unless the recipe asks for it.

    Raises:
        UserError: There are fewer layers than stages.
    """
    if plan.engines[network].section.partition != "profile":
        return None
    whole = _build_divisible(plan, network)
    boundaries = Boundaries(whole, range(len(whole.layers) + 1), partial(meta_inputs, plan, network))
    return measure(whole, boundaries, samples_of(plan, network), device, initial_seed(plan.recipe, network))


def build_on_meta(plan: RunPlan, network: str) -> LayerStack:
    """Build all layers of a network on the meta device, in the types that its engine gives them."""
    whole = network_on_meta(plan.recipe, network)
    avoid_fp16_on_a_cpu(whole, plan.on_gpus)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(DTYPES[plan.engines[network].file.precision])
    return whole


def _build_divisible(plan: RunPlan, network: str) -> LayerStack:
    """Build all layers on the meta device, and check that there are enough."""
    whole = build_on_meta(plan, network)
    check_divisible(plan, network, count(whole))
    return whole


def check_divisible(plan: RunPlan, network: str, layers: Sequence[LayerCost]) -> None:
    """Refuse more stages than layers with parameters.

    Raises:
        UserError: There are more stages.
    """
    stages, num_layers = plan.placement(network).num_stages, sum(layer.numel + layer.frozen > 0 for layer in layers)
    if stages > num_layers:
        field = f"engines.{network}.pipeline_stages"
        problem = f"must be at most {num_layers}, the number of layers of the {network}"
        if num_layers == 1 and is_outside(family := getattr(plan.recipe, network).family):
            remedy = f"let {family} return a list of functions that make layers, or set {field}=1"
            raise UserError(field, stages, problem, remedy)
        raise UserError(field, stages, problem, f"set {field}={num_layers} or less")


def samples_of(plan: RunPlan, network: str) -> int:
    """Return the samples of a micro-batch that a network trains on; D sees real and fake images."""
    return plan.engines[network].micro_batch_size * (1 if network == "generator" else 2)


def describe_bubble(plan: RunPlan, divisions: Mapping[str, StageDivision]) -> str | None:
    """Describe the expected bubble; None where ``expected_bubble`` is."""
    bubble = expected_bubble(plan, divisions)
    if bubble is None:
        return None
    measured = all(plan.engines[network].section.partition == "profile" for network in divisions)
    reserve = "" if measured else ", were all stages equally fast (partition=profile measures them)"
    return f"expected bubble of an update: {100 * bubble:.1f} %{reserve}"


def expected_bubble(plan: RunPlan, divisions: Mapping[str, StageDivision]) -> float | None:
    """Return the share of an update in which stages wait; None unless both networks are pipelines that meet.

    Only penalties that every update has are counted.
    """
    if len(divisions) < len(NETWORKS) or plan.images_travel:
        return None
    costs = comparable(divisions)
    make = schedule.plan if plan.recipe.pipeline.schedule == "joint" else schedule.one_after_the_other
    num_stages = plan.placement("generator").num_stages
    return make(usual_phases(plan), num_stages, costs).bubble


def usual_phases(plan: RunPlan) -> list[Phase]:
    """Return the phases of an update with the penalties that every update has."""
    return phases_of(plan, game_of(plan, 1))


def comparable(divisions: Mapping[str, StageDivision]) -> dict[str, Sequence[Cost]]:
    """Return the cost of each stage, in one unit: the mean forward pass of a stage, unless all or none are measured."""
    costs: dict[str, Sequence[Cost]] = {network: division.costs() for network, division in divisions.items()}
    measured = [list(stages) != [EQUAL] * len(stages) for stages in costs.values()]
    if all(measured) or not any(measured):
        return costs
    scaled: dict[str, Sequence[Cost]] = {}
    for network, stages in costs.items():
        unit = sum(cost.forward for cost in stages) / len(stages)
        scaled[network] = [Cost(cost.forward / unit, cost.backward / unit) for cost in stages]
    return scaled


def meta_inputs(plan: RunPlan, network: str, num_samples: int) -> MicroBatch:
    """Make inputs for a number of samples, without data, on the meta device."""
    recipe, data = plan.recipe, plan.recipe.data

    def images(channels: int) -> torch.Tensor:
        return torch.empty(num_samples, channels, *data.network_size, device="meta")

    numbers = torch.empty(num_samples, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        labels = example_labels(data, num_samples)
    if network == "discriminator":
        inputs = (images(recipe.input_channels),) if data.paired else ()
        if recipe.discriminator_reads_latents:
            inputs = (torch.empty(num_samples, recipe.latent_size, device="meta"),)
        seeds = (numbers,) if recipe.discriminator_reads_seeds else ()
        return images(recipe.judged_channels), labels, *inputs, *seeds
    latents = torch.empty(num_samples, recipe.latent_size, device="meta")
    first = images(recipe.input_channels) if recipe.translates else latents
    times = (torch.empty(num_samples, device="meta"),) if recipe.generator.reads_times else ()
    return first, labels, *times, *((numbers,) if recipe.generator.draws else ())
