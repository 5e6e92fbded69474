"""A run directory without training: tiny networks and a checkpoint of them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from bigsgan.config import Recipe
from bigsgan.config.run_directory import write_recipe
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from tests.single_process import save, whole
from tests.tiny import awake, tiny_recipe


def make_run(
    directory: Path, *overrides: str, nimg: int = 64, deviation: float = 0.05
) -> tuple[Path, dict[str, LayerStack]]:
    """A run of the tiny recipe, and its networks by entry."""
    recipe = tiny_recipe(directory, *overrides)
    if (overrides, deviation) not in _MADE:
        _MADE[overrides, deviation] = _made(recipe, deviation)
    networks = copy.deepcopy(_MADE[overrides, deviation])
    run = directory / "run"
    write_recipe(recipe, run, {})
    assert save(run / "checkpoints", nimg, {name: whole(network) for name, network in networks.items()})
    return run, networks


_MADE: dict[tuple[tuple[str, ...], float], dict[str, LayerStack]] = {}
"""Networks of these overrides, as many tests ask for the same."""


def _made(recipe: Recipe, deviation: float) -> dict[str, LayerStack]:
    """Nothing in the EMA is at a special value such as 0 or 1, as ``deviation`` moves all of it."""
    networks = {}
    with awake():
        for seed, name in enumerate((*recipe.networks, "average")):
            networks[name] = build_network(recipe, "generator" if name == "average" else name)
            initialize(networks[name], seed)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in networks["average"].state_dict().items():
            if not name.endswith("resample_filter"):
                tensor.add_(deviation * torch.randn(tensor.shape, generator=generator))
    return networks
