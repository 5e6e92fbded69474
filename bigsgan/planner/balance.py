"""Divides the ranks between networks that have ranks of their own: `engines.generator.ranks: auto`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bigsgan.config import NETWORKS, Recipe, RunPlan, plan_run
from bigsgan.config.run_plan import chooses_ranks, with_ranks
from bigsgan.data.found import with_found
from bigsgan.errors import UserError
from bigsgan.planner.sides import Timing, UpdateWork, count_update, time_update

_WORTH = 0.05
"""Least share of the time that another batch must save to be named."""

_NEAR = 0.1
"""Largest relative difference of that batch from the recipe's."""

_MOST = 64
"""Largest number of divisions tried for other batches."""


class RankDivision(NamedTuple):
    """Ranks of G and of D."""

    numbers: dict[str, int]  # numbers of ranks, by network
    timing: Timing  # time of the mean update

    @property
    def text(self) -> str:
        """The numbers as tables show them."""
        return " + ".join(str(number) for number in self.numbers.values())


def one_of_each(recipe: Recipe, directory: Path | None) -> RunPlan:
    """The plan with one replica of each network, each on GPUs of its own."""
    stages = {network: recipe.engine(network).pipeline_stages for network in NETWORKS}
    return plan_run(with_ranks(recipe, stages), sum(stages.values()), directory, on_gpus=True)


def _splits(recipe: Recipe, world_size: int, of_generator: Iterable[int]) -> Iterator[tuple[dict[str, int], int]]:
    """Yield divisions for G's numbers of ranks, which its stages divide, and what a batch divides by with each."""
    stages = [recipe.engine(network).pipeline_stages for network in NETWORKS]
    for generator in of_generator:
        numbers = dict(zip(NETWORKS, (generator, world_size - generator), strict=True))
        if numbers["discriminator"] % stages[1] == 0:
            replicas = [number // own for number, own in zip(numbers.values(), stages, strict=True)]
            yield numbers, math.lcm(*(recipe.accumulation_of(n) * number for n in NETWORKS for number in replicas))


def divisors(number: int) -> list[int]:
    """Return what divides a number, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]


def possible(recipe: Recipe, world_size: int, directory: Path | None) -> Iterator[dict[str, int]]:
    """Yield numbers of ranks that divide by the stages, divide the batch, and that the networks do not refuse."""
    stages = recipe.engine("generator").pipeline_stages
    of_generator = (stages * replicas for replicas in divisors(recipe.batch) if stages * replicas < world_size)
    for numbers, multiple in _splits(recipe, world_size, of_generator):
        if recipe.batch % multiple == 0:
            try:
                plan_run(with_ranks(recipe, numbers), world_size, directory)
            except UserError:
                continue
            yield numbers


def divide(recipe: Recipe, world_size: int, directory: Path | None, work: UpdateWork | None = None) -> RankDivision:
    """The division with the shortest updates, by counted operations; among equals, the one with fewer ranks for G.

    Raises:
        UserError: There is no division.
    """
    work = work or count_update(one_of_each(recipe, directory))
    found = [time_division(work, numbers) for numbers in possible(recipe, world_size, directory)]
    if not found:
        problem, remedy = f"finds no division of {world_size} ranks", "start more ranks"
        detail = f"batch={recipe.batch} divides by the micro-batches and replicas of both networks in none"
        if others := other_batches(recipe, work, world_size):
            least = min(others, key=lambda other: (abs(other.batch - recipe.batch), other.division.timing.seconds))
            remedy = f"set batch={least.batch}, which {least.division.text} ranks divide"
        asked = next(network for network in NETWORKS if recipe.engine(network).ranks == "auto")
        raise UserError(f"engines.{asked}.ranks", "auto", problem, remedy, detail)
    return min(found, key=lambda division: (division.timing.seconds, division.numbers["generator"]))


def time_division(work: UpdateWork, numbers: Mapping[str, int]) -> RankDivision:
    """Time an update on so many ranks."""
    replicas = {network: number // len(work.stages[network]) for network, number in numbers.items()}
    return RankDivision(dict(numbers), time_update(work, replicas))


class OtherBatch(NamedTuple):
    """Another batch, and a division of ranks that it allows."""

    batch: int  # the batch nearest to the recipe's that allows the division
    division: RankDivision


def other_batches(recipe: Recipe, work: UpdateWork, world_size: int) -> list[OtherBatch]:
    """For divisions of all sizes, the batch nearest to the recipe's that divides by their numbers.

    Times are for the recipe's batch.
    """
    stages = recipe.engine("generator").pipeline_stages
    found, step = [], stages * max(1, -(-world_size // (_MOST * stages)))
    for numbers, multiple in _splits(recipe, world_size, range(step, world_size, step)):
        batch = max(1, round(recipe.batch / multiple)) * multiple
        found.append(OtherBatch(batch, time_division(work, numbers)))
    return found


def is_near(other: OtherBatch, recipe: Recipe) -> bool:
    """Whether a batch is near enough to the recipe's to replace it."""
    return abs(other.batch - recipe.batch) <= _NEAR * recipe.batch


def plan_balanced(recipe: Recipe, world_size: int, directory: Path | None = None) -> tuple[RunPlan, str]:
    """Plan a run whose recipe may leave its networks' numbers of ranks to us, and others to its data.

    All ranks find the same numbers. Ranks are taken for GPUs. The text tells what was found, if anything was.

    Raises:
        UserError: There is no division, or the recipe cannot run with it.
    """
    recipe, _, told = with_found(recipe)
    if not chooses_ranks(recipe) or world_size == 1:
        return plan_run(recipe, world_size, directory, on_gpus=True), told
    work = count_update(one_of_each(recipe, directory))
    division = divide(recipe, world_size, directory, work)
    plan = plan_run(with_ranks(recipe, division.numbers), world_size, directory, on_gpus=True)
    shares = [f"{division.timing.busy[network] / division.timing.seconds:.0%}" for network in NETWORKS]
    text = f"engines.*.ranks: auto takes {division.text} ranks for G and D, which compute {' and '.join(shares)} of "
    text += "an update, by counted operations"
    near = [each for each in other_batches(recipe, work, world_size) if is_near(each, recipe)]
    best = min(near, key=lambda other: other.division.timing.seconds, default=None)
    if best is not None and best.division.timing.seconds < (1 - _WORTH) * division.timing.seconds:
        saved = 1 - best.division.timing.seconds / division.timing.seconds
        text += f"; {best.division.text}, with batch={best.batch}, would take {saved:.0%} less an image"
    return plan, "\n".join(filter(None, (told, text)))
