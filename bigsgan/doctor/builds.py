"""Checks of ops that are compiled on first use."""

from __future__ import annotations

from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.engines.deepspeed.native_ops import build_directories, is_left_behind


def stale_locks(subject: Subject) -> Finding:
    """Look for locks that killed builds left behind: every later run would wait for them."""
    directories = build_directories()
    left = [directory / "lock" for directory in directories if is_left_behind(directory)]
    numbers = {"directories": [str(path) for path in directories], "left_behind": [str(path) for path in left]}
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        remedy = f"remove them unless another host is building there: rm {' '.join(map(str, left))}"
        return failed(f"a killed build left {left[0]} behind{more}", remedy, numbers)
    return passed(f"no lock of a killed build in {len(directories)} build directories", numbers)
