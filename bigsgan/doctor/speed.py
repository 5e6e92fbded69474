"""Checks that the disk and the data are fast enough."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from bigsgan.data import build_training_dataset
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.doctor.recipes import checkpoint_bytes
from bigsgan.doctor.rows import LATEST, num_ranks, reports
from bigsgan.doctor.storage import directory_of
from bigsgan.draws import Draws
from bigsgan.errors import reason
from bigsgan.runtime.memory import size
from bigsgan.training.build import batch_slices, build_reals

LEAST_DISK_RATE = 20e6
"""Least bytes a second that all ranks must write together if no recipe tells the size of a checkpoint."""

MOST_CHECKPOINT_SECONDS = 600.0
"""Most time that all ranks together may take to write a checkpoint."""

_PIECE, _MOST_PIECES, _DISK_SECONDS = 32 << 20, 8, 5.0
_READING_SECONDS = 4.0


def disk(subject: Subject) -> Finding:
    """Write to the disk of ``out`` and read back, all ranks at once, each its share of 256 MiB or a little more."""
    directory = directory_of(subject.out)
    try:
        own = _write_and_read(directory / f".doctor-{uuid.uuid4().hex}", max(1, _MOST_PIECES // subject.ranks.size))
        problem = ""
    except OSError as error:
        own, problem = (0.0, 0.0), f"{directory} cannot be written: {reason(error, directory)}"
    by_rank = subject.ranks.gather(own)
    written, read = (sum(rates) for rates in zip(*by_rank, strict=True))
    numbers: dict[str, Any] = {"write_bytes_per_second": own[0], "read_bytes_per_second": own[1]}
    numbers |= {"all_write_bytes_per_second": written, "all_read_bytes_per_second": read}
    if problem:
        return failed(problem, "free some space, fix its permissions, or give another `out`", numbers)
    text = f"writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s in {directory}"
    remedy = "give an `out` on a faster file system"
    if subject.plan is not None:
        saved = checkpoint_bytes(subject.plan)
        seconds = numbers["checkpoint_seconds"] = saved / written
        text += f"; a checkpoint of {size(saved)} takes {seconds:.0f} s"
        if seconds > MOST_CHECKPOINT_SECONDS:
            return failed(f"{text}, more than {MOST_CHECKPOINT_SECONDS:.0f} s", remedy, numbers, -own[0])
    elif written < LEAST_DISK_RATE:
        return failed(f"{text}, less than {LEAST_DISK_RATE / 1e6:.0f} MB/s", remedy, numbers, -own[0])
    return passed(text, numbers, -own[0])


def _write_and_read(path: Path, most_pieces: int) -> tuple[float, float]:
    """Bytes a second of writing a file to the disk, and of reading it with none of it cached in memory."""
    piece = os.urandom(_PIECE)  # a file system may compress
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.unlink(path)  # now, so that no file stays however the process ends
        written, start = 0, time.perf_counter()
        while written < most_pieces * _PIECE and time.perf_counter() - start < _DISK_SECONDS:
            written += os.write(descriptor, piece)
            os.fdatasync(descriptor)
        writing = time.perf_counter() - start
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        read, start = 0, time.perf_counter()
        while time.perf_counter() - start < _DISK_SECONDS and (some := len(os.read(descriptor, _PIECE))):
            read += some
        return written / writing, read / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def data(subject: Subject) -> Finding:
    """Read real images as a run does, all ranks at once; compare with what updates took, if ``out`` has reports."""
    plan, start = subject.recipe_plan(), 0.0
    recipe, dataset, num = plan.recipe, build_training_dataset(plan.recipe.data), 0
    slices, cpu = batch_slices(plan, subject.ranks.rank)["discriminator"], torch.device("cpu")
    reals = build_reals(plan, "discriminator", slices, dataset, Draws(recipe.seed), cpu)
    try:
        if reals.reads:
            reals.next_phase()  # not timed: it starts processes
        subject.ranks.gather(None)
        start = time.perf_counter()
        while reals.reads and time.perf_counter() - start < _READING_SECONDS:
            num += sum(len(each.images) for each in reals.next_phase())
        # With a teacher, D's last stage reads once more what the first stage reads.
        counts = plan.placement("discriminator").stage(subject.ranks.rank) == 0
        rate = counts * num / (time.perf_counter() - start)
    finally:
        reals.close()
    rates = subject.ranks.gather(rate)
    alike = [row for row in reports(subject.out) if num_ranks(row) == subject.ranks.size]
    known = [row["images_per_second"] for row in alike if row.get("images_per_second")][-LATEST:]
    needed = recipe.objective.d_steps * statistics.median(known) if known else None
    numbers = {"images_per_second": rate, "all_images_per_second": sum(rates), "needed_images_per_second": needed}
    text = f"{sum(rates):.0f} images/s over all ranks"
    if needed is None:
        return passed(f"{text}; what updates need is not known before a run on as many ranks", numbers, -rate)
    if sum(rates) < needed:
        remedy = "raise data.num_workers, pack the images (`bigsgan data prepare`), or copy them to a local disk"
        return failed(f"{text}, updates of this run took {needed:.0f}", remedy, numbers, -rate)
    return passed(f"{text}, updates took {needed:.0f}", numbers, -rate)
