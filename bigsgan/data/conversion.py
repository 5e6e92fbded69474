"""Converts images to PNG files of one size, or with ``data.range`` to .npy files, in worker processes.

Shapes: C channels (1 grey, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan.data.datasets import Label
from bigsgan.data.originals import RESUMES, Originals, OutsideOriginals
from bigsgan.errors import UserError, reason
from bigsgan.images.npz import array_header
from bigsgan.images.reading import CorruptImage, noting_values
from bigsgan.images.size import Fitting
from bigsgan.images.wide import ARRAYS
from bigsgan.runtime.atomic import replacing

_J = TypeVar("_J")
_R = TypeVar("_R")

_AHEAD = 4  # images in flight for each process, so that none waits for a slow one

_originals: Originals | None = None
"""What this worker process reads."""


class Job(NamedTuple):
    """One image to convert."""

    number: int  # of the image
    fitting: Fitting
    out: str | None = None  # file to write, unless it exists; None to return its content
    channels: int | None = None  # C; None for the image's own
    content: bytes | None = None  # what only the process that makes jobs can read
    problem: str = ""  # why it could not be read there; empty if it could
    keeps: bool = True  # whether to return the content of a file


def job_of(originals: Originals, job: Job) -> Job:
    """Return a job with the image's content, if only this process can read it.

    Raises:
        UserError: The disk fails.
    """
    try:
        return job._replace(content=originals.content(job.number))
    except CorruptImage as error:
        return job._replace(problem=error.reason)


class Result(NamedTuple):
    """The result for one image."""

    content: bytes = b""  # of a PNG or .npy file; empty if it is not wanted, was written to a file, or is unreadable
    channels: int = 1  # C
    problem: str = ""  # why the image is unreadable; empty if it is readable
    pixels: bytes = b""  # uint8 (C, H, W), if they are wanted
    values: Sequence[tuple[float, float]] = ()  # lowest and highest, if the image has more than 8 bits or a range


def convert(job: Job) -> Result:
    """Convert one image.

    Raises:
        UserError: The disk fails.
    """
    assert _originals is not None
    if job.out and os.path.exists(job.out):
        return Result(channels=_channels_of(job.out), values=_originals.values(job.number))
    found = _read(job)
    if found.problem or not job.out:
        return found
    try:
        with replacing(Path(job.out)) as unfinished:
            unfinished.write_bytes(found.content)
    except OSError as error:
        raise unwritable(Path(job.out), error) from error
    return found._replace(content=b"")


def read(job: Job) -> Result:
    """Read one image's pixels.

    Raises:
        UserError: The disk fails.
    """
    return _read(job, with_pixels=True)


def _read(job: Job, with_pixels: bool = False) -> Result:
    assert _originals is not None
    if job.problem:
        return Result(problem=job.problem)
    try:
        with noting_values() as values:
            pixels, channels = _originals.pixels(job.number, job.content, job.fitting, job.channels)
    except CorruptImage as error:
        return Result(problem=error.reason)
    content = _file(pixels) if job.keeps else b""
    return Result(content, channels, pixels=pixels.numpy().tobytes() if with_pixels else b"", values=values)


def _file(pixels: Tensor) -> bytes:
    file, array = io.BytesIO(), pixels.permute(1, 2, 0).numpy()  # (H, W, C)
    if pixels.is_floating_point():
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    else:
        Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(file, "PNG")
    return file.getvalue()


def _channels_of(path: str) -> int:
    """Return C of a file that was written."""
    if path.endswith(ARRAYS):
        with open(path, "rb") as file:
            return array_header(file)[0][2]
    with Image.open(path) as written:
        return len(written.getbands())


def label_of(index: int) -> Label | str | None:
    """Return the label of a sample of other code; see ``OutsideOriginals.label``."""
    assert isinstance(_originals, OutsideOriginals)
    return _originals.label(index)


def _start_process(originals: Originals) -> None:
    global _originals
    _originals = originals
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends its workers
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process is killed, instead of waiting forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def in_order(
    work: Callable[[_J], _R], jobs: Iterator[_J], workers: int, originals: Originals
) -> Iterator[Iterator[_R]]:
    """Work in ``workers`` processes, ahead of time; yield an iterator over the results in the order of the jobs.

    The processes inherit ``originals``.

    Raises:
        UserError: The disk fails.
        BrokenProcessPool: A process died.
    """
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_start_process, initargs=(originals,)
    )

    def submit(num: int) -> list[Future[_R]]:
        return [pool.submit(work, job) for job in itertools.islice(jobs, num)]

    def take() -> Iterator[_R]:
        while pending:
            yield pending.popleft().result()
            pending.extend(submit(1))

    try:
        pending = deque(submit(_AHEAD * workers))
        yield take()
    finally:
        pool.shutdown(cancel_futures=True)


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error that the destination's file system refuses to write."""
    remedy = f"free space, or fix its permissions, {RESUMES}"
    return UserError("DST", str(path), f"cannot be written: {reason(error, path)}", remedy)
