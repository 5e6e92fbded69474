"""Checks of the file systems that a run writes to and reads from. No torch here."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from bigsgan.config import NETWORKS
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.errors import reason
from bigsgan.runtime.locking import is_held

SHARED_SECONDS = 10.0
"""How long a new file may take to appear on another host."""

_POLL_SECONDS = 0.1
_LOCK_SECONDS = 30
_STATUSES = {False: 0, True: 11, None: 12}
"""Exit status of the process that calls ``is_held``, by the answer."""

_MADE = ("digits", "synthetic", "synthetic_pairs", "unpaired_digits")
"""Kinds of data that need no file of the user."""

_ASK = f"""
import sys
from pathlib import Path
from bigsgan.runtime.locking import is_held
sys.exit({_STATUSES}[is_held(Path(sys.argv[1]))])
"""


def directory_of(out: Path) -> Path:
    """The nearest existing directory: ``out`` or one above it."""
    out = out.absolute()
    return next(path for path in (out, *out.parents) if os.path.isdir(path))


def paths(subject: Subject) -> Finding:
    """Check that all ranks see the files that a run reads, may write to ``out``, and see what rank 0 writes there."""
    directory, me = directory_of(subject.out), subject.ranks.rank
    marker, problem = directory / f".doctor-{uuid.uuid4().hex}", ""
    if me == 0:
        try:
            marker.write_text(marker.name)
        except OSError as error:
            problem = f"{directory} cannot be written: {reason(error, directory)}"
    try:
        marker, writing = subject.ranks.gather((marker, problem))[0]
        missing = [f"{key} ({path})" for key, path in _read(subject) if not os.path.exists(path)]
        is_seen = not writing and _appears(marker)
        subject.ranks.gather(None)
    finally:
        if me == 0:
            with suppress(OSError):
                marker.unlink()
    numbers = {"directory": str(directory), "missing": missing, "sees_rank_0": is_seen}
    if missing:
        return failed(f"{missing[0]} does not exist", "copy it to this host, or give a path on all hosts", numbers)
    if problem:
        return failed(problem, "give another `out`, or fix its permissions", numbers)
    if not writing and not is_seen:
        text = f"{marker.parent} does not have what rank 0 writes there"
        return failed(text, "give an `out` on a file system that all hosts share", numbers)
    if not os.access(directory, os.W_OK | os.X_OK):
        return failed(f"{directory} cannot be written", "give another `out`, or fix its permissions", numbers)
    return passed(f"{directory} is writable" + (", and one to all ranks" if subject.ranks.size > 1 else ""), numbers)


def locks(subject: Subject) -> Finding:
    """Check that a lock in ``out`` that rank 0 holds keeps all other processes out; see runtime/locking.py."""
    path, problem, descriptor = directory_of(subject.out) / f".doctor-{uuid.uuid4().hex}", "", -1
    if subject.ranks.rank == 0:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f"{path.parent} keeps no locks: {reason(error, path)}"
    try:
        path, problem = subject.ranks.gather((path, problem))[0]
        is_kept_out = True if problem else _is_kept_out(path, in_process=subject.ranks.rank > 0)
        subject.ranks.gather(None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
            with suppress(OSError):
                path.unlink()
    numbers = {"directory": str(path.parent)}
    remedy = "mount it with locks (Lustre: -o flock), or give another `out`, and start no second job in it"
    if problem:
        return failed(problem, remedy, numbers)
    if is_kept_out is None:
        return failed(f"could not ask for a lock in {path.parent}", remedy, numbers)
    if not is_kept_out:
        return failed(f"a second process got a lock in {path.parent} that is held", remedy, numbers)
    return passed(f"a lock in {path.parent} keeps a second process out", numbers)


def _is_kept_out(path: Path, in_process: bool) -> bool | None:
    """Whether a second process cannot get a lock that is held; None if it cannot ask."""
    if in_process:
        return not os.path.exists(path) or is_held(path)  # ``paths`` reports a file that is not shared
    command = [sys.executable, "-c", _ASK, str(path)]
    status = subprocess.run(command, timeout=_LOCK_SECONDS, stdin=subprocess.DEVNULL).returncode
    return next((answer for answer, each in _STATUSES.items() if each == status), None)


def _read(subject: Subject) -> list[tuple[str, str]]:
    """Keys and values of the paths that a recipe names."""
    if subject.plan is None:
        return []
    recipe = subject.plan.recipe
    named = [("data.root", recipe.data.root), ("data.input_root", recipe.data.input_root)]
    if recipe.data.kind in _MADE:
        named = []
    if recipe.init_from:
        named += [(f"init_from.{key}", getattr(recipe.init_from, key)) for key in ("run", *NETWORKS)]
    return [(key, str(path)) for key, path in named if path]


def _appears(path: Path) -> bool:
    until = time.monotonic() + SHARED_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):
            if path.read_text() == path.name:
                return True
        time.sleep(_POLL_SECONDS)
    return False
