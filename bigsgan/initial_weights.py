"""Weights that a run begins with: another run's, or imported ones."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.config import NETWORKS, Recipe
from bigsgan.engines import Engine
from bigsgan.errors import UserError
from bigsgan.models.build import build_network

_log = logging.getLogger(__name__)


class InitialWeights(NamedTuple):
    """Where weights to begin with come from.

    Attributes:
        recipe: Of the run that they were trained in.
        checkpoint: Of that run.
        live: Take the generator as it was trained and not its average.
    """

    recipe: Recipe
    checkpoint: checkpoint.Checkpoint
    live: bool


def load_initial_weights(recipe: Recipe, initial: InitialWeights, engines: dict[str, Engine]) -> None:
    """Fill parameters and buffers of both networks, whatever layout wrote the weights. Every rank calls this.

    Where the two runs differ in their number of classes, what belongs to the classes keeps its new values.

    Args:
        recipe: Of the run that begins.
        initial: The weights.
        engines: Of the run that begins, by network.

    Raises:
        UserError: The networks differ in more than their classes.
    """
    other, found, live = initial
    for network in NETWORKS:
        entry = "average" if network == "generator" and not live else network
        if entry not in found.manifest["numbers"]:
            _log.warning("%s holds no %s: it begins anew", found.path, network)
            continue
        with torch.device("meta"):
            theirs, ours = build_network(other, network), build_network(recipe, network)
        shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
        state = checkpoint.read_parameters(found, entry, shapes)
        wanted = {name: tensor.shape for name, tensor in ours.state_dict().items()}
        left = sorted(name for name, shape in wanted.items() if name not in state or state[name].shape != shape)
        _check(network, left, wanted, state, same_classes=other.data.num_classes == recipe.data.num_classes)
        if left:
            _log.warning("%s: %d tensors of other classes begin anew, such as %s", network, len(left), left[0])
        _fill(engines[network], {name: state[name] for name in wanted.keys() - set(left)})


def _check(
    network: str, left: list[str], wanted: dict[str, torch.Size], state: dict[str, Tensor], same_classes: bool
) -> None:
    for name in left:
        # What depends on the number of classes differs in one size alone, or is there with classes only.
        shape, theirs = wanted[name], state[name].shape if name in state else None
        of_classes = theirs is None or (len(theirs) == len(shape) and sum(map(int.__ne__, shape, theirs)) == 1)
        if same_classes or not of_classes:
            was = "is missing there" if theirs is None else f"is {tuple(theirs)} there"
            raise UserError(
                "init_from.run", None, f"has another {network}: {name}, {tuple(shape)} here, {was}",
                f"use the {network} section of its config.yaml",
            )  # fmt: skip


@torch.no_grad()
def _fill(engine: Engine, state: dict[str, Tensor]) -> None:
    for shard in engine.shards():
        for name, offset, numel, start in shard.pieces:
            if name in state:
                shard.master[start : start + numel].copy_(state[name].flatten()[offset : offset + numel])
    engine.publish()
    for name, buffer in engine.network.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def freeze_first_layers(engine: Engine, num_layers: int) -> None:
    """Keep the first layers of a network as they are (Mo, Cho and Shin 2020, arXiv 2002.10964).

    Their gradients become 0, and an optimizer that has seen nothing else does not move them.
    """
    for number, layer in engine.network.layers.items():
        if int(number) < num_layers:
            for parameter in layer.parameters():
                parameter.register_hook(torch.zeros_like)
