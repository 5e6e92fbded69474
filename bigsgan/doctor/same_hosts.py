"""Checks that hosts are alike: the package's files, versions, recipe and DeepSpeed files. No torch here."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from bigsgan.config.run_directory import same_on_hosts
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.preflight import versions

PACKAGE = Path(__file__).parents[1]
_DRIVER = Path("/proc/driver/nvidia/version")


def same_files(subject: Subject) -> Finding:
    """Compare versions, the package's files, recipe and DeepSpeed files with rank 0's."""
    own: dict[str, Any] = {f"version of {name}": version for name, version in versions().items()}
    own |= {"version of Python": platform.python_version()} | (same_on_hosts(subject.plan) if subject.plan else {})
    own["the NVIDIA driver"] = _DRIVER.read_text().partition("\n")[0] if _DRIVER.exists() else None
    own["files of bigsgan"] = _digest(json.dumps(files := _files()).encode())
    first, *_ = by_rank = subject.ranks.gather(own)
    differs = any(values != first for values in by_rank)
    first_files = subject.ranks.gather(files)[0] if differs else files
    names = [key for key in first.keys() | own.keys() if first.get(key) != own.get(key)]
    others = [name for name in first_files.keys() | files.keys() if first_files.get(name) != files.get(name)]
    numbers = {"differs": sorted(names), "files": sorted(others), "digest": own["files of bigsgan"]}
    if names:
        key = sorted(names)[0]
        what = f"bigsgan/{sorted(others)[0]}" if others else f"{key}: {own.get(key)!r}, {first.get(key)!r} there"
        more = f" and {len(names) + len(others) - 1 - bool(others)} more" if len(names) > 1 or len(others) > 1 else ""
        text = f"differs from rank 0 in {what}{more}"
        return failed(text, "install the same packages and copy the same files to all hosts", numbers, len(names))
    num = len(files)
    return passed(f"{num} files of bigsgan, {len(own) - 1} versions and keys are the same on all ranks", numbers)


def _files() -> dict[str, str]:
    paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml", ".json", ".sh"))
    return {str(path.relative_to(PACKAGE)): _digest(path.read_bytes()) for path in paths if path.is_file()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
