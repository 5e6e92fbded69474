"""Fixtures: of tests that compute; of tests of bad input."""

import copy
import importlib
import logging
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigsgan import errors
from bigsgan.config import yaml_file
from bigsgan.data import task
from bigsgan.runtime import comm
from bigsgan.training import sampling
from tests.bad_input import RECIPE, WentOnError
from tests.bad_runs import make_run
from tests.preparing import write_source


@pytest.fixture(scope="session", autouse=True)
def without_launcher() -> Iterator[None]:
    """Nobody has to forward what is printed last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "FORWARDING_SECONDS", 0.001)
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """The same few recipes are read thousands of times."""
    parse = lru_cache(4096)(yaml_file._parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_file, "_parse", lambda text: copy.deepcopy(parse(text)))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same numbers whatever ran before."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed also queues a call for a GPU that is not there


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bigsgan data prepare` writes at a time has four images, so that a few make several parts."""
    monkeypatch.setattr(task, "_PART_SIZE", 4)


@pytest.fixture(autouse=True)
def few_standing_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standing statistics come from 3 batches, however small, and not from 1,600 images."""
    monkeypatch.setattr(sampling, "STANDING_IMAGES", 1)
    monkeypatch.setattr(sampling, "STANDING_BATCHES", 3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images of all kinds, to be prepared."""
    return write_source(tmp_path / "source")


@pytest.fixture
def beside_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory that holds a recipe alone, without a launcher and without a way past the checks.

    A dry run prints its recipe without a look at data and checkpoints.
    """

    def refuse(*arguments: object) -> None:
        raise WentOnError("bigsgan.trainer was imported")

    def go_on(name: str, import_module: Any = importlib.import_module) -> Any:
        if name == "bigsgan.commands.choosing":
            return import_module(name)
        if name == "bigsgan.trainer":
            return SimpleNamespace(check=lambda *arguments: None, main=refuse)
        raise WentOnError(f"{name} was imported")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib, "import_module", go_on)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one checkpoint at 64 images."""
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(made_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, to be damaged. Training stops short of DeepSpeed, in this process without a process group."""
    monkeypatch.setattr(comm, "initialize", lambda *patience: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield Path(shutil.copytree(made_run, tmp_path / "run"))
    logger = logging.getLogger("bigsgan")
    logger.handlers.clear()  # a process that ends leaves its log open
    logger.propagate = True
