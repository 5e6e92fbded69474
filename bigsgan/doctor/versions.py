"""Checks that the software of a run is not older than what is supported. No torch here."""

from __future__ import annotations

import platform
import re

from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.preflight import versions as packages

OLDEST = {"Python": "3.10", "torch": "2.8", "deepspeed": "0.19.8"}
"""As in pyproject.toml, which pip keeps to."""


def versions(subject: Subject) -> Finding:
    """Compare the versions of this process with the oldest that are supported."""
    found = {"Python": platform.python_version(), **packages()}
    for name, oldest in OLDEST.items():
        if name not in found:
            return failed(f"{name} is not installed", f"run `pip install {name}`", found)
        if _parts(found[name]) < _parts(oldest):
            return failed(f"{name} {found[name]} is older than {oldest}", f"install {name} {oldest} or newer", found)
    return passed(", ".join(f"{name} {number}" for name, number in found.items()), found)


def _parts(text: str) -> tuple[int, ...]:
    """The numbers of a version; a suffix such as +cu130 does not count."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
