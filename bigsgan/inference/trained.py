"""Opens a run directory without engines, as a plain network with the weights of a checkpoint."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.config import Recipe
from bigsgan.config.families.base import MOST_STEPS
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.data.perceptual import check_program
from bigsgan.engines.base import MicroBatch
from bigsgan.errors import UserError
from bigsgan.inference.post_hoc import reconstruct
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack
from bigsgan.models.precision import compute_in_float32
from bigsgan.runtime import launched
from bigsgan.training.sampling import Infer, making, shown


@dataclass
class TrainedNetwork:
    """A run's network with float32 weights and buffers of its checkpoint at ``nimg`` images, in training mode."""

    recipe: Recipe
    nimg: int
    network: LayerStack
    run: Path  # the run directory

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    @torch.no_grad()
    def infer(self, inputs: MicroBatch, moving: bool = False) -> Tensor:
        """Make images as networks see them, or logits, without a graph; only ``moving`` lets state move."""
        with moving_state(self.network.stateful_layers(), moving):
            return making(self.recipe, lambda more, moving: self.network(*more))(inputs, moving)

    @functools.cached_property
    def show(self) -> Infer:
        """The function that makes images to show from a generator's inputs: (n, C, H, W) in [-1, 1]."""
        return shown(self.recipe, self.infer)


def set_steps(trained: TrainedNetwork, steps: int | None, guidance: float | None = None) -> None:
    """Let a generator make images in so many steps, and one by flow matching with a guidance; None leaves its recipe's.

    Raises:
        UserError: The generator has learnt to make images in one step, or the number of steps is out of range.
    """
    recipe = trained.recipe
    if steps is not None and not recipe.reads_noise:
        problem = "needs a generator by flow matching, or with generator.steps"
        raise UserError("--steps", steps, problem, "remove the option")
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise UserError("--steps", steps, f"must be 1 to {MOST_STEPS}", "give a number in this range")
    given = {"steps": steps, "guidance": guidance if recipe.objective.flow else None}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if steps == 1 and not recipe.objective.flow:  # neither has an effect on one step
        changes |= {"sampler": "ode", "time_shift": 1.0}
    if changes:
        trained.recipe = recipe.model_copy(update={"generator": recipe.generator.model_copy(update=changes)})


def best_device() -> torch.device:
    """A GPU if there is one, under a launcher this rank's; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launched.number("LOCAL_RANK", default=0, least=0) % torch.cuda.device_count())


def open_trained(
    run: Path,
    network: str,
    live: bool,
    nimg: int | None,
    device: torch.device,
    width: float | None = None,
    ranks: checkpoint.ObjectCollectives | None = None,
) -> TrainedNetwork:
    """Assemble one network of a run; on a CPU it computes in float32, whatever precision it was trained in.

    ``live`` loads the live weights instead of the generator's EMA, and ``width`` the EMA of that width from the run's
    snapshots. Without ``nimg``, this takes the newest checkpoint or snapshot, the same on all ``ranks``, which share
    the work of verifying it: a collective.

    Raises:
        UserError: There is no such run, checkpoint or snapshot, or a file is damaged.
    """
    recipe = read_saved_recipe(run)
    if width is not None:
        if live:
            raise UserError("--ema-width", None, "cannot be combined with --live", "give only one of them")
        if network != "generator":
            raise UserError("--ema-width", None, "needs the generator", "remove the option")
        nimg, stack = reconstruct(run, recipe, width, nimg, ranks)
    else:
        entry = "average" if network == "generator" and not live else network
        found = checkpoint.find_intact(run, nimg, lambda found: checkpoint.files_with(found, entry), ranks)
        check_program(getattr(recipe, network), found.layout.get(network))
        nimg, stack = found.nimg, build_network(recipe, network)
        checkpoint.Reader(found).entry(entry).read_network(stack)
    if device.type == "cpu":  # half precision is many times slower there
        compute_in_float32(stack)
    return TrainedNetwork(recipe, nimg, stack.to(device), run)
