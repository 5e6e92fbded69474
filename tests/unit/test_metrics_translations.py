"""Metrics of generators that make images from images: which images they make, and what these are compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigsgan import plugins
from bigsgan.data import build_dataset
from bigsgan.metrics.reals import each_real
from bigsgan.training.measuring import samples_of
from tests.image_games import AUTOENCODER, NAMES
from tests.tiny import tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    monkeypatch.setattr(plugins, "_given", {f"tests.image_games:{name}" for name in NAMES})


def test_the_first_images_are_made_from_the_first_real_ones(tmp_path):
    """So that metrics of fewer images than the data has compare images of the same kinds."""
    recipe = tiny_recipe(tmp_path, *AUTOENCODER)
    dataset = build_dataset(recipe.data)
    source = samples_of(recipe, nn.Identity(), lambda inputs, _: inputs[0], dataset, CPU, 0)
    ((reals, *_),) = each_real(dataset, recipe.data, 7, 7, lambda _: None, lambda: False)
    assert torch.equal(source(0, torch.zeros(7)), reals / 127.5 - 1)
    assert not torch.equal(reals[0], dataset[0][0])
