"""Compiles the stand-ins: what the C files hold, and for each other function that torch calls one that succeeds."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_path("platlib"))


class Library(NamedTuple):
    """One shared library.

    Attributes:
        file: Its name, as torch asks for it.
        functions: Pattern of its functions' names.
        source: C file of what is written by hand, if any.
        launches: Pattern of the functions that stand for kernels, if any; they are counted.
    """

    file: str
    functions: str
    source: str | None = None
    launches: str = "(?!)"


RUNTIME = "libcudart.so.13"
LIBRARIES = {
    "CUDART": Library(RUNTIME, r"(cuda|__cuda)", "runtime.c"),
    "CUBLAS": Library(
        "libcublas.so.13", r"cublas(?!Lt)", "libraries.c", r".*(gemm|Gemm|gemv|dot|Dot|trsm|getr|geqr|gels)"
    ),
    "CUBLASLT": Library("libcublasLt.so.13", "cublasLt", "libraries.c"),
    "CUDNN": Library("libcudnn.so.9", "cudnn", "libraries.c", "cudnn(Convolution|BatchNormalization|Pooling)"),
    "NCCL": Library("libnccl.so.2", "nccl", "libraries.c"),
    "NVRTC": Library("libnvrtc.so.13", "(?!)", "libraries.c"),
    "CUFFT": Library("libcufft.so.12", "cufft"),
    "CUSPARSE": Library("libcusparse.so.12", "cusparse(?!Lt)"),
    "CUSPARSELT": Library("libcusparseLt.so.0", "cusparseLt"),
    "CUSOLVER": Library("libcusolver.so.12", "cusolver"),
    "CUFILE": Library("libcufile.so.0", "cuFile"),
    "CUDA": Library("libcuda.so.1", "(?!)", "driver.c"),
}


def obstacle() -> str | None:
    """Why the stand-ins cannot be built for this installation of torch; None where they can."""
    if (torch.version.cuda or "").split(".")[0] != "13":
        return f"the stand-in is of CUDA 13, and this torch is built for {torch.version.cuda or 'CPUs'}"
    missing = [program for program in ("gcc", "nm") if shutil.which(program) is None]
    if missing:
        return f"needs {missing[0]}"
    return None if _includes() else "needs the headers that torch's CUDA packages bring"


def build(directory: Path) -> list[Path]:
    """Compile all libraries, if they are not there; return their paths, in the order in which LD_PRELOAD takes them."""
    last = directory / "libcuda.so"
    if not last.is_symlink():
        directory.mkdir(exist_ok=True)
        wanted = _functions_of_torch()
        for name, library in LIBRARIES.items():
            _build(name, library, wanted, directory)
        last.symlink_to("libcuda.so.1")
    return [directory / library.file for library in LIBRARIES.values()]


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Let no other process in here at the same time."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment(directory: Path, libraries: list[Path]) -> dict[str, str]:
    """Variables with which a process finds the stand-ins, and leaves the user's caches alone."""
    caches = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "TRITON_LIBCUDA_PATH": str(directory),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "DISABLE_LLVM_OPT": "1",  # Triton's, of kernels that never run: a quarter of the time that they take to compile
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **{name: str(directory / name.lower()) for name in caches},
    }


def _build(name: str, library: Library, wanted: dict[str, str], directory: Path) -> None:
    functions = {f: version for f, version in wanted.items() if re.match(library.functions, f)}
    objects, by_hand = [], set()
    if library.source is not None:
        objects.append(directory / f"{name}_by_hand.o")
        _compile(HERE / library.source, objects[0], f"-D{name}")
        by_hand = set(_symbols(objects[0], "--defined-only"))
    generated = directory / f"{name}.c"
    generated.write_text(_succeeding(sorted(functions.keys() - by_hand), library.launches))
    objects.append(directory / f"{name}.o")
    _compile(generated, objects[-1])
    options = ["-shared", f"-Wl,-soname,{library.file}", "-ldl", "-lpthread"]
    versions = {version for version in functions.values() if version}
    if versions:
        (version,) = versions
        (directory / f"{name}.map").write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={directory / name}.map")
    if library.file != RUNTIME:
        options += [f"-L{directory}", f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN"]
    _run("gcc", *objects, "-o", directory / library.file, *options)


def _succeeding(functions: list[str], launches: str) -> str:
    """C of functions that return success, and make what the first argument points to where they create something."""
    lines = ["#include <stdlib.h>", "void stand_in_launched(void);"]
    for function in functions:
        if re.match(launches, function):
            lines.append(f"int {function}(void) {{ stand_in_launched(); return 0; }}")
        elif "Create" in function:
            lines.append(f"int {function}(void **made) {{ *made = calloc(1, 4096); return 0; }}")
        else:
            lines.append(f"int {function}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _functions_of_torch() -> dict[str, str]:
    """What torch's libraries want from others: name and version."""
    found = {}
    for library in (SITE / "torch" / "lib").glob("*.so"):
        for symbol in _symbols(library, "-D", "--undefined-only"):
            function, _, version = symbol.partition("@")
            found[function] = version.strip("@")
    return found


def _symbols(file: Path, *options: str) -> list[str]:
    return [line.split()[-1] for line in _run("nm", *options, file).splitlines()]


def _compile(source: Path, target: Path, *options: str) -> None:
    _run(
        "gcc", "-c", "-O1", "-w", "-fPIC", *options, *(f"-I{include}" for include in _includes()), source, "-o", target
    )


def _includes() -> list[Path]:
    """Directories of the runtime's headers, some of which only Triton brings; empty where they are missing."""
    triton = SITE / "triton" / "backends" / "nvidia" / "include"
    found = [header.parent for header in (SITE / "nvidia").glob("**/cuda_runtime_api.h")][:1]
    return [*found, triton] if found and triton.exists() else []


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
