"""The table of touched.py, against the installed DeepSpeed and against what bigsgan uses of it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.unit.touched import TOUCHED, VERSION

BIGSGAN = REPOSITORY / "bigsgan"
SPEC = importlib.util.find_spec("deepspeed")  # its import takes seconds
assert SPEC is not None
assert SPEC.submodule_search_locations is not None
DEEPSPEED = Path(SPEC.submodule_search_locations[0])
FILES = [
    str(path.relative_to(BIGSGAN)) for room in ("engines", "bench") for path in sorted((BIGSGAN / room).rglob("*.py"))
]
FILES.append("runtime/comm.py")

DOCUMENTED = {
    "initialize", "init_distributed", "zero", "Init", "GatheredParameters", "get_accelerator", "DeepSpeedEngine",
    "PipelineEngine", "PipelineModule", "PipeDataParallelTopology", "DeepSpeedCPUAdam", "module", "backward",
    "reduce_bucket_size",
}  # fmt: skip
"""What DeepSpeed's pages describe, and of the keys of its files that which is read."""
NOT_DEEPSPEEDS = {"_asdict", "_replace", "_schema", "_parameters", "_forward_hooks", "_forward_pre_hooks"}
"""Underscores of named tuples, and of torch's operators and modules."""


def own_name(name: str) -> str:
    """A name that begins with two underscores as its class has it."""
    return re.sub(r"^_[A-Za-z]\w*?(?=__\w)", "", name) if name.startswith("_") else name


def names_in(source: str) -> set[str]:
    """What a file imports, defines, assigns or uses, and its texts, as attributes are looked up by these too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name) | ast.Name(id=name):
                found.add(name)
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Constant(value=str(name)):
                found.add(own_name(name))
    return found


def vanished(touched: dict[str, dict[str, str]]) -> list[str]:
    """Names that a file of the installed DeepSpeed does not have any more."""
    found = []
    for file, rows in touched.items():
        path = DEEPSPEED / file
        has = names_in(path.read_text()) if path.exists() else set()
        found += [f"deepspeed/{file}: {name}" for names in rows.values() for name in names.split() if name not in has]
    return found


def told(touched: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """The table's names by our file."""
    found: dict[str, set[str]] = {}
    for rows in touched.values():
        for by, names in rows.items():
            found.setdefault(by, set()).update(names.split())
    return found


def unused(touched: dict[str, dict[str, str]]) -> list[str]:
    """Names that bigsgan's file does not use any more."""
    return [
        f"bigsgan/{by}: {name}"
        for by, names in told(touched).items()
        for name in sorted(names - names_in((BIGSGAN / by).read_text()))
    ]


def is_module(path: str) -> bool:
    return (DEEPSPEED / path).is_dir() or (DEEPSPEED / f"{path}.py").is_file()


def root(owner: ast.expr) -> str:
    """The name with which an expression begins."""
    while isinstance(owner, ast.Attribute | ast.Subscript | ast.Call):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return owner.id if isinstance(owner, ast.Name) else ""


def used(source: str) -> set[str]:
    """What a file imports from DeepSpeed, and private names of objects that are not its own."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    of_torch = [node for node in imports if str(getattr(node, "module", node.names[0].name)).startswith("torch")]
    torchs = {each.asname or each.name.partition(".")[0] for node in of_torch for each in node.names}
    found, own = set(), set(NOT_DEEPSPEEDS)
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("deepspeed"):
                path = module.partition(".")[2].replace(".", "/")
                found |= {each.name for each in names if path != "accelerator" and not is_module(f"{path}/{each.name}")}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                own.add(name)
            case ast.Attribute(value=owner, attr=name) if name.startswith(("_", "ds_")) and root(owner) not in torchs:
                found.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                found |= {name} if name.startswith(("_", "ds_")) else set()
    return {own_name(name) for name in found - own if not name.endswith("__")}


@pytest.mark.slow
def test_deepspeed_has_every_name():
    """Where this fails after an upgrade, each name needs another look, beginning with the file that uses it."""
    assert vanished(TOUCHED) == []


def test_bigsgan_uses_every_name():
    assert unused(TOUCHED) == []


def test_the_table_says_what_is_used():
    """Public attributes of DeepSpeed's objects apart, which no glance at a file tells from others."""
    known = told(TOUCHED)
    untold = {file: used((BIGSGAN / file).read_text()) - known.get(file, set()) - DOCUMENTED for file in FILES}
    assert {file: names for file, names in untold.items() if names} == {}


def test_the_version_is_the_first_that_is_accepted():
    assert f'"deepspeed>={VERSION},' in (REPOSITORY / "pyproject.toml").read_text()


def test_a_name_that_vanished_is_seen():
    rows = {"engines/zero.py": "step basic_optimiser"}
    assert vanished({"runtime/engine.py": rows, "runtime/enginery.py": {"engines/zero.py": "step"}}) == [
        "deepspeed/runtime/engine.py: basic_optimiser",
        "deepspeed/runtime/enginery.py: step",
    ]
    assert unused({"runtime/engine.py": rows}) == ["bigsgan/engines/zero.py: basic_optimiser"]
