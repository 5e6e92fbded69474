"""Games whose networks read the feature maps of a frozen program."""

from __future__ import annotations

from pathlib import Path

from tests.perceptual import write_program
from tests.tiny import TINY_GAMES

_DATA, _GENERATOR, _DISCRIMINATOR, *_MORE = TINY_GAMES["autoencoder"]
MAPS = "[[4,8,8],[6,4,4]]"
"""Of ``TinyFeatures``, of images of 16x16."""


def judged(directory: Path, suffix: str = ".pt", **more: object) -> list[str]:
    """Overrides by which an autoencoder's D judges the maps of a program in a directory."""
    path = directory / f"d{suffix}"
    keys = {"path": path if path.exists() else write_program(path), "maps": MAPS, "kernel": 3, **more}
    text = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return [_DATA, _GENERATOR, f"discriminator={{family: features, {text}}}", *_MORE]


def decoded(directory: Path, suffix: str = ".pt", **more: object) -> list[str]:
    """Overrides by which G decodes the only map of a program in a directory."""
    path = directory / f"g{suffix}"
    path = path if path.exists() else write_program(path, num_maps=1)
    keys = {"path": path, "maps": "[[4,8,8]]", "depth": 2, "width": 16, "heads": 2, "hidden": 24, **more}
    text = ", ".join(f"{key}: {value}" for key, value in keys.items())
    objective = "objective={l1: 3, reuse_fakes: true, schedule: generator_first}"
    adaptive = "objective.adversarial={adaptive: {parameter: to_patches.weight}}"
    return [_DATA, f"generator={{family: features, {text}}}", _DISCRIMINATOR, objective, adaptive, _MORE[-1]]
