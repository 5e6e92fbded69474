"""Tests of bad runs: a run directory with one checkpoint, and the check that all of them share."""

from __future__ import annotations

from pathlib import Path

from bigsgan import cli
from bigsgan.config.run_directory import write_recipe
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from tests.single_process import save, whole
from tests.tiny import tiny_recipe

LAYOUT = {
    "world_size": 1,
    "generator.stage": 0,
    "generator.precision": "fp32",
    "discriminator.stage": 0,
    "discriminator.precision": "fp32",
}


def make_run(directory: Path) -> Path:
    """A run directory with one checkpoint at 64 images."""
    recipe = tiny_recipe(directory)
    networks = {network: build_network(recipe, network) for network in ("generator", "discriminator")}
    for network in networks.values():
        initialize(network, seed=0)
    entries = {name: whole(network) for name, network in networks.items()}
    entries["average"] = whole(networks["generator"])
    run = directory / "run"
    write_recipe(recipe, run, {})
    assert save(run / "checkpoints", 64, entries, recipe=recipe.model_dump(), layout=LAYOUT)
    return run


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the logs and the lock."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.parent.name != "logs" and p.name != ".lock"]
    return {str(path): path.read_bytes() for path in files}


def check(capsys, arguments: list[str], field: str, *parts: str) -> None:
    """The command ends with status 2 and one line of these parts, and changes no file but logs and lock."""
    before = contents(Path())
    assert cli.main(arguments) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    (line,) = [line for line in message.splitlines() if not line.startswith("WARNING: skipping ")]
    assert line.startswith(f"bigsgan: {field}"), line
    for part in parts:
        assert part in line, line
    assert "; " in line
    assert contents(Path()) == before


def train_arguments(*overrides: str) -> list[str]:
    path = Path("tiny.yaml")
    tiny_recipe(Path())  # writes it
    return ["train", "--config", str(path), *overrides]
