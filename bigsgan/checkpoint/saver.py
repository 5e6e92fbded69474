"""Saves checkpoints: copies the state, and writes it while training continues."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bigsgan.checkpoint.entries import ObjectCollectives, SavedEntry, StateShard
from bigsgan.checkpoint.files import Moved, first_not_finite, unnoticed, write_tensors
from bigsgan.checkpoint.reader import intervals, tensor_name, value_name
from bigsgan.checkpoint.returns import note_saved
from bigsgan.checkpoint.state_copies import StateCopies
from bigsgan.checkpoint.tags import FORMAT, MANIFEST, PARTIAL, other_format, prune, sealed
from bigsgan.config.sections import Checkpoints
from bigsgan.errors import UserError
from bigsgan.runtime.atomic import fsync, write_text
from bigsgan.runtime.collective_errors import by_rank_zero
from bigsgan.runtime.memory import size
from bigsgan.runtime.paths import parse_json

_RECEIPT = ".written.json"
"""Ending of the file that a rank leaves beside its data for the rank that writes the manifest."""

_OWN_PARTIAL = re.compile(rf"[0-9]{{12,}}(\.old|\.damaged)?{re.escape(PARTIAL)}")
"""Directories that killed saves leave behind; other programs' unfinished downloads end in ``PARTIAL`` too."""

_POLL_SECONDS = 0.05
_LINGER_SECONDS = 20.0
_FAILURES = (OSError, UserError)

_log = logging.getLogger(__name__)


class _NotFiniteError(UserError):
    """The state has Inf or NaN, so that no run could resume from it."""


class Description(NamedTuple):
    """What a manifest says about a run in addition to its state."""

    recipe: Mapping[str, Any]  # the resolved recipe
    layout: Mapping[str, Any]  # how the ranks share the networks
    metrics: Mapping[str, float]  # the last reported metrics


class Saver:
    """Saves a run's state under successive tags. Every rank has a saver, and calls the same methods.

    Attributes:
        stall_seconds: How long the last save held this rank up.
        write_seconds: How long it took to write this rank's part of it, in the background or not.
        lost: Where the state had non-finite values, so that it was not saved; empty if none are known yet.
        directory: Where the tags are.
        bad: Checksums of tags from which the run went back to older ones. The next save removes them: otherwise the run
            might resume from them.
        left: Checksums of tags that a run has left which went back to an older one; the next save removes them too.
    """

    def __init__(
        self,
        directory: Path,
        ranks: ObjectCollectives,
        section: Checkpoints,
        moved: Moved = unnoticed,
        what: str = "checkpoint",
    ) -> None:
        """Begin without a save.

        ``directory``, such as the run's ``checkpoints``, is on a file system that all ranks share. ``what`` is the name
        of the saved thing in messages.
        """
        self._moved, self._what = moved, what
        self.stall_seconds = self.write_seconds = 0.0
        self.lost = ""
        self.directory, self._ranks, self._section = directory, ranks, section
        self.bad: set[str] = set()
        self.left: set[str] = set()
        self._copies = StateCopies() if section.background else None
        self._job: _Job | None = None
        self._barrier: Callable[[], None] = ranks.barrier

    def path(self, nimg: int) -> Path:
        """Return the directory of the tag at ``nimg`` images."""
        return self.directory / f"{nimg:012d}"

    def save(self, nimg: int, entries: Mapping[str, SavedEntry], description: Description) -> bool:
        """Save all entries under one tag, after the previous save is complete. A collective.

        Returns:
            False if it is already known that a rank lacks disk space or cannot write. Older tags are untouched.
        """
        start = time.perf_counter()
        self.finish()
        job = _Job(self, nimg)
        first = self._ranks.rank() == 0
        parts = {name: [p for p in entry.parts() if first or not p.everywhere] for name, entry in entries.items()}
        ready = self._on_all_ranks(job, lambda: job.begin(parts))
        if ready:
            numbers = {name: entry.numbers() for name, entry in entries.items()}
            if self._copies is not None and (problem := self._copies.refusal(parts, self._ranks)):
                _log.warning("%ss are written in the foreground from now on: %s", self._what, problem)
                self._copies = None
            if self._copies is not None:
                parts = self._copies.copied(parts)
            self._barrier = self._ranks.patient_barrier()  # ranks may write for longer than collectives wait
            job.start(parts, {**description._asdict(), "numbers": numbers})
            self._job = job
        done = ready and (self._copies is not None or self.finish())
        self.stall_seconds = time.perf_counter() - start
        return done

    def amend(self, nimg: int, entry: str, numbers: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Replace an entry's numbers and the metrics in a complete tag's manifest; rank 0 does it."""
        if self._ranks.rank() != 0:
            return
        path = self.directory / f"{nimg:012d}" / MANIFEST
        try:
            manifest = parse_json(path.read_text())
            manifest |= {"metrics": dict(metrics), "numbers": {**manifest["numbers"], entry: dict(numbers)}}
            write_text(path, json.dumps(sealed(manifest), indent=1))
        except (OSError, ValueError, KeyError) as error:
            _log.warning("%s: the metrics at %d images are not noted: %s", path, nimg, error)

    def finish(self) -> bool:
        """Wait for the save in progress, if any. A collective.

        Returns:
            Whether it is complete; True if none was in progress.
        """
        job = self._job
        if job is None:
            return True
        wait(job.tasks[:1])
        self._barrier()
        try:
            done = self._on_all_ranks(job, job.tasks[0].result) and self._on_all_ranks(job, job.tasks[-1].result)
        except Exception:
            self._job = None
            raise
        self._job = None  # not before: after Ctrl-C in a notebook the next save waits for this one
        if done:
            self.left.clear()
            self.write_seconds = job.write_seconds
            text = "%s at %d images: %.1f MiB of this rank written in %.2f s"
            _log.info(text, self._what, job.nimg, job.num_bytes / 2**20, job.write_seconds)
        return done

    def close(self) -> None:
        """Wait for a save in progress after an error: for a limited time, and without the other ranks."""
        for task in self._job.tasks if self._job is not None else ():
            wait([task], _LINGER_SECONDS)

    def _on_all_ranks(self, job: _Job, phase: Callable[[], None]) -> bool:
        """Run a phase on all ranks; if it fails on any rank, abandon the save on all."""
        problem, lost = "", ""
        try:
            phase()
        except _FAILURES as error:
            problem = str(error) or type(error).__name__
            lost = f"{error.field} has non-finite values" if isinstance(error, _NotFiniteError) else ""
        if not self._ranks.any_rank(bool(problem)):  # waits for all ranks too
            return True
        found = list(enumerate(self._ranks.gather_objects((problem, lost)) or []))  # only rank 0 has the terminal
        for rank, (text, _) in [each for each in found if each[1][0]][:1]:
            _log.warning("%s at %d images was not saved: %s (rank %d)", self._what, job.nimg, text, rank)
        losses = [f"rank {rank}: {text}" for rank, (_, text) in found if text]
        self.lost = self._ranks.from_rank_zero(next(iter(losses), self.lost))
        job.abandon()
        self._ranks.barrier()
        return False


class _Job:
    """One save on one rank. Apart from ``begin`` it needs no collectives, so that threads can do the work.

    Attributes:
        nimg: Images seen.
        num_bytes: Size of this rank's values.
        write_seconds: Time that this rank's file took.
        tasks: Begun by ``start``: this rank's file, and on rank 0 the manifest, after all ranks have written.
    """

    def __init__(self, saver: Saver, nimg: int) -> None:
        self._ranks, self._section, self._moved, self._what = saver._ranks, saver._section, saver._moved, saver._what
        self._directory, self._tag = saver.directory, saver.path(nimg).name
        self._partial = self._directory / f"{self._tag}{PARTIAL}"
        self._bad = frozenset(saver.bad | saver.left)  # a copy, as a thread reads it
        self.nimg, self.num_bytes, self.write_seconds = nimg, 0, 0.0
        self.tasks: list[Future[None]] = []
        self._cancelled = threading.Event()

    def begin(self, parts: dict[str, list[StateShard]]) -> None:
        """Make the tag's directory, and check that all ranks can write to it. A collective."""
        by_rank_zero(self._ranks, self._clear)
        shared = os.path.isdir(self._partial)
        self.num_bytes = sum(part.values.nbytes for own in parts.values() for part in own)
        needed = self._ranks.total(self.num_bytes)
        if not shared:
            remedy = "give an `out` on a file system that all hosts share"
            raise UserError(str(self._directory), None, "must be the same directory on all ranks", remedy)
        free = shutil.disk_usage(self._partial).free
        if free < needed * 1.05:
            problem = f"must have {size(needed)} free for the ranks to write, got {size(free)}"
            raise UserError(str(self._partial), None, problem, "free some space, or lower checkpoints.keep")

    def _clear(self) -> None:
        try:
            for left in self._directory.glob(f"*{PARTIAL}"):  # left by killed saves; removed before space is counted
                if _OWN_PARTIAL.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            problem = f"cannot be written: {error}"
            raise UserError(str(self._directory), None, problem, "give another `out`") from error

    def start(self, parts: dict[str, list[StateShard]], manifest: dict[str, Any]) -> None:
        """Write this rank's file in a thread. On rank 0 another thread completes the tag when all ranks are done."""
        self.tasks = [_in_thread(lambda: self._write(parts))]
        if self._ranks.rank() == 0:
            self.tasks.append(_in_thread(lambda: self._commit(manifest)))

    def abandon(self) -> None:
        """Stop this save, and on rank 0 remove its files. The writers of all ranks have ended before this call."""
        self._cancelled.set()
        wait(self.tasks)
        if self._ranks.rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _write(self, parts: dict[str, list[StateShard]]) -> None:
        start = time.perf_counter()
        tensors = {tensor_name(entry, part): part.values for entry, own in parts.items() for part in own}
        if name := first_not_finite(tensors):
            problem = "has non-finite values: the weights are lost, older checkpoints stay"
            raise _NotFiniteError(name, None, problem, "lower the learning rates, or raise precision")
        path = self._partial / f"rank{self._ranks.rank():05d}.safetensors"
        sha256 = write_tensors(path, tensors, {"format": str(FORMAT)}, self._moved)
        held = {entry: _by_kinds(own) for entry, own in parts.items()}
        receipt = {"file": {"bytes": path.stat().st_size, "sha256": sha256}, "held": held}
        write_text(path.with_suffix(_RECEIPT), json.dumps(receipt))
        self.write_seconds = time.perf_counter() - start

    def _commit(self, manifest: dict[str, Any]) -> None:
        receipts = self._receipts()
        if receipts is None:
            return
        kinds, holders = _held([receipt["held"] for receipt in receipts.values()])
        whole = {
            "format": FORMAT,
            "nimg": self.nimg,
            "world_size": self._ranks.world_size(),
            **manifest,
            "kinds": kinds,
            "holders": holders,
            "files": {name: receipt["file"] for name, receipt in receipts.items()},
        }
        for name in receipts:
            (self._partial / name).with_suffix(_RECEIPT).unlink()
        write_text(self._partial / MANIFEST, json.dumps(sealed(whole), indent=1))
        fsync(self._partial)
        final = self._directory / self._tag
        if (number := other_format(final)) is not None:
            problem = f"has format {number} of another version, and is not overwritten"
            raise UserError(str(final), None, problem, "finish the run with that version, or start a new `out`")
        if final.exists():  # damaged: a run that resumed from an older tag reaches it again
            os.replace(final, self._directory / f"{self._tag}.damaged{PARTIAL}")
        os.replace(self._partial, final)
        fsync(self._directory)
        try:
            write_text(self._directory / "latest", self._tag + "\n")
            prune(self._directory, self._section, self.nimg, self._bad)
            note_saved(self._directory)
        except _FAILURES as error:
            text = "%s at %d images was saved, but older ones were not removed: %s"
            _log.warning(text, self._what, self.nimg, error)

    def _receipts(self) -> dict[str, dict[str, Any]] | None:
        """Wait for the receipts of all ranks, and return them by file; None if the save is abandoned."""
        found = {}
        for path in (self._partial / f"rank{rank:05d}.safetensors" for rank in range(self._ranks.world_size())):
            while not (receipt := path.with_suffix(_RECEIPT)).exists():
                if self._cancelled.wait(_POLL_SECONDS):
                    return None
                if not self._partial.is_dir():  # the run's directory was removed or renamed, with the receipts
                    raise FileNotFoundError(f"{self._partial} is gone")
            found[path.name] = json.loads(receipt.read_text())
        return found


def _by_kinds(parts: Iterable[StateShard]) -> dict[str, list[str]]:
    """Return the names of an entry's values, by their kinds, separated by spaces: most names have several."""
    kinds, names = defaultdict[str, set[str]](set), defaultdict[str, list[str]](list)
    for part in parts:
        kinds[part.name].add(part.kind)
    for name, own in kinds.items():
        names[" ".join(sorted(own))].append(name)
    return dict(names)


def _held(files: Sequence[Mapping[str, Mapping[str, list[str]]]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the kinds of each entry, and by value the numbers of the files that hold some of it."""
    kinds, numbers = defaultdict[str, set[str]](set), defaultdict[str, list[int]](list)
    for number, held in enumerate(files):
        for entry, by_kinds in held.items():
            kinds[entry].update(*map(str.split, by_kinds))
            for each, names in by_kinds.items():
                for kind, name in product(each.split(), names):
                    numbers[value_name(entry, kind, name)].append(number)
    return {e: sorted(kinds[e]) for e in sorted(kinds)}, {value: intervals(numbers[value]) for value in sorted(numbers)}


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Do the work in a thread that, unlike an executor's, does not keep the process alive."""
    task: Future[None] = Future()

    def run() -> None:
        try:
            work()
            task.set_result(None)
        except BaseException as error:
            task.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return task
