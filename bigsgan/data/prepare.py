"""`bigsgan data prepare`: converts images once, instead of in each training run, to a zip file, tar shards or a folder.

The work is split into parts of consecutive images. Worker processes convert the images (conversion.py), and this
process writes the parts in order, so that the output is the same for any number of workers. Each part has a report,
written when the part is complete, and the whole has a plan, so that a second run resumes where the first one ended.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bigsgan.config.origin import Origin
from bigsgan.config.run_directory import refuse_parts_of_runs
from bigsgan.data.conversion import Job, Result, convert, in_order, job_of, unwritable
from bigsgan.data.listing import LABELS_FILE, some_names
from bigsgan.data.originals import RESUMES
from bigsgan.data.packed import write_tar, write_zip
from bigsgan.data.prepared import Prepared, describe
from bigsgan.data.shards import write_names
from bigsgan.data.source import channels_of, check_folders, open_source
from bigsgan.data.task import SHARDED, Task
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.reading import used_range
from bigsgan.images.wide import outside_range, range_text
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.locking import hold
from bigsgan.runtime.paths import parse_json

_LOCK = ".lock"


def main(origin: Origin, destination: Path, format: str, workers: int | None) -> None:
    """Run ``prepare``, then print the result, the skipped images, and the overrides of a recipe that uses it.

    Without ``workers``, there is one process for each available CPU core.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    made, data, what = prepare(origin, destination, format, workers), origin.data, "image"
    keys: dict[str, Any] = {"kind": format, "root": destination}
    if data.has_inputs:
        keys |= {"kind": "side_by_side", "input_side": "left", "input_channels": made.image_channels}
        what = "pair"
    keys |= {} if data.range is None else {"range": range_text(data.range)}
    describe(made, counted(made.num_images, what), keys | origin.keys_of_vectors, data.fitting)


def prepare(origin: Origin, destination: Path, format: str, workers: int) -> Prepared:
    """Convert all images of a source, or resume doing so; skip unreadable ones. Pairs become images of both halves.

    With ``data.range``, images become .npy files (H, W, C) of float32 in the units of the data, of as many channels as
    the first ones have, unless ``data.image_channels`` is given.

    Args:
        origin: The source, and what makes its images fit.
        destination: A zip file, or the directory of the shards or of the class folders.
        format: ``zip``, ``tar`` or ``folder``; of pairs, ``folder``.
        workers: Number of worker processes.

    Raises:
        UserError: The source has no images; the destination is something else, was made from another
            source or with another resolution or fit, or is in use by another process; the disk is full, or cannot be
            read or written; a process died; or a class has no readable image.
    """
    check_workers(workers)
    check_place(destination, origin)
    if origin.data.has_inputs and format != "folder":
        problem = f"must be folder with --kind {origin.data.kind}"
        raise UserError("--format", format, problem, "give --format folder", "it is read with data.kind=side_by_side")
    source, data = open_source(origin, workers), origin.data
    channels = None  # each image keeps its own
    if data.range is not None:
        is_given = "image_channels" in origin.keys and "image_channels" not in data.left_to_data
        channels = data.image_channels if is_given else channels_of(source)
    task = Task(source, destination, data.fitting, format, origin.plan, data.range, channels)
    if format not in SHARDED:
        check_folders(task.source)
    with naming_culprit(destination, workers):
        if format == "zip" and destination.is_file():
            return _already_joined(task)
        if not check_destination(task) or format == "zip" or parts_left(task):
            with ExitStack() as stack:
                begin(task, stack)
                _convert_parts(task, workers)
                if format == "zip":
                    _join(task)
        made = _sum_up(task)
        if format == "tar":
            write_names(destination, task.source.class_names)
        for name, content in _listing(task) if format == "folder" else []:
            write_text(destination / name, content.decode())
        if format == "zip":
            shutil.rmtree(task.work)  # after the lock in it is released: otherwise NFS would leave a file behind
        return made


def check_place(destination: Path, origin: Origin) -> None:
    """Refuse a destination in a run's directory or in the source.

    Raises:
        UserError: It lies there.
    """
    refuse_parts_of_runs(destination, "DST")
    for root in (origin.data.root, origin.data.input_root):
        if root and destination.resolve().is_relative_to(Path(root).resolve()):
            raise UserError("DST", str(destination), "must lie outside SRC", "give another destination")


@contextmanager
def naming_culprit(destination: Path, workers: int | None) -> Iterator[None]:
    """Turn errors of the destination's file system, and a worker's death, into messages.

    Raises:
        UserError: One of these has happened inside the block.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(destination, error) from error
    except BrokenProcessPool as error:
        remedy = f"give a lower number, or give the machine more memory, {RESUMES}"
        raise UserError("--workers", workers, "cannot be kept up: a worker process died", remedy) from error


def check_workers(workers: int) -> None:
    """Refuse a number of workers that is out of range.

    Raises:
        UserError: There would be none.
    """
    if workers < 1:
        raise UserError("--workers", workers, "must be at least 1", "give a larger number")


def check_destination(task: Task) -> bool:
    """Return whether the destination was started with this plan; refuse another plan's, or anything else."""
    if task.destination.exists() and (task.format == "zip" or not task.destination.is_dir()):
        raise _not_ours(task)
    if task.plan_file.is_file():
        _check_plan(task, _read_json(task.plan_file.read_text()))
        return True
    # Left by a process that was killed before it wrote the plan.
    begun = {task.work.name, _LOCK, f"{task.plan_file.name}.tmp"}
    for directory in {task.work, task.work if task.format == "zip" else task.destination}:
        if directory.exists() and any(entry.name not in begun for entry in directory.iterdir()):
            raise _not_ours(task)
    return False


def begin(task: Task, stack: ExitStack) -> None:
    """Lock the destination until ``stack`` ends, and write the plan if it has none.

    Raises:
        UserError: Another process has locked it, or ``check_destination`` refuses it.
    """
    task.work.mkdir(parents=True, exist_ok=True)
    remedy = "wait until it has ended, or give another destination"
    stack.callback(hold(task.work / _LOCK, "DST", str(task.destination), remedy))
    if not check_destination(task):  # again: another process may have started and stopped meanwhile
        write_text(task.plan_file, json.dumps(task.plan, indent=2) + "\n")


def _already_joined(task: Task) -> Prepared:
    """Return the result stored in the comment of a complete zip file, and remove its parts."""
    try:
        with zipfile.ZipFile(task.destination) as archive:
            comment = _read_json(archive.comment.decode())
            num = len(set(archive.namelist()) - {LABELS_FILE})
    except (zipfile.BadZipFile, UnicodeDecodeError):
        raise _not_ours(task) from None
    if not isinstance(comment, dict) or "image_channels" not in comment:
        raise _not_ours(task)
    _check_plan(task, comment.get("plan"))
    shutil.rmtree(task.work, ignore_errors=True)
    num_unreadable, ignored = len(task.source.labels) - num, task.source.ignored.text()
    channels, size = comment["image_channels"], task.source.label_size
    return Prepared(num, len(task.source.classes), channels, num_unreadable, [], ignored, label_size=size)


def _check_plan(task: Task, found: Any) -> None:
    if not isinstance(found, dict):
        raise _not_ours(task)
    found, wanted = ({"fit": "crop", "truncated": "skip", "keys": {}, **each} for each in (found, task.plan))
    if found.keys() != wanted.keys():
        raise _not_ours(task)
    if found == wanted:
        return
    key = next(key for key in wanted if found[key] != wanted[key])
    problem = f"holds work with {key.replace('_', ' ')} {found[key]}, not {wanted[key]}"
    if key == "source":
        problem = "holds work on other images than SRC has now: some were changed, removed, added or renamed"
    raise _taken(task, problem)


def _not_ours(task: Task) -> UserError:
    return _taken(task, f"exists, and was not made by `bigsgan data {task.command}`")


def _taken(task: Task, problem: str) -> UserError:
    both = task.format == "zip" and task.destination.name and task.work.exists()
    places = f"it and {task.work}" if both else "it"
    return UserError("DST", str(task.destination), problem, f"give another destination, or delete {places} first")


def _read_json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return {}


def _convert_parts(task: Task, workers: int) -> None:
    """Write the parts that are not complete."""
    left = parts_left(task)
    if not left:
        return
    if task.format == "folder":
        for name in task.source.classes:
            (task.destination / name).mkdir(exist_ok=True)
    num_left = sum(map(len, left.values()))
    num = len(task.source.labels)
    jobs = (_job(task, index) for part in left.values() for index in part)
    with (  # in this order: the progress bar starts a thread, and processes should be forked before
        in_order(convert, jobs, min(workers, num_left), task.source.images) as results,
        tqdm(total=num, initial=num - num_left, unit="image", dynamic_ncols=True, disable=None) as bar,
    ):
        for number, part in left.items():
            _write_part(task, number, part, results, bar)


def parts_left(task: Task) -> dict[int, range]:
    """Return the parts that are not complete."""
    return {number: part for number, part in task.parts().items() if not task.is_complete(number)}


def _job(task: Task, index: int) -> Job:
    out = str(task.destination / f"{task.name(index)}{task.suffix}") if task.format == "folder" else None
    return job_of(task.source.images, Job(index, task.fitting, out, task.image_channels))


def _write_part(task: Task, number: int, part: range, results: Iterator[Result], bar: tqdm) -> None:
    report: dict[str, Any] = {"image_channels": 1, "unreadable": [], "values": []}

    def members() -> Iterator[tuple[str, bytes]]:
        for index in part:
            converted = next(results)
            bar.update()
            if converted.problem:
                report["unreadable"].append([index, converted.problem])
                continue
            report["image_channels"] = max(report["image_channels"], converted.channels)
            report["values"] += converted.values
            yield f"{task.name(index)}{task.suffix}", converted.content
            for suffix, content in task.source.member(index) if task.format == "tar" else []:
                yield f"{task.name(index)}{suffix}", content

    archive = task.archive(number)
    if archive is None:
        deque(members(), maxlen=0)  # the worker processes write the files
    else:
        with replacing(archive) as unfinished:
            (write_tar if task.format == "tar" else write_zip)(unfinished, members())
    write_text(task.report(number), json.dumps(report) + "\n")


def _reports(task: Task) -> list[dict[str, Any]]:
    return [parse_json(task.report(number).read_text()) for number in task.parts()]


def _listing(task: Task) -> list[tuple[str, bytes]]:
    """Return dataset.json with the vectors of the images that were converted; nothing where labels are classes."""
    if task.source.vectors is None:
        return []
    left = {index for report in _reports(task) for index, _ in report["unreadable"]}
    each = enumerate(task.source.vectors.tolist())
    labels = [[f"{task.name(index)}{task.suffix}", vector] for index, vector in each if index not in left]
    about = {"labels": labels} | ({"class_names": task.source.names} if task.source.names else {})
    return [(LABELS_FILE, json.dumps(about).encode())]


def _sum_up(task: Task) -> Prepared:
    """Read the reports of all parts, and combine them."""
    return sum_up(task, _reports(task))


def sum_up(task: Task, reports: Sequence[dict[str, Any]]) -> Prepared:
    """Combine the reports of all parts; refuse a class without a readable image."""
    unreadable = dict(entry for report in reports for entry in report["unreadable"])
    source, num = task.source, len(task.source.labels)
    found = {source.labels[index] for index in range(num) if index not in unreadable}
    given = set(source.labels)  # a part of a data set in archives may lack some classes
    lost = [name for label, name in enumerate(source.classes) if label in given - found]
    if lost or not found:
        problem = f"has class folders without readable images{some_names(lost)}"
        first = next(index for index in unreadable if source.labels[index] not in found)
        made = task.work if task.format == "zip" else task.destination
        remedy = f"repair or remove them, delete {made}, and start again"
        detail = f"such as {source.images.name(first)}: {unreadable[first]}"
        raise UserError("SRC", str(source.root), problem if lost else "contains no readable image", remedy, detail)
    named = [(source.images.name(index), why) for index, why in unreadable.items()]
    channels = max(report["image_channels"] for report in reports)
    noted = [(low, high) for report in reports for low, high in report.get("values", ())]
    values = used_range(noted) if task.values is None else outside_range(noted, task.values)
    values = f"of {counted(len(noted), 'image')}, {values}" if values and task.values else values
    counts = num - len(named), len(source.classes), channels, len(named)
    return Prepared(*counts, named, source.ignored.text(), values, source.label_size)


def _join(task: Task) -> None:
    """Join the parts into one zip file, with the plan as its comment."""

    def members() -> Iterator[tuple[str, bytes]]:
        for number in task.parts():
            try:
                with zipfile.ZipFile(str(task.archive(number))) as part:
                    for info in part.infolist():
                        yield info.filename, part.read(info)
            except zipfile.BadZipFile as error:
                problem = f"is damaged: {reason(error)}"
                raise UserError("DST", str(task.archive(number)), problem, f"delete it, {RESUMES}") from error
        yield from _listing(task)

    comment = json.dumps({"plan": task.plan, "image_channels": _sum_up(task).image_channels}).encode()
    with replacing(task.destination) as unfinished:
        write_zip(unfinished, members(), comment)
