"""Converts image files to PNG files of one size, in worker processes.

Shapes: C channels (1 grey, 3 RGB), R pixels a side.
"""

from __future__ import annotations

import errno
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

import torch
from PIL import Image
from torch import Tensor

from bigsgan.errors import UserError, reason
from bigsgan.images.reading import CorruptImage, image_tensor, noting_values, open_image, values_of
from bigsgan.images.size import Fitting
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import check_regular

RESUMES = "then run the same command again, which resumes"
"""End of a remedy's text."""

_J = TypeVar("_J")

_AHEAD = 4  # images in flight for each process, so that none waits for a slow one

_FAULTS_OF_IMAGES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EINVAL)
"""Errors of one file, not of the disk. EINVAL is raised for a pipe instead of a file."""


class Job(NamedTuple):
    """One image to convert."""

    path: str
    fitting: Fitting
    out: str | None  # file to write, unless it exists; None to return its content


class Result(NamedTuple):
    """The result for one image."""

    content: bytes = b""  # of a PNG file; empty if it is not wanted, was written to a file, or is unreadable
    channels: int = 1  # C
    problem: str = ""  # why the image is unreadable; empty if it is readable
    pixels: bytes = b""  # uint8 (C, H, W), if they are wanted
    values: Sequence[tuple[int, int]] = ()  # lowest and highest, if the image has more than 8 bits


def convert(job: Job) -> Result:
    """Convert one image.

    Raises:
        UserError: The disk fails.
    """
    if job.out and os.path.exists(job.out):
        with Image.open(job.out) as written:
            channels = len(written.getbands())
        return Result(channels=channels, values=values_of(job.path))
    try:
        with noting_values() as values:
            pixels, channels = _pixels(job.path, None, job.fitting, None)
    except CorruptImage as error:
        return Result(problem=error.reason)
    content = _png(pixels)
    if not job.out:
        return Result(content, channels, values=values)
    try:
        with replacing(Path(job.out)) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise unwritable(Path(job.out), error) from error
    return Result(channels=channels, values=values)


def _pixels(path: str, content: bytes | None, fitting: Fitting, channels: int | None) -> tuple[Tensor, int]:
    """Read an image, and return it as uint8 (C, H, W), with C.

    If ``channels`` is None, C is the image's own number. If ``content`` is None, the file is read.

    Raises:
        CorruptImage: The image is unreadable.
        UserError: The disk fails.
    """
    if content is None:
        try:
            check_regular(path)
            content = Path(path).read_bytes()
        except OSError as error:
            raise unreadable(path, error) from error
    image = open_image(path, io.BytesIO(content))
    if channels is None:
        # Greyscale files stay greyscale, which is exact for recipes of either kind; all others become RGB.
        channels = 1 if image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I") else 3
    return image_tensor(image, path, fitting, channels), channels


def _png(pixels: Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy()).save(file, "PNG")  # (H, W, 3) or (H, W)
    return file.getvalue()


class ReadJob(NamedTuple):
    """One image to read."""

    path: str
    fitting: Fitting
    channels: int  # C
    keep: bool  # whether to return the content of a PNG file too
    content: bytes | None = None  # of the image's file, if it was read from an archive
    problem: str = ""  # why it could not be read from there; empty if it could


def read(job: ReadJob) -> Result:
    """Read one image's pixels.

    Raises:
        UserError: The disk fails.
    """
    if job.problem:
        return Result(problem=job.problem)
    try:
        with noting_values() as values:
            pixels, channels = _pixels(job.path, job.content, job.fitting, job.channels)
    except CorruptImage as error:
        return Result(problem=error.reason)
    return Result(_png(pixels) if job.keep else b"", channels, pixels=pixels.numpy().tobytes(), values=values)


def _start_process() -> None:
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
def in_order(work: Callable[[_J], Result], jobs: Iterator[_J], workers: int) -> Iterator[Iterator[Result]]:
    """Work in ``workers`` processes, ahead of time; yield an iterator over the results in the order of the jobs.

    Raises:
        UserError: The disk fails.
        BrokenProcessPool: A process died.
    """
    pool = ProcessPoolExecutor(workers, initializer=_start_process)

    def submit(num: int) -> list[Future[Result]]:
        return [pool.submit(work, job) for job in itertools.islice(jobs, num)]

    def take() -> Iterator[Result]:
        while pending:
            yield pending.popleft().result()
            pending.extend(submit(1))

    try:
        pending = deque(submit(_AHEAD * workers))
        yield take()
    finally:
        pool.shutdown(cancel_futures=True)


def unreadable(path: str, error: OSError) -> CorruptImage | UserError:
    """Return the error to raise after an error in reading an image: that image's fault, or the disk's."""
    if error.errno in _FAULTS_OF_IMAGES:
        return CorruptImage(path, reason(error, path))
    return UserError("SRC", path, f"cannot be read: {reason(error, path)}", f"fix the disk, {RESUMES}")


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error that the destination's file system refuses to write."""
    remedy = f"free space, or fix its permissions, {RESUMES}"
    return UserError("DST", str(path), f"cannot be written: {reason(error, path)}", remedy)
