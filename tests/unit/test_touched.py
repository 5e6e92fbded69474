"""engines/deepspeed/touched.py, against the installed DeepSpeed and against what bigsgan uses of it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import re
import types
from pathlib import Path

import pytest
import torch

from bigsgan.engines.deepspeed.touched import TOUCHED, VERSION, Touched
from tests import REPOSITORY

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
OPTIMIZERS = {"param_groups", "state", "defaults", "found_inf"}
"""What torch's optimizers give themselves."""
FUNCTIONS = {"jvp", "save_for_forward", "saved_for_forward"}
"""What torch's differentiable functions have."""
OTHERS = (
    torch.Tensor, torch.nn.Module, torch.cuda.Stream, torch.device, logging.Logger, dict, list, slice,
    types.FunctionType, types.CellType, type(functools.cache(len)),
)  # fmt: skip
"""Types that DeepSpeed's objects hand out."""
NOT_DEEPSPEEDS = {"_asdict", "_replace", "_schema"}
"""Underscores of named tuples, and of torch's operators."""
PASSES_ON = {"list", "iter", "next", "zip", "enumerate", "reversed", "sorted", "vars", "copy"}
"""Functions whose result is made of their arguments."""


def own_name(name: str) -> str:
    """A name that begins with two underscores as its class has it."""
    return re.sub(r"^_[A-Za-z]\w*?(?=__\w)", "", name)


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


def vanished(rows: tuple[Touched, ...]) -> list[str]:
    """Names that a file of the installed DeepSpeed does not have any more."""
    sources = {row.file: DEEPSPEED / row.file for row in rows}
    names = {file: names_in(path.read_text()) if path.exists() else set() for file, path in sources.items()}
    return [f"deepspeed/{row.file}: {name}" for row in rows for name in row.names if name not in names[row.file]]


def unused(rows: tuple[Touched, ...]) -> list[str]:
    """Names that bigsgan's file does not use any more."""
    names = {row.by: names_in((BIGSGAN / row.by).read_text()) for row in rows}
    return [f"bigsgan/{row.by}: {name}" for row in rows for name in row.names if name not in names[row.by]]


class Uses(ast.NodeVisitor):
    """What a file uses of DeepSpeed.

    An object is DeepSpeed's where it begins with what is imported from there, with a parameter of such a type, with the
    result of a function that says so, or with a variable or an attribute that something of DeepSpeed's was assigned to.

    Attributes:
        used: Names that are imported, or are attributes of such an object, or begin with an underscore or ``ds_`` on an
            object that is neither ``self`` nor torch's, without being defined in the file.
        assigned: Attributes of such an object that something is assigned to.
    """

    def __init__(self, source: str, any_is_deepspeeds: bool = False) -> None:
        tree = ast.parse(source)
        self.used: set[str] = set()
        self.assigned: set[str] = set()
        self._types = {"Any"} if any_is_deepspeeds else set()
        self._objects: set[str] = set()
        self._attributes = {"_engine"}  # DeepSpeedBacked's
        self._torchs: set[str] = set()
        self._defined = NOT_DEEPSPEEDS | {
            node.attr if isinstance(node, ast.Attribute) else node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value))
        }
        for _ in range(3):  # a method may stand above the one that assigns its attribute
            self.visit(tree)
        if any_is_deepspeeds:
            self.used |= constants(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(alias.name.partition(".")[0], (alias.asname or alias.name).partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package, _, module = str(node.module).partition(".")
        for alias in node.names:
            self._import(package if module != "accelerator" else "", alias.asname or alias.name)
            if package == "deepspeed" and not is_module(f"{module.replace('.', '/')}/{alias.name}"):
                self.used.add(alias.name)

    def _import(self, package: str, name: str) -> None:
        if package in ("deepspeed", "torch"):
            (self._objects if package == "deepspeed" else self._torchs).add(name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = set(self._objects)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._objects.discard(argument.arg)
            types_ = ast.walk(argument.annotation) if argument.annotation else ()
            if any(isinstance(part, ast.Name) and part.id in outside | self._types for part in types_):
                self._objects.add(argument.arg)
        for _ in range(2):  # what is assigned in a loop, or in a function inside
            self.generic_visit(node)
        self._objects = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        # Over values that stand there one by one, the target is each of them; else a part of what is gone through.
        for value in node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else [node.iter]:
            self._assign(node.target, value)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for generator in node.generators:  # which bind what stands before them
            self.visit(generator)
        self.generic_visit(node)

    visit_GeneratorExp = visit_SetComp = visit_DictComp = visit_ListComp  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id=function), args=[owner, ast.Constant(value=str(name)), *_]):
                if function in ("getattr", "hasattr", "setattr"):
                    self._use(owner, name, stores=function == "setattr")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node.value, node.attr, stores=isinstance(node.ctx, ast.Store))
        self.generic_visit(node)

    def _use(self, owner: ast.expr, name: str, stores: bool) -> None:
        root = owner
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in self._torchs:
            return
        is_private = name.startswith(("_", "ds_")) and not (
            name.endswith("__") or is_self(owner) or name in self._defined
        )
        known = OPTIMIZERS | FUNCTIONS | DOCUMENTED
        if self._is_deepspeeds(owner) and stores and not (name in known or hasattr(torch.Tensor, name)):
            self.assigned.add(own_name(name))
        elif self._is_deepspeeds(owner) and (name in known or any(hasattr(kind, name) for kind in OTHERS)):
            return
        if (is_private or self._is_deepspeeds(owner)) and not is_module(name):
            self.used.add(own_name(name))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its)
        elif self._is_deepspeeds(value):
            for part in ast.walk(target):
                match part:
                    case ast.Name(id=name, ctx=ast.Store()):
                        self._objects.add(name)
                    case ast.Attribute(attr=name, value=owner, ctx=ast.Store()) if is_self(owner):
                        self._attributes.add(name)

    def _is_deepspeeds(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._objects
            case ast.Attribute(value=owner, attr=name) if is_self(owner):
                return name in self._attributes
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
                return self._is_deepspeeds(inner)
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, *_]) | ast.NamedExpr(value=inner):
                return self._is_deepspeeds(inner)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=parts) if name in PASSES_ON:
                return any(self._is_deepspeeds(part) for part in parts)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in makers():
                return True
            case ast.Call(func=inner) | ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner):
                return self._is_deepspeeds(inner)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return any(self._is_deepspeeds(part) for part in parts)
            case ast.IfExp(body=one, orelse=other):
                return self._is_deepspeeds(one) or self._is_deepspeeds(other)
        return False


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_module(path: str) -> bool:
    return (DEEPSPEED / path).is_dir() or (DEEPSPEED / f"{path}.py").is_file()


def constants(tree: ast.Module) -> set[str]:
    """The texts of a file's constants, which name attributes."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    parts = [part for value in values for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
    texts = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return {text for text in texts if text.isidentifier()}


@functools.cache
def makers() -> set[str]:
    """Functions of bigsgan that return objects of DeepSpeed's."""
    found = set()
    for file in FILES:
        tree = ast.parse((BIGSGAN / file).read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        kinds = {alias.name for node in imports if str(node.module).startswith("deepspeed.") for alias in node.names}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns is not None]
        found |= {node.name for node in functions if kinds & names_in(ast.unparse(node.returns))}
    return found


def untold(file: str, source: str, rows: tuple[Touched, ...]) -> list[str]:
    """What a file of bigsgan uses, or assigns to, and the table does not say."""
    uses = Uses(source, any_is_deepspeeds=file.startswith("engines/deepspeed/"))
    names = {name for row in rows if row.by == file for name in row.names}
    replaced = {name for row in rows if row.by == file for name in row.replaces.split()}
    return sorted(uses.used - names - FUNCTIONS - DOCUMENTED) + [
        f"{name} = ..." for name in sorted(uses.assigned - replaced)
    ]


@pytest.mark.slow
def test_deepspeed_has_every_name():
    """Where this fails after an upgrade, each name needs another look, beginning with the file that uses it."""
    assert vanished(TOUCHED) == []


def test_bigsgan_uses_every_name():
    assert unused(TOUCHED) == []


@pytest.mark.parametrize("file", [file for file in FILES if not file.endswith("touched.py")])
def test_the_table_says_what_is_used(file):
    assert untold(file, (BIGSGAN / file).read_text(), TOUCHED) == []


def test_each_pair_of_files_stands_there_once_and_in_order():
    pairs = [(row.file, row.by) for row in TOUCHED]
    assert pairs == sorted(set(pairs))
    assert all(len(row.names) == len(set(row.names)) for row in TOUCHED)


def test_the_version_is_the_first_that_is_accepted():
    assert f'"deepspeed>={VERSION},' in (REPOSITORY / "pyproject.toml").read_text()


def test_a_name_that_vanished_is_seen():
    row = Touched("runtime/engine.py", "engines/zero.py", reads="step basic_optimiser")
    assert vanished((row, Touched("runtime/enginery.py", "engines/zero.py", calls="step"))) == [
        "deepspeed/runtime/engine.py: basic_optimiser",
        "deepspeed/runtime/enginery.py: step",
    ]
    assert unused((row,)) == ["bigsgan/engines/zero.py: basic_optimiser"]


SOURCE = """
import torch
from deepspeed.runtime.engine import DeepSpeedEngine, split_half_float_double
from deepspeed.runtime.zero import stage3

_PARTS = ("flat_groups", "groups_flat")

class Ours:
    def close(self):
        self._wrapped._reset()
        self._groups[0].label = self._own()

    def __init__(self, engine: DeepSpeedEngine, ours: Plan):
        self._wrapped = engine
        self._groups = [group for group in engine.optimizer.groups if hasattr(group, "span")]
        for number, group in enumerate(self._groups):
            group.numbers[number].data.copy_(group.flat_values)
        engine.step = engine.data_parallel_group.step = None
        stage3.is_invalid = torch._foreach_norm
        ours.number = ours.plan._layout

    def _own(self):
        setattr(self._wrapped.module, "frozen", True)
        made, _ = initialize_engine(self)
        made.inside += 1
"""


def test_what_is_used_is_seen():
    uses = Uses(SOURCE)
    read = "split_half_float_double DeepSpeedEngine _reset optimizer groups span numbers flat_values _layout"
    assigned = "label step is_invalid frozen inside"
    assert uses.used == {*read.split(), *assigned.split(), "data_parallel_group"}
    assert uses.assigned == set(assigned.split())
    assert Uses(SOURCE, any_is_deepspeeds=True).used - uses.used == {"flat_groups", "groups_flat"}


def test_what_the_table_does_not_say_is_seen():
    file = "engines/deepspeed/divided_update.py"
    source = (BIGSGAN / file).read_text()
    without = tuple(row._replace(calls="_update_scale", replaces="overflow step") for row in TOUCHED if row.by == file)
    assert untold(file, source, without) == [
        "_global_grad_norm",
        "_skip_invalid_grad_norm",
        "is_invalid_grad_norm",
        "_global_grad_norm = ...",
    ]
