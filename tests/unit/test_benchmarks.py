"""The recipes of comparisons with public code, which run by hand, are read as recipes are now."""

import importlib

import pytest

from bigsgan import Recipe


@pytest.mark.parametrize("name", ["public_afm", "public_biggan", "public_dmd2", "public_llamagen", "public_taming"])
def test_a_recipe_is_read(tmp_path, name):
    recipe = Recipe.read(importlib.import_module(f"tests.benchmarks.{name}").recipe(tmp_path))
    assert recipe.out == str(tmp_path / "run")
