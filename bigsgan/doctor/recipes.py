"""Checks that this machine has what a recipe needs: room for checkpoints, compilers, ops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from bigsgan.checkpoint import saved_buffers
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.doctor.storage import directory_of
from bigsgan.engines.compile_checks import check_compiler
from bigsgan.engines.deepspeed.native_ops import builders
from bigsgan.engines.optimizer import num_state_elements
from bigsgan.errors import counted
from bigsgan.models.build import network_on_meta
from bigsgan.runtime.memory import size

_FLOAT = 4
_COMPILING_SECONDS = 60
_PROGRAM = "#include <Python.h>\n#include <vector>\nint main() { return std::vector<int>(1).size() - 1; }\n"


def checkpoint_bytes(plan: RunPlan) -> int:
    """Bytes of a checkpoint of all ranks: float32 weights and optimizer state of both networks, all EMAs, buffers."""
    total, averages = 0, 1 + len(plan.recipe.ema.widths)
    networks = {network: network_on_meta(plan.recipe, network) for network in NETWORKS}
    for network, stack in networks.items():
        engine = plan.engines[network]
        numel = sum(parameter.numel() for parameter in stack.parameters())
        buffers = sum(buffer.nbytes for buffer in saved_buffers(stack).values())
        in_matrices = sum(matrix.numel() for matrix in stack.matrices())
        states = num_state_elements(engine.optimizer, engine.file, numel, in_matrices)
        tensors = 1 + averages * (network == "generator")
        total += (numel * tensors + states) * _FLOAT + buffers * (1 + (network == "generator"))
    return total


def room(subject: Subject) -> Finding:
    """Check that the checkpoints that the recipe keeps, and the one being written, fit on the disk of ``out``."""
    plan = subject.recipe_plan()
    each, section = checkpoint_bytes(plan), plan.recipe.checkpoints
    kept = section.keep + bool(section.keep_best) + 1
    if section.keep_every_nimg:
        kept += plan.recipe.total_nimg // section.keep_every_nimg
    directory = directory_of(subject.out)
    free = shutil.disk_usage(directory).free
    written = sum(path.stat().st_size for path in (subject.out / "checkpoints").rglob("*") if path.is_file())
    needed = max(each, kept * each - written)
    numbers = {"free_bytes": free, "checkpoint_bytes": each, "checkpoints": kept, "needed_bytes": needed}
    text = f"{size(free)} free in {directory}; {counted(kept, 'checkpoint')} of {size(each)}"
    if free < needed:
        remedy = "free some space, give another `out`, or lower checkpoints.keep"
        return failed(f"{text} need {size(needed - free)} more", remedy, numbers, needed - free)
    return passed(f"{text} fit", numbers, needed - free)


def compilers(subject: Subject) -> Finding:
    """Compile a program if torch.compile or an op of DeepSpeed needs a compiler."""
    plan = subject.recipe_plan()
    for network in NETWORKS:
        check_compiler(plan, network)
    ops = {builder.NAME: builder for network in NETWORKS for builder in builders(plan.engines[network].file)}
    numbers = {"compile": plan.recipe.compiles, "ops": list(ops)}
    if not (ops or plan.recipe.compiles):
        return not_applicable("the recipe compiles nothing", numbers)
    compiler = os.environ.get("CXX", "g++")
    if problem := _does_not_compile(compiler):
        remedy = "install a C++ compiler and Python's headers (apt install g++ python3-dev), or name a compiler in CXX"
        return failed(f"{compiler} {problem}", remedy, numbers)
    if ops and shutil.which("ninja") is None:
        return failed(f"no ninja, which DeepSpeed builds {', '.join(ops)} with", "run `pip install ninja`", numbers)
    for name, builder in ops.items():
        if not builder.is_compatible(verbose=True):
            remedy = "see the messages above; `ds_report` shows what DeepSpeed's ops lack"
            return failed(f"DeepSpeed's {name} cannot be built here", remedy, numbers)
    what = [*(["torch.compile"] if plan.recipe.compiles else []), *ops]
    return passed(f"{compiler} compiles, for {', '.join(what)}", numbers)


def _does_not_compile(compiler: str) -> str:
    """Why a compiler cannot compile a program with Python's headers; empty if it can."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "program.cpp")
        source.write_text(_PROGRAM)
        command = [compiler, "-fopenmp", f"-I{sysconfig.get_path('include')}", "-c", str(source), "-o", f"{source}.o"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILING_SECONDS)
        except OSError as error:
            return f"cannot be run: {error.strerror}"
    said = done.stderr.strip().splitlines() or ["no reason given"]
    return f"does not compile: {said[0]}" if done.returncode else ""
