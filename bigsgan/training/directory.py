"""A run's directory while the run trains: what was removed from it is written again."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bigsgan.config import RunPlan
from bigsgan.config.run_directory import RECIPE_FILE, holds_another_recipe, is_own_name, write_recipe
from bigsgan.errors import UserError, reason
from bigsgan.monitor import Reporter
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import attempted, by_rank_zero, compared, for_rank_zero
from bigsgan.runtime.paths import writing
from bigsgan.training.rank_consistency import named

LOCK_FILE = ".lock"

_log = logging.getLogger(__name__)


class Traces:
    """What a start makes in a run directory before the run begins, which a refused start removes.

    It knows what was there before. Only who holds the lock may remove files: others may start there meanwhile.

    Attributes:
        began: Whether the run began, so that its files stay, whatever becomes of its recipe.
    """

    def __init__(self, out: Path) -> None:
        self._out, self.began = out, False
        self._new = [path for path in (out, *out.parents) if not os.path.lexists(path)]
        self._before: set[str] = set()
        with suppress(OSError):
            self._before = set(os.listdir(out))
        self._recipe = _status(out / RECIPE_FILE)

    def remove(self, files: bool) -> None:
        """Remove new directories that are empty, and before them a run's new ``files``; nothing of a run that began."""
        if self.began:
            return
        if files and _same(_status(self._out / RECIPE_FILE), self._recipe):  # a run begins with another file
            with suppress(OSError):
                for name in filter(is_own_name, set(os.listdir(self._out)) - self._before):
                    path = self._out / name
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):
            for path in self._new:
                path.rmdir()


def check_shared(out: Path) -> None:
    """Make the run directory, and refuse to start if the ranks have different ones. A collective.

    Others than rank 0 try to make a file that it has made: unlike a look for that file, this asks an NFS server.

    Raises:
        UserError: It cannot be written, or is another directory on some ranks.
    """
    path, word = out / f".rank-0-{comm.from_rank_zero(uuid.uuid4().hex)}", comm.from_rank_zero(uuid.uuid4().hex)
    for_rank_zero(comm, lambda: _leads_to(path, word, word))  # before the others go on
    told = attempted(lambda: _leads_to(path, word))

    def refuse(by_rank: Sequence[tuple[str, str, bool | UserError]]) -> UserError | None:
        if errors := [found for *_, found in by_rank if isinstance(found, UserError)]:
            return errors[0]
        others = [f"rank {rank} on {host} {place}" for rank, (host, place, found) in enumerate(by_rank) if not found]
        if not others:
            return None
        host, place, _ = by_rank[0]
        detail = f"rank 0 on {host} has {place}, {named(others)}"
        remedy = "give an absolute path on a file system that all hosts share"
        return UserError("out", str(out), "must be the same directory on all ranks", remedy, detail)

    try:
        compared(comm, (socket.gethostname(), os.path.abspath(out), told), refuse)
    finally:
        if comm.rank() == 0 or not told:
            path.unlink(missing_ok=True)


def _leads_to(path: Path, word: str, new: str = "") -> bool:
    """Return whether a file holds a word. If there is none yet, make it, and the directory, with ``new`` in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(new)
    except FileExistsError:
        with writing(path.parent):
            return path.read_text() == word
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    return new == word


def check_writable(out: Path) -> None:
    """Refuse a run directory that cannot be made or written, and leave nothing there.

    Raises:
        UserError: It cannot.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.isdir(path))
    try:
        with tempfile.TemporaryDirectory(prefix=".bigsgan-", dir=place):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> UserError:
    problem = f"cannot be written: {reason(error, error.filename)}"
    return UserError("out", str(out), problem, "give a directory that you can write to, with free space")


class RunDirectory:
    """The files of a run that are neither reports nor checkpoints. Every rank has one, and calls the same methods.

    Open files stay with a directory that is renamed, or are lost with one that is removed, and no write fails.
    """

    def __init__(self, plan: RunPlan, out: Path, lock: Callable[[], None]) -> None:
        """Write the recipe and copies of its DeepSpeed files. A collective. ``lock`` locks the directory again.

        Raises:
            UserError: The directory cannot be written.
        """
        self._plan, self._out, self._lock = plan, out, lock
        self._disk, self._mark = by_rank_zero(comm, self._write)

    def restored(self, reporter: Reporter) -> bool:
        """Write again what is gone, if the directory was removed or renamed, or files in it. A collective.

        Returns:
            Whether anything was gone, so that checkpoints may be gone too.

        Raises:
            UserError: Something else is in its place.
        """
        return by_rank_zero(comm, lambda: self._restore(reporter))

    def _write(self) -> tuple[int, os.stat_result | None]:
        """Write what is missing; return the file system, and a file that tells this directory from others."""
        write_recipe(self._plan.recipe, self._out, self._plan.engines)
        return _disk(self._out), _status(self._out / LOCK_FILE)

    def _restore(self, reporter: Reporter) -> bool:
        out, now = self._out, _status(self._out / LOCK_FILE)
        is_marked = now is not None and _same(now, self._mark)
        has_files = now is not None and os.path.isfile(out / RECIPE_FILE) and os.path.isdir(out / "logs")
        if has_files and not reporter.are_displaced:
            if not is_marked:
                self._relock()
            return False
        remedy = "run the same command once that directory is back, to resume from its newest checkpoint"
        if _disk(out) != self._disk:
            problem = "is on another disk than at the start of the run: unmounted, or replaced"
            raise UserError("out", str(out), problem, remedy)
        moved = not is_marked and reporter.are_displaced
        if moved and (self._holds_others() or reporter.are_replaced):
            raise UserError("out", str(out), "is another directory than at the start of the run", remedy)
        self._disk, self._mark = self._write()
        (out / "logs").mkdir(exist_ok=True)  # where each rank opens its log again
        if not is_marked:
            self._relock()
        reporter.restore()
        what = "it was removed or renamed" if moved else "some were removed"
        _log.warning("%s lacks files of the run: %s; they are written again, with a checkpoint", out, what)
        return True

    def _holds_others(self) -> bool:
        """Return whether the directory holds another recipe, or none but files of another program."""
        names = os.listdir(self._out) if self._out.is_dir() else []
        strange = [name for name in names if not is_own_name(name) and not name.startswith(".nfs")]  # open files of NFS
        if strange and RECIPE_FILE not in names:  # a copy of the run may have others beside the recipe
            return True
        return holds_another_recipe(self._out, self._plan.recipe, self._plan.engines)

    def _relock(self) -> None:
        """Lock the directory, whose lock was removed or replaced; refuse to go on beside another job."""
        self._lock()
        self._mark = _status(self._out / LOCK_FILE)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _disk(path: Path) -> int:
    """Return the number of the file system that a path is on, or would be on."""
    return next(os.stat(each).st_dev for each in (path, *path.parents) if os.path.exists(each))


def _same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Return whether two paths lead to the same file, or both to none."""
    return one is other if one is None or other is None else os.path.samestat(one, other)
