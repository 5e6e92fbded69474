"""`bigsgan data encode`: makes latents of images with a user's autoencoder, on all ranks.

As in `bigsgan data prepare`, the work is split into parts of consecutive images; each becomes a tar shard with a
report. One rank computes a part, in batches that depend only on its images, so that the shards are the same for any
number of ranks. A second run skips parts that are complete and have their checksum.

Shapes: n images, C channels, H x W pixels.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from bigsgan.checkpoint.files import checksum
from bigsgan.config.origin import Origin
from bigsgan.data.conversion import Job, Result, in_order, job_of, read
from bigsgan.data.encoders import Encoder, open_encoder
from bigsgan.data.packed import write_tar
from bigsgan.data.prepare import (
    begin,
    check_destination,
    check_place,
    check_workers,
    naming_culprit,
    sum_up,
)
from bigsgan.data.prepared import describe
from bigsgan.data.shards import ABOUT_FILE, write_names
from bigsgan.data.source import open_source
from bigsgan.data.task import Task
from bigsgan.data.text_encoders import open_text_encoder, with_captions
from bigsgan.data.tokens import TOKENS
from bigsgan.errors import counted, shown
from bigsgan.images.codec import decode
from bigsgan.runtime import comm, memory
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.collective_errors import by_rank_zero
from bigsgan.runtime.ending import on_launched_ranks
from bigsgan.runtime.kernels import kernels
from bigsgan.runtime.paths import parse_json
from bigsgan.runtime.tf32 import tf32
from bigsgan.training.sampling import check_batch, smaller_batch

_log = logging.getLogger(__name__)


class Options(NamedTuple):
    """What to encode."""

    origin: Origin  # the images, and what makes them fit
    destination: Path  # directory of the shards
    codec: str  # the autoencoder; see `open_encoder`
    image_channels: int  # channels of the images, C
    batch: int  # images encoded at a time; the shards' bytes may depend on it
    keep_images: bool  # whether to keep the images beside their latents
    workers: int | None  # processes of each rank that read images; None for its share of the CPU's cores
    text_encoder: Path | None = None  # folder of what makes tokens of captions; None for none
    captions: str | None = None  # see `with_captions`
    max_tokens: int | None = None  # most tokens of a caption


def main(options: Options) -> int:
    """Encode images, and return the exit status. Every rank calls this."""

    def work() -> None:
        naming = memory.naming_remedy(f"with {counted(options.batch, 'image')} at a time", smaller_batch(options.batch))
        with naming, tf32(False), kernels(deterministic=True):
            _encode(options)

    return on_launched_ranks(work)


def _encode(options: Options) -> None:
    check_batch(options.batch)
    check_workers(1 if options.workers is None else options.workers)
    if comm.device().type == "cpu":
        torch.set_num_threads(1)  # the order of sums would depend on it, and it on the number of ranks
    encoder = open_encoder(options.codec, options.image_channels, options.origin.data.resolution, comm.device())
    if options.text_encoder is not None:
        encoder = encoder._replace(text=open_text_encoder(options.text_encoder, options.max_tokens, comm.device()))
    with ExitStack() as stack:
        task = by_rank_zero(comm, lambda: _planned(options, encoder, stack))
        reports = _checked_reports(task)
        left = [number for number in task.parts() if number not in reports]
        with naming_culprit(options.destination, options.workers):
            made = _encode_parts(task, left[comm.rank() :: comm.world_size()], encoder, options)
        for other in comm.gather_objects(made) or []:
            reports.update(other)
        if comm.rank() == 0:
            _finish(task, [reports[number] for number in task.parts()], encoder, options.origin)


def _planned(options: Options, encoder: Encoder, stack: ExitStack) -> Task:
    """Plan the work of all ranks and lock it against other jobs. Only rank 0 calls this."""
    with naming_culprit(options.destination, options.workers):
        check_place(options.destination, options.origin)
        more = {
            "image_channels": options.image_channels,
            "batch": options.batch,
            "keep_images": options.keep_images,
            "codec": encoder.codec["kind"] + str(encoder.codec.get("block", "")),
            **encoder.about,
            **options.origin.plan,
            **(encoder.text.plan if encoder.text else {}),
        }
        source = open_source(options.origin, _num_workers(options))
        if encoder.text is not None:
            source = with_captions(options.origin.data, source, options.captions)
        task = Task(source, options.destination, options.origin.data.fitting, "latents", more)
        check_destination(task)
        begin(task, stack)
        return task


def _checked_reports(task: Task) -> dict[int, dict[str, Any]]:
    """Reports of the complete parts by number, on all ranks, which share the work of verifying checksums."""
    found = {}
    for number in list(task.parts())[comm.rank() :: comm.world_size()]:
        archive = task.archive(number)
        try:
            report = parse_json(task.report(number).read_text())
            if archive is not None and report["sha256"] == checksum(archive):
                found[number] = report
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("part %d is made again: %s", number, error)
    each = comm.gather_objects(found)
    merged = {} if each is None else dict(itertools.chain.from_iterable(part.items() for part in each))
    reports: dict[int, dict[str, Any]] = comm.from_rank_zero(merged)
    return reports


def _encode_parts(task: Task, numbers: list[int], encoder: Encoder, options: Options) -> dict[int, dict[str, Any]]:
    """Write these parts, and return their reports."""
    parts = {number: part for number, part in task.parts().items() if number in set(numbers)}
    num = sum(map(len, parts.values()))
    if not num:
        return {}
    jobs = (_read_job(task, index, options) for part in parts.values() for index in part)
    with (  # in this order: the progress bar starts a thread, and processes should be forked before that
        in_order(read, jobs, min(_num_workers(options), num), task.source.images) as results,
        tqdm(total=num, unit="image", dynamic_ncols=True, disable=None if comm.rank() == 0 else True) as bar,
    ):
        return {number: _write_part(task, number, results, bar, encoder, options) for number in parts}


def _num_workers(options: Options) -> int:
    return comm.num_cores() if options.workers is None else options.workers


def _read_job(task: Task, index: int, options: Options) -> Job:
    job = Job(index, task.fitting, channels=options.image_channels, keeps=options.keep_images)
    return job_of(task.source.images, job)


def _write_part(
    task: Task, number: int, results: Iterator[Result], bar: tqdm, encoder: Encoder, options: Options
) -> dict[str, Any]:
    """Write one part, and its report."""
    report: dict[str, Any] = {"image_channels": options.image_channels, "unreadable": [], "values": [], "cut": 0}
    moments = np.zeros(3)  # the posterior's count, sum and sum of squares of numbers

    def members() -> Iterator[tuple[str, bytes]]:
        indices = iter(task.parts()[number])
        while batch := list(itertools.islice(indices, options.batch)):
            images = dict(zip(batch, (next(results) for _ in batch), strict=True))
            bar.update(len(batch))
            report["unreadable"] += [[index, image.problem] for index, image in images.items() if image.problem]
            report["values"] += [pair for image in images.values() for pair in image.values]
            readable = {index: image for index, image in images.items() if not image.problem}
            if not readable:
                continue
            latents = _encoded(list(readable.values()), encoder, options)
            moments[:] += _moments(latents, encoder)
            tokens: list[np.ndarray | None] = [None] * len(readable)
            if encoder.text is not None:
                tokens[:], num_cut = encoder.text.encode([task.source.captions[index] for index in readable])
                report["cut"] += num_cut
            for (index, image), numbers, each in zip(readable.items(), latents, tokens, strict=True):
                yield from _members(task, index, numbers, each, image.content)

    archive = task.archive(number)
    assert archive is not None
    with replacing(archive) as unfinished:
        write_tar(unfinished, members())
        report["sha256"] = checksum(unfinished)
    report["moments"] = moments.tolist()
    write_text(task.report(number), json.dumps(report) + "\n")
    return report


def _encoded(images: list[Result], encoder: Encoder, options: Options) -> np.ndarray:
    """Encode some images to latents."""
    shape = (len(images), options.image_channels, *options.origin.data.resolution)
    pixels = np.frombuffer(b"".join(image.pixels for image in images), np.uint8).reshape(shape)
    with torch.no_grad():
        made = encoder.encode(decode(torch.from_numpy(pixels.copy()).to(comm.device())))
    found: np.ndarray = made.float().cpu().numpy()
    return found


def _moments(latents: np.ndarray, encoder: Encoder) -> np.ndarray:
    means, channels = latents.astype(np.float64), encoder.codec.get("channels", latents.shape[1])
    means, stds = means[:, :channels], means[:, channels:]
    return np.array([means.size, means.sum(), np.square(means).sum() + np.square(stds).sum()])


def _members(
    task: Task, index: int, latents: np.ndarray, tokens: np.ndarray | None, image: bytes
) -> Iterator[tuple[str, bytes]]:
    for field, numbers in (("npy", latents), (TOKENS, tokens)):
        if numbers is not None:
            file = io.BytesIO()
            np.save(file, numbers)
            yield f"{task.name(index)}.{field}", file.getvalue()
    for suffix, content in task.source.member(index):
        yield f"{task.name(index)}{suffix}", content
    if image:
        yield f"{task.name(index)}.png", image


def _finish(task: Task, reports: list[dict[str, Any]], encoder: Encoder, origin: Origin) -> None:
    """Write a description beside the shards, and print one for the user."""
    made = sum_up(task, reports)
    shards = [Path(str(task.archive(number))).name for number in task.parts()]
    num, total, squares = (sum(report["moments"][i] for report in reports) for i in range(3))
    mean = total / num
    deviation = math.sqrt(max(squares / num - mean**2, 0.0))
    about = {
        "codec": {**{key: value for key, value in encoder.codec.items() if key != "path"}, **encoder.about},
        "resolution": task.fitting.size.value,
        "num_images": made.num_images,
        "mean": mean,
        "deviation": deviation,
        "sha256": {shard: report["sha256"] for shard, report in zip(shards, reports, strict=True)},
    }
    write_names(task.destination, task.source.class_names)
    write_text(task.destination / ABOUT_FILE, json.dumps(about, indent=2) + "\n")
    codec = dict(encoder.codec)  # latents whose codec has no scale get a standard deviation of 1
    if codec["kind"] != "diffusers" and deviation > 0:
        codec["scale"] = f"{1 / deviation:.4g}"
    data = {"kind": "latents", "root": task.destination, **origin.keys_of_vectors}
    if encoder.text is not None:
        (most, _), keys = encoder.text.size, {"condition_size": shown(encoder.text.size), "num_classes": 0}
        data = {"kind": "latents", "root": task.destination, **keys}
        if num_cut := sum(report["cut"] for report in reports):
            captions = counted(made.num_images, "caption")
            _log.warning("of %s, %d had more than %d tokens, and were cut", captions, num_cut, most)
    what = f"latents of {counted(made.num_images, 'image')}"
    describe(made, what, data, task.fitting, codec, "with captions" if encoder.text else None)
