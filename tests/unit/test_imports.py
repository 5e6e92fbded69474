"""Imports point down the level list, deepspeed stays in its place, and the command line starts light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import statements, trees

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "bigsgan"

LADDER = re.search(r"^```ladder\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
assert LADDER

# Low to high. A name stands for the module, or for the package and all in it that no longer name covers.
LEVELS = [
    {f"{PACKAGE}.{name.rstrip('/').replace('/', '.')}" for name in line.split()}
    for line in reversed(LADDER[1].splitlines())
]
LEVELS[-2].add(PACKAGE)  # whose __init__ offers ``load``
LATE = ("importlib.import_module", "import_late", "import_quietly")
LAST_OF_LATE = [name.rpartition(".")[2] for name in LATE]
PASSED_ON = [f"{name}(module)" for name in LATE]  # within the last two, whose callers name the module
MAY_IMPORT_DEEPSPEED = ("bigsgan.engines.", "bigsgan.runtime.comm")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


@cache
def imports() -> dict[str, set[str]]:
    """What each module of the product imports."""
    return {module_name(path): set(imported(tree, text)) for path, text, tree in trees(PACKAGE)}


def imported(tree: ast.AST, source: str) -> Iterator[str]:
    """Every module that the code names in an import, or gives as text to importlib."""
    for node in ast.walk(tree) if any(f"{name}(" in source for name in LAST_OF_LATE) else statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            assert node.module is not None
            for alias in node.names:  # ``from package import module`` names a module, ``from module import x`` does not
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LAST_OF_LATE:
            if ast.unparse(node.func) not in LATE:
                continue
            (argument,) = node.args
            if ast.unparse(node) in PASSED_ON:
                continue
            known = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
            assert isinstance(known, ast.Constant), "give import_module a name, or a package, that can be read here"
            yield str(known.value).rstrip(".")


def graph() -> dict[str, set[str]]:
    edges = {
        name: {target for target in targets if target.split(".")[0] == PACKAGE} for name, targets in imports().items()
    }
    unknown = {target for targets in edges.values() for target in targets} - modules().keys()
    assert not unknown
    return edges


@cache
def covering(module: str) -> str:
    """The longest name of the level list that covers a module."""
    found = [name for level in LEVELS for name in level if module == name or module.startswith(f"{name}.")]
    name = max(found, key=len)
    assert name != PACKAGE or module == PACKAGE, f"give {module} a place in LEVELS"
    return name


@cache
def level(module: str) -> int:
    return next(i for i, names in enumerate(LEVELS) if covering(module) in names)


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports that neither go to a lower level nor stay within one package of the same level."""
    return [
        f"{module} -> {target}"
        for module, targets in edges.items()
        for target in targets
        if not (level(target) < level(module) or covering(target) == covering(module))
    ]


def test_imports_only_point_down():
    assert upward(graph()) == []


def test_there_is_no_cycle():
    edges = {module: set(targets) for module, targets in graph().items()}
    while edges:
        free = {module for module, targets in edges.items() if not targets}
        assert free, f"a cycle among {sorted(edges)}"
        edges = {module: targets - free for module, targets in edges.items() if module not in free}


def test_the_check_sees_an_import_that_points_up():
    assert upward({"bigsgan.models.layers": {"bigsgan.engines.base"}}) == [
        "bigsgan.models.layers -> bigsgan.engines.base"
    ]
    assert upward({"bigsgan.data.loader": {"bigsgan.monitor"}}) == ["bigsgan.data.loader -> bigsgan.monitor"]
    assert upward({"bigsgan.monitor.sinks": {"bigsgan.runtime.comm"}}) == [
        "bigsgan.monitor.sinks -> bigsgan.runtime.comm"
    ]
    assert upward({"bigsgan.engines.base": {"bigsgan.engines.zero"}}) == [
        "bigsgan.engines.base -> bigsgan.engines.zero"
    ]
    source = (
        "from bigsgan.runtime import comm\nimport bigsgan.errors\ndef f():\n    importlib.import_module('bigsgan.cli')"
    )
    assert list(imported(ast.parse(source), source)) == ["bigsgan.runtime.comm", "bigsgan.errors", "bigsgan.cli"]


def test_comm_and_the_bottom_stand_alone():
    edges = graph()
    assert {target for name in LEVELS[0] for target in edges[name]} == set()
    below = {
        "bigsgan.errors",
        *(f"bigsgan.runtime.{name}" for name in ("board", "division", "idle_gpus", "launched", "memory", "roster")),
    }
    assert edges["bigsgan.runtime.comm"] <= below
    # Whoever asks for the protocol must not get deepspeed with it.
    assert edges["bigsgan.engines"] == {f"bigsgan.engines.{name}" for name in ("base", "outcomes", "phases")}


def test_every_name_of_the_level_list_exists():
    assert {name for names in LEVELS for name in names} <= modules().keys()


def test_few_functions_import_what_others_name():
    passing = [name for name, path in modules().items() if any(call in path.read_text() for call in PASSED_ON)]
    assert passing == ["bigsgan", "bigsgan.commands.parsing", "bigsgan.plugins"]  # the first has a table of the names


def test_the_package_alone_imports_nothing_heavy():
    """Its names are imported when they are asked for; a plain `import bigsgan` takes milliseconds."""
    assert not loaded_after("import bigsgan") & {"torch", "deepspeed", "pydantic", "numpy"}
    assert "torch" not in loaded_after("import bigsgan; bigsgan.Recipe.read('digits'); bigsgan.UserError")


def test_only_engines_and_comm_import_deepspeed():
    importers = {name for name, targets in imports().items() if "deepspeed" in {m.split(".")[0] for m in targets}}
    assert {"bigsgan.runtime.comm", "bigsgan.engines.zero"} <= importers
    assert [name for name in importers if not name.startswith(MAY_IMPORT_DEEPSPEED)] == []


def test_only_the_doctor_patches_other_modules():
    patching = {name for name, targets in imports().items() if "unittest" in {m.split(".")[0] for m in targets}}
    assert patching == {f"bigsgan.doctor.{name}" for name in ("arithmetic", "games", "kernels", "smooth_activations")}


def loaded_after(statement: str) -> set[str]:
    """Modules in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.slow
def test_the_command_line_loads_neither_torch_nor_deepspeed():
    assert "pydantic" not in loaded_after("import bigsgan.cli")  # whose first word is to listen to signals
    loaded = loaded_after("import bigsgan.cli, bigsgan.commands.choosing")
    assert "pydantic" in loaded
    assert not loaded & {"torch", "torchvision", "deepspeed", "sklearn", "tensorboard"}


@pytest.mark.slow
def test_sampling_and_exporting_need_no_deepspeed():
    loaded = loaded_after("import bigsgan.sample, bigsgan.export")
    assert "torch" in loaded
    assert not loaded & {"deepspeed", "torch._dynamo", "torch._inductor"}  # torch's compiler takes seconds


@pytest.mark.slow
def test_training_on_digits_loads_nothing_that_takes_seconds():
    digits = "from bigsgan.config.data import Data; bigsgan.training.build.build_dataset(Data())"
    loaded = loaded_after(f"import bigsgan.trainer; {digits}")
    assert "deepspeed" in loaded
    assert not loaded & {"torchvision", "sklearn", "scipy", "torch._dynamo", "torch._inductor.compile_fx"}
