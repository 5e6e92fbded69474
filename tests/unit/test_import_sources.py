"""The names that `bigsgan import --from` takes, their readers, and the recipes of the families that these tell."""

from __future__ import annotations

import argparse
import inspect
import re

import yaml

from bigsgan import importing, shipped
from bigsgan.commands.choosing import _parser
from bigsgan.commands.import_ import BIGSGAN, UNIVERSAL
from bigsgan.config.families import FAMILIES
from bigsgan.weights import diffusers_autoencoder
from bigsgan.weights.sources import DIFFUSERS, SOURCES
from tests import REPOSITORY


def test_the_option_the_readers_and_the_guide_have_the_same_names():
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    (source,) = (action for action in commands.choices["import"]._actions if action.dest == "source")
    assert source.choices == [*SOURCES, DIFFUSERS, BIGSGAN, UNIVERSAL]
    guide = (REPOSITORY / "docs" / "how-to" / "import-export.md").read_text()
    table = guide.partition("| `--from` | reads |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(source.choices)


def test_every_family_that_a_reader_tells_has_recipes_of_its_own():
    sources = [inspect.getsource(module) for module in (*SOURCES.values(), diffusers_autoencoder)]
    told = {family for source in sources for family in re.findall(r'"family": "(\w+)"', source)}
    assert importing._RECIPES.keys() == told
    assert told <= FAMILIES.keys()
    for family, names in importing._RECIPES.items():
        for name in names:
            assert yaml.safe_load(shipped.recipe(name).read_text())["generator"]["family"] == family, name
