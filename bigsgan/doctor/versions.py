"""Versions of what a run computes with, against those that are tested."""

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
"""What CI runs; pyproject.toml has the same bounds."""

OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""NVIDIA's driver by CUDA's major version (NVIDIA, CUDA Compatibility, minor version compatibility)."""

DRIVER = Path("/proc/driver/nvidia/version")


def versions(subject: Subject) -> Finding:
    """Compare the versions of this process with those that are supported."""
    found = installed()
    driver, cuda = driver_version(), torch.version.cuda
    numbers: dict[str, Any] = {**found, "driver": driver, "CUDA": cuda, "NCCL": _nccl(), "tested": TESTED}
    texts = [f"{name} {number}" for name, number in {**found, "CUDA": cuda, "driver": driver}.items() if number]
    for name, tested in TESTED.items():
        if name not in found:
            return failed(f"{name} is not installed", f"run `pip install {name}`", numbers)
        if older(found[name], tested.oldest):
            remedy = f"install {name} {tested.oldest} or newer; {tested.newest} is the newest that is tested"
            return failed(f"{name} {found[name]} is older than {tested.oldest}", remedy, numbers)
    oldest = OLDEST_DRIVERS.get(_parts(cuda)[0]) if cuda else None
    if driver and oldest and older(driver, oldest) and not torch.cuda.is_available():  # or CUDA's compatibility package
        remedy = "update the driver, or install a build of torch for an older CUDA"
        return failed(f"driver {driver} is older than {oldest}, which CUDA {cuda} needs", remedy, numbers)
    newer = [name for name, tested in TESTED.items() if newer_than(found[name], tested.newest)]
    note = f"; newer than tested: {', '.join(newer)}" if newer else ""
    return passed(", ".join(texts) + note, numbers, len(newer))


def installed() -> dict[str, str]:
    """Versions by the names of ``TESTED``, of what is installed."""
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
    """Whether a version comes before another; what follows the numbers, such as +cu130, does not count."""
    return _parts(found) < _parts(oldest)


def newer_than(found: str, newest: str) -> bool:
    """Whether a version comes behind another and all that begin with its numbers."""
    parts = _parts(newest)
    return _parts(found)[: len(parts)] > parts


def _parts(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
