"""The Python interface before anything is built, and what callbacks are told; tests/test_guides.py trains with it."""

from __future__ import annotations

import inspect
import re
import sys
import types

import numpy as np
import pytest
import yaml
from torch.distributed import HashStore

import bigsgan
from bigsgan.config import RunPlan
from bigsgan.errors import UserError
from bigsgan.runtime import board
from bigsgan.training.callbacks import build_callbacks
from bigsgan.training.looking import evaluated, sampled
from bigsgan.training.loop import Run
from bigsgan.training.reports import Reports
from bigsgan.training.script import Script
from tests.tiny import TINY, tiny_recipe


class Told:
    def __init__(self):
        self.found = []

    def on_report(self, nimg, metrics):
        self.found.append((nimg, metrics))

    def on_save(self, nimg, path):
        raise KeyError(path)


def test_callbacks_of_the_recipe_come_before_those_given_in_python(monkeypatch, tmp_path):
    module, found = types.ModuleType("their"), []

    class Hooks(Told):
        def __init__(self, name):
            super().__init__()
            self.found = found
            found.append(name)

        def on_end(self, nimg, complete):
            found.append((nimg, complete))

    module.Hooks = Hooks
    monkeypatch.setitem(sys.modules, "their", module)
    recipe = tiny_recipe(tmp_path, "callbacks=[{use: 'their:Hooks', arguments: {name: first}}]")
    given = Told()
    given.found = found
    callbacks = build_callbacks(recipe, [given])
    callbacks.require("on_report", 16, {"loss": 1.0})
    callbacks.require("on_end", 32, True)
    callbacks.require("on_start", recipe, 0)  # none has it
    assert found == ["first", (16, {"loss": 1.0}), (16, {"loss": 1.0}), (32, True)]
    assert callbacks.has("on_save")
    assert not callbacks.has("on_start")


def test_a_callback_that_fails_is_named(tmp_path):
    callbacks = build_callbacks(tiny_recipe(tmp_path), [Told()])
    error = callbacks.tell("on_save", 16, "there")
    name, place = f"{__name__}:Told", inspect.getsourcelines(Told.on_save)[1] + 1
    text = f"callbacks: {name!r} fails in on_save: KeyError: 'there' (test_trainer.py:{place}); fix its code"
    assert str(error).startswith(text)
    with pytest.raises(UserError, match="fails in on_save"):
        callbacks.require("on_save", 16, "there")


def test_an_object_without_hooks_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^callbacks: 'builtins:object' has none of the methods on_start, on_report,"):
        build_callbacks(tiny_recipe(tmp_path), [object()])


@pytest.mark.parametrize(
    "changes, allowed, text",
    [
        (["batch=7", "accumulation=2"], (), "^batch: must be a multiple of 2, got 7"),
        ([], ("bach",), "^--allow-change: must be a key of the recipe, got 'bach'"),
        (["engines.generator.ds_config=none"], (), "^engines.generator.ds_config: 'none' does not exist"),
    ],
)
def test_a_recipe_is_checked_before_anything_is_written(tmp_path, changes, allowed, text):
    with pytest.raises(bigsgan.UserError, match=text):
        bigsgan.Trainer(tiny_recipe(tmp_path, *changes), allow_change=allowed)
    assert not (tmp_path / "run").exists()


def test_a_launcher_is_checked_too(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:  # as a command ends, on several ranks
        bigsgan.train(tiny_recipe(tmp_path))
    assert ended.value.code == 2


def test_recipes_of_dictionaries_are_checked_as_those_of_files():
    tree = yaml.safe_load(TINY)
    assert bigsgan.Recipe.of(tree) == bigsgan.Recipe(**tree)
    with pytest.raises(UserError, match=r"^data.resolution: must be greater than 0"):
        bigsgan.Recipe.of({**tree, "data": {"resolution": 0}})
    with pytest.raises(UserError, match=r"^objective.l1: must be 0 with data.kind=digits"):
        bigsgan.Recipe(**{**tree, "objective": {"l1": 1.0}})


def test_a_mistake_of_one_rank_between_updates_ends_the_others(tmp_path, monkeypatch, capsys):
    """Such as an argument of ``sample``: they may train on, on other hosts, and would take it for killed."""
    store = HashStore()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(board, "of_job", lambda *_: store)
    script = Script()

    def fail():
        raise UserError("classes", 7, "must be 0 to 2", "give numbers of the data's classes")

    with pytest.raises(SystemExit):
        script.on_every_rank(fail)
    assert store.get(board.OVER).decode().startswith("2 rank 1: classes: must be 0 to 2, got 7")


def test_what_was_complete_is_not_trained_again_for_its_samples(tmp_path, capsys):
    trainer, told = bigsgan.Trainer(tiny_recipe(tmp_path)), Told()
    trainer._opened = types.SimpleNamespace(start=None)
    counters = types.SimpleNamespace(nimg=trainer.recipe.total_nimg)
    trainer._run = types.SimpleNamespace(counters=counters, callbacks=told, reports=Reports(None))
    assert list(trainer) == []
    assert trainer.train().nimg == counters.nimg
    assert capsys.readouterr().out.count("is complete at") == 1


def test_names_of_metrics_are_needed():
    run = object.__new__(Run)
    vars(run).update(recipe=types.SimpleNamespace(metrics=None))
    with pytest.raises(UserError, match=r"^metrics.names: must have at least one name; name a metric such as fid10k"):
        evaluated(run, object.__new__(RunPlan), [])


WRONG = {
    "recipe: must be of type Recipe | RunPlan, got 'digits'": lambda run, plan: bigsgan.Trainer("digits"),
    "name: must be of type str | os.PathLike[str], got 5 (it is int)": lambda run, plan: bigsgan.Recipe.read(5),
    "overrides: must be of type str, got 6": lambda run, plan: bigsgan.Recipe.read("digits", "batch=8", 6),
    "tree: must be of type Mapping[str, Any], got ['batch=8']": lambda run, plan: bigsgan.Recipe.of(["batch=8"]),
    "tree: must be of type Mapping[str, Any], got {5: 1}": lambda run, plan: bigsgan.Recipe.of({5: 1}),
    "num: must be of type int, got true": lambda run, plan: sampled(run, True, 0, None, False),
    "seed: must be of type int (it is NoneType)": lambda run, plan: sampled(run, np.int64(2), None, None, False),
    "classes: must be of type Sequence[int] | None, got [1.5]": lambda run, plan: sampled(run, 2, 0, [1.5], False),
    "live: must be of type bool, got 'x'": lambda run, plan: sampled(run, 2, 0, (1, 2), "x"),
    "features: must be of type FeatureNetwork | None, got 'x'": lambda run, plan: evaluated(run, plan, "fid1k", "x"),
    "families: must be of type Collection[str], got 5": lambda run, plan: bigsgan.load("x", families=5),
}


@pytest.mark.parametrize("text", WRONG)
def test_arguments_of_another_type_are_refused(text):
    with pytest.raises(UserError, match=f"^{re.escape(text)}"):
        WRONG[text](object.__new__(Run), object.__new__(RunPlan))
