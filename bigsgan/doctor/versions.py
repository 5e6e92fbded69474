"""Compares the versions of a run's software with those that are tested."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigsgan.doctor.checks import Finding, Subject, failed, passed


class Tested(NamedTuple):
    """Versions of one thing: the oldest that is supported, and the newest that the tests have run with."""

    oldest: str
    newest: str


TESTED = {
    "Python": Tested("3.10", "3.13"),
    "torch": Tested("2.8", "2.15"),
    "deepspeed": Tested("0.19.8", "0.19"),
}
"""Versions that CI runs with; pyproject.toml has the same bounds."""

LIBRARIES = ("CUDA", "NCCL", "driver", "triton")

DRIVER = Path("/proc/driver/nvidia/version")


def versions(subject: Subject) -> Finding:
    """Compare the versions of this process with those that are supported, and with rank 0's."""
    found, libraries = installed(), of_libraries()
    first = subject.ranks.gather(libraries)[0]
    numbers: dict[str, Any] = {**found, **libraries, "tested": TESTED}
    texts = [f"{name} {number}" for name, number in {**found, **libraries}.items() if number]
    for name, tested in TESTED.items():
        if name not in found:
            return failed(f"{name} is not installed", f"run `pip install {name}`", numbers)
        if older(found[name], tested.oldest):
            remedy = f"install {name} {tested.oldest} or newer; {tested.newest} is the newest that is tested"
            return failed(f"{name} {found[name]} is older than {tested.oldest}", remedy, numbers)
    if differ := [name for name in LIBRARIES if libraries[name] != first[name]]:
        what = ", ".join(f"{name} {libraries[name] or 'is missing'}, {first[name] or 'none'} there" for name in differ)
        remedy = "install the same packages and drivers on all hosts, or ask for hosts that are alike"
        return failed(f"differs from rank 0 in {what}", remedy, numbers, len(differ))
    notes = [name for name, tested in TESTED.items() if newer_than(found[name], tested.newest)]
    note = f"; newer than tested: {', '.join(notes)}" if notes else ""
    return passed(", ".join(texts) + note, numbers, len(notes))


def of_libraries() -> dict[str, str | None]:
    """Versions of the libraries that compute and communicate on GPUs, by name; None for one that is missing."""
    triton = None
    with suppress(PackageNotFoundError):
        triton = version("triton")
    return {"CUDA": torch.version.cuda, "NCCL": _nccl(), "driver": driver_version(), "triton": triton}


def installed() -> dict[str, str]:
    """Installed versions, by the names of ``TESTED``."""
    found = {"Python": platform.python_version()}
    for name in TESTED:
        if name != "Python":
            with suppress(PackageNotFoundError):
                found[name] = version(name)
    return found


def driver_version() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    with suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", DRIVER.read_text()):
            return found[1]
    return None


def older(found: str, oldest: str) -> bool:
    """Whether a version is older than another; a suffix such as +cu130 does not count."""
    return _parts(found) < _parts(oldest)


def newer_than(found: str, newest: str) -> bool:
    """Whether a version is newer than another and all that begin with the other's numbers."""
    parts = _parts(newest)
    return _parts(found)[: len(parts)] > parts


def _parts(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
