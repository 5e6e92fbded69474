"""Code from outside by its name: what is imported, with which arguments, and what is told of mistakes."""

from __future__ import annotations

import sys

import pytest
import yaml

import bigsgan
from bigsgan import cli, plugins
from bigsgan.config import Recipe, load_recipe, signature
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.errors import UserError
from tests.tiny import TINY, tiny_recipe

MODULE = """
NUMBER = 3
class Faces:
    def __init__(self, size, *, width=2, resolution=0): self.given = size, width, resolution
    class Inner: pass
def positional(size, /): pass
def anything(**given): return given
def fails(): return 1 / 0
def made():
    def inner(): return fails()
    return lambda: _helped(inner)
def _helped(work): return work()
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Work in a directory with a module, of which nothing stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(plugins, "_given", set())
    monkeypatch.setattr(plugins, "_loaded", {})
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "parts" / "own.py").write_text(MODULE)
    (tmp_path / "parts" / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "parts" / "ends.py").write_text("raise SystemExit(3)")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]


def load(name, field="data.kind"):
    plugins.give([name])
    return plugins.load(field, name)


def test_a_name_leads_to_a_class_or_function(outside):
    assert load("parts.own:Faces").__name__ == "Faces"
    assert load("parts.own:Faces.Inner").__name__ == "Inner"
    assert "parts.broken" not in sys.modules


@pytest.mark.parametrize(
    "name, text",
    [
        ("parts.own", "must have the form package.module:attribute, got 'parts.own'"),
        ("missing.own:Faces", r"cannot be imported \(ModuleNotFoundError: No module named 'missing'.*; install its"),
        ("parts.other:Faces", r"cannot be imported \(ModuleNotFoundError: No module named 'parts.other'.*; install"),
        ("parts.broken:a", r"cannot be imported \(ModuleNotFoundError: .*nothing_of_this_name.*broken.py:1\)\); fix"),
        ("parts.ends:a", r"cannot be imported \(SystemExit: 3 \(ends.py:1\)\); fix parts.ends"),
        ("parts.own:Face", "is not in parts.own, which has no Face; did you mean Faces?"),
        ("parts.own:NUMBER", r"cannot be called \(it is of type int\); give the name of a class or function"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_its_key(outside, name, text):
    with pytest.raises(UserError, match=f"^data.kind: .*({text})"):
        load(name)


def build(name, arguments):
    plugins.give([name])
    return signature.build("data.kind", name, "data", arguments, {"resolution": 16, "other": 1})


def test_the_signature_is_the_section(outside):
    assert build("parts.own:Faces", {"size": 5}).given == (5, 2, 16)
    assert build("parts.own:anything", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("Faces", {}, r"data.arguments.size: must be given \(parts.own:Faces needs it\); add it to the recipe"),
        ("Faces", {"size": 1, "widht": 2}, "data.arguments.widht: unknown key; did you mean width?"),
        ("Faces", {"size": 1, "zzz": 2}, "zzz: unknown key; the arguments of parts.own:Faces are size, width$"),
        ("Faces", {"size": 1, "resolution": 4}, r"resolution: must be left out, got 4 \(it follows from the recipe's"),
        ("fails", {"a": 1}, "data.arguments.a: unknown key; parts.own:fails takes none"),
        ("positional", {}, "data.arguments.size: cannot be given: parts.own:positional takes it by its place alone"),
        ("fails", {}, r"data.kind: 'parts.own:fails' fails: ZeroDivisionError: division by zero \(own.py:8\); fix its"),
    ],
)
def test_unknown_and_missing_arguments_are_told_as_keys_are(outside, name, arguments, text):
    with pytest.raises(UserError, match=text):
        build(f"parts.own:{name}", arguments)


def test_a_saved_recipe_alone_imports_nothing(outside):
    """The author of another run may be anybody; who names the code again trusts it, and so does who names the run."""
    (outside / "run").mkdir()
    tree = yaml.safe_load(TINY)
    tree["data"] |= {"kind": "parts.own:anything"}
    (outside / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    recipe = read_saved_recipe(outside / "run", "init_from.run")
    with pytest.raises(UserError, match=r"data.kind: .* only a saved file names.*name it yourself, as by data.kind="):
        plugins.load("data.kind", recipe.data.kind)
    assert "parts.own" not in sys.modules
    load_recipe(outside / "run" / "config.yaml", ["data.kind=parts.own:anything"])
    assert plugins.load("data.kind", recipe.data.kind)(a=1) == {"a": 1}


def test_a_recipe_of_the_users_imports_what_it_names(outside):
    (outside / "recipe.yaml").write_text(TINY + "callbacks: ['parts.own:anything']\n")
    recipe = Recipe.read("recipe.yaml")
    assert recipe.callbacks[0].use == "parts.own:anything"
    assert "parts.own" not in sys.modules  # reading it imports nothing yet
    assert plugins.load("callbacks.0.use", recipe.callbacks[0].use)() == {}


@pytest.fixture
def installed(outside, monkeypatch):
    """A package with entry points, as an installation leaves it."""
    about = outside / "site" / "facesets-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: facesets\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(
        "[bigsgan.data]\nfaces = parts.own:anything\n[bigsgan.callbacks]\ntold = parts.own:Faces\n"
    )
    monkeypatch.syspath_prepend(str(outside / "site"))
    return outside


def install_scenes(directory, name, target):
    """Install another package, with one name of data."""
    later = directory / "site" / "scenes-1.0.dist-info"
    later.mkdir()
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: scenes\nVersion: 1.0\n")
    (later / "entry_points.txt").write_text(f"[bigsgan.data]\n{name} = {target}\n")


def test_a_package_that_is_installed_later_is_found(installed):
    assert plugins.names("data") == ["faces"]
    install_scenes(installed, "scenes", "parts.own:anything")
    assert plugins.names("data") == ["faces", "scenes"]


def test_a_name_of_two_packages_for_different_code_is_refused(installed):
    plugins.give(["faces"])
    install_scenes(installed, "faces", "parts.own:Faces")
    assert plugins.names("data") == ["faces"]
    told = "'faces' is the name of parts.own:(anything of facesets|Faces of scenes) and .*; write the one that you mean"
    with pytest.raises(UserError, match=f"^data.kind: {told}, as package.module:attribute$"):
        plugins.load("data.kind", "faces", "data")


def test_a_name_of_two_packages_for_the_same_code_is_loaded(installed):
    plugins.give(["faces"])
    install_scenes(installed, "faces", "parts.own:anything")
    assert plugins.load("data.kind", "faces", "data")(b=2) == {"b": 2}


def test_entry_points_are_listed_and_named(installed, capsys):
    assert cli.main(["plugins"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name   kind       stands for          package   version",
        "faces  data       parts.own:anything  facesets  1.2",
        "told   callbacks  parts.own:Faces     facesets  1.2",
    ]
    assert "parts.own" not in sys.modules
    recipe = Recipe.of({**yaml.safe_load(TINY), "data": {"kind": "faces", "resolution": 16}})
    assert plugins.load("data.kind", recipe.data.kind, "data")(b=2) == {"b": 2}


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"data": {"kind": "face"}}, r"^data.kind: must be 'digits', .* or package.module:attribute, got 'face'; "),
        ({"data": {"arguments": {"a": 1}}}, r"^data.arguments: must be unset with data.kind=digits, got \{'a': 1\}"),
        ({"callbacks": ["told"]}, r"^callbacks.0.*: must be package.module:attribute, got 'told'"),
        ({"callbacks": [{"use": "a:b", "argument": {}}]}, r"^callbacks.0.argument: unknown key; did you mean callba"),
        ({"metrics": ["sharp10"]}, r"^metrics.names: must be one of fid, .* images, or package.module:attribute, got"),
        ({"metrics": ["a:M", "b:M"]}, r"^metrics.names: 'b:M' has values of the same name as those of a:M"),
        ({"metrics": {"names": ["a:M"], "every_nimg": 8, "arguments": {"b:M": {}}}}, r"^metrics.arguments: must be a"),
    ],
)
def test_bad_names_in_a_recipe(outside, changes, text):
    with pytest.raises(UserError, match=text):
        Recipe.of({**yaml.safe_load(TINY), **changes})


def test_metrics_as_a_list_are_measured_with_each_checkpoint(outside):
    recipe = Recipe.of({**yaml.safe_load(TINY), "metrics": ["fid1k", "a.b:Sharpness"]})
    assert (recipe.metrics.names, recipe.metrics.every_nimg) == (["fid1k", "a.b:Sharpness"], recipe.checkpoint_nimg)
    assert [metric.name for metric in recipe.metrics.asked] == ["fid1k", "Sharpness"]
    assert Recipe.of(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_of_code_from_outside_says_which_key_names_it(outside, tmp_path):
    load("parts.own:Faces", "generator.family")
    fails, made = load("parts.own:fails", "objective.terms.0.use"), load("parts.own:made", "objective.terms.1.use")
    texts = ["generator.family=parts.own:Faces", "objective.terms.0.use=parts.own:fails"]
    texts.append("objective.terms.1.use=parts.own:made")
    helped = sys.modules["parts.own"]._helped
    # A function; one that calls another; and one that is neither's, which any of the file may have called.
    for work, names in ((fails, texts[1:2]), (made(), texts[1:]), (lambda: helped(lambda: 1 / 0), texts)):
        trainer = bigsgan.Trainer(tiny_recipe(tmp_path))
        with pytest.raises(ZeroDivisionError) as caught, trainer._ending():
            work()
        assert caught.value.__notes__ == [f"bigsgan: this code is from outside, {' or '.join(names)}"]
    with pytest.raises(ZeroDivisionError) as caught, trainer._ending():
        _ = 1 / 0
    assert not hasattr(caught.value, "__notes__")


def test_code_that_exits_fails():
    with pytest.raises(UserError, match=r"^callbacks: 'their:Kind' fails in on_save: SystemExit: 3 \(test_plugins.py:"):
        plugins.called("callbacks", "their:Kind", lambda: sys.exit(3), " in on_save")
