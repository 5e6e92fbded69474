"""`bigsgan data prepare`: images converted once, as training would each time, into a zip file, tar shards or a folder.

The work is cut into parts of consecutive images. Processes convert the images (conversion.py), and this one writes the
parts in order, so that every byte is the same whatever the number of processes. Each part has a report, written when
the part is complete, and the whole has a plan, so that a second run goes on where the first one ended.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import zipfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bigsgan.atomic import replacing, write_text
from bigsgan.config.run_directory import refuse_parts_of_runs
from bigsgan.data.conversion import GOES_ON, Converted, Job, conversions, unwritable
from bigsgan.data.datasets import some_names
from bigsgan.data.images import explain
from bigsgan.data.packed import write_tar, write_zip
from bigsgan.data.source import Source, list_source
from bigsgan.errors import UserError
from bigsgan.locking import hold

_log = logging.getLogger(__name__)

LARGEST_RESOLUTION = 2**14
_PART_SIZE = 1_000
_LOCK = ".lock"
_SHOWN_UNREADABLE = 10


class Prepared(NamedTuple):
    """What was made."""

    num_images: int
    num_classes: int
    """0 where the images are not in class folders."""
    image_channels: int
    """1 where all images are grey."""
    num_unreadable: int
    """Images that were left out."""
    unreadable: list[tuple[str, str]]
    """Their paths and what is wrong with them; empty where a zip file had been complete before."""


def main(source: Path, destination: Path, resolution: int, format: str, workers: int | None) -> None:
    """Prepare, then print what was made, what was left out, and how a recipe names it.

    Args:
        source: As of ``prepare``.
        destination: As of ``prepare``.
        resolution: As of ``prepare``.
        format: As of ``prepare``.
        workers: As of ``prepare``; None for one process on each CPU core that this one may use.

    Raises:
        UserError: As of ``prepare``.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    made = prepare(source, destination, resolution, format, workers)
    for path, reason in made.unreadable[:_SHOWN_UNREADABLE]:
        _log.warning("left out an image that cannot be read: %s: %s", path, reason)
    if made.num_unreadable:
        _log.warning("%d images cannot be read and were left out", made.num_unreadable)
    print(f"{destination}: {made.num_images} images of {made.num_classes or 'no'} classes")
    overrides = {
        "kind": format, "root": destination, "resolution": resolution, "image_channels": made.image_channels,
        "num_classes": made.num_classes,
    }  # fmt: skip
    print(*(shlex.quote(f"data.{key}={value}") for key, value in overrides.items()))


def prepare(source: Path, destination: Path, resolution: int, format: str, workers: int) -> Prepared:
    """Convert all images of a directory, or go on with that, and leave out those that cannot be read.

    Args:
        source: Directory with a sub-folder for each class, or with images that have no class.
        destination: What to make: a zip file, or the directory of the shards or of the class folders.
        resolution: R.
        format: ``zip``, ``tar`` or ``folder``.
        workers: Processes that convert.

    Raises:
        UserError: The source is no directory of images, or the destination is something else or of another source or
            resolution, or being made by another process; the disk is full or cannot be read or written; a process
            died; or a class has no readable image.
    """
    for field, number in (("--resolution", resolution), ("--workers", workers)):
        if number < 1:
            raise UserError(field, number, "is not positive", "give 1 or more")
    if resolution > LARGEST_RESOLUTION:
        raise UserError("--resolution", resolution, "is too large", f"give 1 to {LARGEST_RESOLUTION}")
    refuse_parts_of_runs(destination, "DST")
    task = _Task(list_source(source), destination, resolution, format)
    if destination.resolve().is_relative_to(source.resolve()):
        raise UserError("DST", str(destination), "lies in SRC, which has to stay as it is", "give another place")
    try:
        if format == "zip" and destination.is_file():
            return _already_joined(task)
        if format == "zip" or not _is_complete(task):
            with _begun(task):
                _convert_parts(task, workers)
                if format == "zip":
                    _join(task)
        made = _sum_up(task)
        if format == "zip":
            shutil.rmtree(task.work)  # not before the lock in there is let go of: NFS would leave a file behind
    except OSError as error:
        raise unwritable(destination, error) from error
    except BrokenProcessPool as error:
        remedy = f"lower it, or give the machine more memory, {GOES_ON}"
        raise UserError("--workers", workers, "but a process died", remedy) from error
    return made


@dataclass(frozen=True)
class _Task:
    """What is to be made, and where its parts lie until then."""

    source: Source
    destination: Path
    resolution: int
    format: str

    @property
    def work(self) -> Path:
        """Directory of the plan and the reports, and of the parts of a zip file."""
        if self.format == "zip":
            return self.destination.with_name(f"{self.destination.name}.parts")
        return self.destination / ".prepare"

    @property
    def plan_file(self) -> Path:
        return self.work / "plan.json"

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What parts have to have in common."""
        return {
            "format": self.format,
            "resolution": self.resolution,
            "part_size": _PART_SIZE,
            "source": self.source.digest(),
        }

    def parts(self) -> dict[int, range]:
        """Indices of the images of each part."""
        num = len(self.source.paths)
        firsts = range(0, num, _PART_SIZE)
        return {number: range(first, min(first + _PART_SIZE, num)) for number, first in enumerate(firsts)}

    def archive(self, number: int) -> Path | None:
        """Path of a part's archive, if it has one."""
        if self.format == "tar":
            return self.destination / f"shard-{number:06d}.tar"
        return self.work / f"part-{number:06d}.zip" if self.format == "zip" else None

    def report(self, number: int) -> Path:
        """Path of what is known of a part once it is complete."""
        return self.work / f"part-{number:06d}.json"

    def is_complete(self, number: int) -> bool:
        archive = self.archive(number)
        return self.report(number).is_file() and (archive is None or archive.is_file())

    def name(self, index: int) -> str:
        """Path of an image within the destination, without its ending. Names sort as the source does."""
        label = self.source.labels[index]
        folder = f"{self.source.classes[label]}/" if self.source.classes and self.format != "tar" else ""
        return f"{folder}{index:08d}"


@contextmanager
def _begun(task: _Task) -> Iterator[None]:
    """Keep other processes from making the same inside the block, and write the plan if it is not there.

    Raises:
        UserError: The destination is something else, was begun with another plan, or is being made.
        OSError: It cannot be written.
    """
    _check_destination(task)
    task.work.mkdir(parents=True, exist_ok=True)
    release = hold(task.work / _LOCK, "DST", str(task.destination), "wait for its end, or give another place")
    try:
        if not _check_destination(task):  # again, as it may have been begun and left since
            write_text(task.plan_file, json.dumps(task.plan, indent=2) + "\n")
        yield
    finally:
        release()


def _check_destination(task: _Task) -> bool:
    """Return whether the destination was begun with this plan; nothing else may be there.

    Raises:
        UserError: The destination is something else, or was begun with another plan.
        OSError: It cannot be read.
    """
    if task.destination.exists() and (task.format == "zip" or not task.destination.is_dir()):
        raise _not_ours(task)
    if task.plan_file.is_file():
        _check_plan(task, _read_json(task.plan_file.read_text()))
        return True
    # All that a run leaves which is killed before its plan stands.
    begun = {task.work.name, _LOCK, f"{task.plan_file.name}.tmp"}
    for directory in {task.work, task.work if task.format == "zip" else task.destination}:
        if directory.exists() and any(entry.name not in begun for entry in directory.iterdir()):
            raise _not_ours(task)
    return False


def _is_complete(task: _Task) -> bool:
    """Whether the destination has been made already, so that nothing is left to write.

    Raises:
        UserError: As of ``_check_destination``.
    """
    return _check_destination(task) and not _parts_left(task)


def _already_joined(task: _Task) -> Prepared:
    """Recognise a complete zip file by its comment, and remove the parts that it was made of."""
    try:
        with zipfile.ZipFile(task.destination) as archive:
            comment = _read_json(archive.comment.decode())
            num_images = len(archive.infolist())
    except (zipfile.BadZipFile, UnicodeDecodeError):
        raise _not_ours(task) from None
    if not isinstance(comment, dict) or "image_channels" not in comment:
        raise _not_ours(task)
    _check_plan(task, comment.get("plan"))
    shutil.rmtree(task.work, ignore_errors=True)
    num_unreadable = len(task.source.paths) - num_images
    return Prepared(num_images, len(task.source.classes), comment["image_channels"], num_unreadable, [])


def _check_plan(task: _Task, found: Any) -> None:
    if not isinstance(found, dict) or found.keys() != task.plan.keys():
        raise _not_ours(task)
    if found == task.plan:
        return
    key = next(key for key in task.plan if found[key] != task.plan[key])
    problem = f"was begun with {key.replace('_', ' ')} {found[key]}, and is asked for with {task.plan[key]}"
    if key == "source":
        problem = "was begun from other images than those of SRC now: some were changed, removed, added or renamed"
    raise _taken(task, problem)


def _not_ours(task: _Task) -> UserError:
    return _taken(task, "is there, and was not made by `bigsgan data prepare`")


def _taken(task: _Task, problem: str) -> UserError:
    both = task.format == "zip" and task.destination.name and task.work.exists()
    places = f"it and {task.work}" if both else "it"
    return UserError("DST", str(task.destination), problem, f"give another place, or delete {places} first")


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _convert_parts(task: _Task, workers: int) -> None:
    """Write the parts that are not there yet."""
    left = _parts_left(task)
    if not left:
        return
    if task.format == "folder":
        for name in task.source.classes:
            (task.destination / name).mkdir(exist_ok=True)
    num_left = sum(map(len, left.values()))
    num = len(task.source.paths)
    jobs = (_job(task, index) for part in left.values() for index in part)
    with (  # in this order: the bar has a thread, and processes are better forked without one
        conversions(jobs, min(workers, num_left)) as results,
        tqdm(total=num, initial=num - num_left, unit="image", dynamic_ncols=True, disable=None) as bar,
    ):
        for number, part in left.items():
            _write_part(task, number, part, results, bar)


def _parts_left(task: _Task) -> dict[int, range]:
    return {number: part for number, part in task.parts().items() if not task.is_complete(number)}


def _job(task: _Task, index: int) -> Job:
    out = str(task.destination / f"{task.name(index)}.png") if task.format == "folder" else None
    return Job(task.source.paths[index], task.resolution, out)


def _write_part(task: _Task, number: int, part: range, results: Iterator[Converted], bar: tqdm) -> None:
    report: dict[str, Any] = {"image_channels": 1, "unreadable": []}

    def members() -> Iterator[tuple[str, bytes]]:
        for index in part:
            converted = next(results)
            bar.update()
            if converted.problem:
                report["unreadable"].append([index, converted.problem])
                continue
            report["image_channels"] = max(report["image_channels"], converted.channels)
            yield f"{task.name(index)}.png", converted.content
            if task.format == "tar" and task.source.classes:
                yield f"{task.name(index)}.cls", str(task.source.labels[index]).encode()

    archive = task.archive(number)
    if archive is None:
        deque(members(), maxlen=0)  # the processes have written the files
    else:
        with replacing(archive) as unfinished:
            (write_tar if task.format == "tar" else write_zip)(unfinished, members())
    write_text(task.report(number), json.dumps(report) + "\n")


def _sum_up(task: _Task) -> Prepared:
    """Read the reports of all parts.

    Raises:
        UserError: A class has lost its last image.
    """
    reports = [json.loads(task.report(number).read_text()) for number in task.parts()]
    unreadable = dict(entry for report in reports for entry in report["unreadable"])
    source, num = task.source, len(task.source.paths)
    found = {source.labels[index] for index in range(num) if index not in unreadable}
    lost = [name for label, name in enumerate(source.classes) if label not in found]
    if lost or not found:
        problem = f"has class folders without a readable image{some_names(lost)}" if lost else "holds no readable image"
        first = next(index for index in unreadable if source.labels[index] not in found)
        raise UserError(
            "SRC",
            str(source.root),
            f"{problem}, such as {source.paths[first]} ({unreadable[first]})",
            f"repair or remove them, delete {task.work if task.format == 'zip' else task.destination}, and begin anew",
        )
    named = [(source.paths[index], reason) for index, reason in unreadable.items()]
    channels = max(report["image_channels"] for report in reports)
    return Prepared(num - len(named), len(source.classes), channels, len(named), named)


def _join(task: _Task) -> None:
    """Make one zip file of the parts, with the plan as its comment."""

    def members() -> Iterator[tuple[str, bytes]]:
        for number in task.parts():
            try:
                with zipfile.ZipFile(str(task.archive(number))) as part:
                    for info in part.infolist():
                        yield info.filename, part.read(info)
            except zipfile.BadZipFile as error:
                problem = f"is damaged: {explain(error)}"
                raise UserError("DST", str(task.archive(number)), problem, f"delete it, {GOES_ON}") from error

    comment = json.dumps({"plan": task.plan, "image_channels": _sum_up(task).image_channels}).encode()
    with replacing(task.destination) as unfinished:
        write_zip(unfinished, members(), comment)
