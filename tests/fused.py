"""Triton's kernels anew, and compiled without a GPU. What is compared, and how, stands in bigsgan/doctor/kernels.py."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from bigsgan.models import fused


def fresh_kernels(name: str = "fused_kernels") -> ModuleType:
    """A module, anew and under no name: what Triton's decorator makes of a kernel depends on the environment."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec(f"bigsgan.models.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def interpreting(*names: str) -> Iterator[None]:
    """Inside the block, layers take these kernels in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(fused, "kernels", {name: fresh_kernels(f"{name}_kernels") for name in names}.__getitem__)
        yield


_OWN = {"seeds_ptr": "i64", "first": "i64", "eps": "fp32"} | dict.fromkeys(["sums_ptr", "sigma_ptr"], "fp32")
"""Types of arguments that follow from none other."""


def compiled(kernel: Any, dtype: str, **given: Any) -> Any:
    """Code for an H100, which Triton can write without one; arguments that are not given are numbers."""
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    signature, constants = {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in given:
            signature[name], constants[(i,)] = "constexpr", given[name]
        else:
            own = _OWN.get(name, "i32")
            signature[name] = f"*{_OWN.get(name, dtype)}" if name.endswith("_ptr") else own
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = backends.GPUTarget("cuda", 90, 32)
    return compiler.compile(source, target=target).asm


def by_turns(subjects: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Each subject with one of the others, which take turns; with the rest in the slow tier."""
    return [
        pytest.param(subject, other, marks=() if i % len(others) == j else pytest.mark.slow)
        for i, subject in enumerate(subjects)
        for j, other in enumerate(others)
    ]
