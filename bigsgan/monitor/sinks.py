"""Files of reports: metrics.jsonl, one JSON object per line, and TensorBoard's event files."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import check_regular, writing


class JsonLines:
    """Appends one strict JSON object a report to a file, ``nimg`` first; what is not finite is written as null.

    Every line is handed to the system at once, so that a killed run loses none. Opening an existing file drops the
    line that a kill left half written, and the lines of images after ``resume_nimg``, which the resumed run reports
    anew.
    """

    def __init__(self, path: Path, resume_nimg: int) -> None:
        self._path = path
        with writing(path):
            if path.exists():
                check_regular(path)
                _keep_rows(path, resume_nimg)
            self._file = path.open("ab", buffering=0)
        self._pending = b""

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Append the metrics of a report as one line, after those that the disk had no room for.

        Raises:
            UserError: The disk is full; the line is kept for the next call, and the file ends in a whole one.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._pending += json.dumps({"nimg": nimg, **finite}, allow_nan=False).encode() + b"\n"
        with writing(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                view = memoryview(self._pending)
                while view:  # a call may write less than it is asked for
                    view = view[self._file.write(view) :]
            except OSError:
                self._file.truncate(end)
                raise
        self._pending = b""

    def rewind(self, nimg: int) -> None:
        """Drop the rows of images after ``nimg``, which stand last; that takes no room."""
        self._pending = b"".join(row for row in self._pending.splitlines(True) if _row_nimg(row) <= nimg)
        with writing(self._path), self._path.open("rb") as rows:
            kept = itertools.takewhile(lambda row: _row_nimg(row) <= nimg, rows)
            self._file.truncate(sum(map(len, kept)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep_rows(path: Path, resume_nimg: int) -> None:
    """Rewrite ``path`` with only its whole rows of at most ``resume_nimg`` images."""
    with replacing(path) as kept, path.open("rb") as old, kept.open("wb") as new:
        for line in old:
            if _row_nimg(line) <= resume_nimg:
                new.write(line.rstrip(b"\n") + b"\n")


def _row_nimg(line: bytes) -> float:
    """The images seen that a row is about; infinity for what is not a whole row."""
    try:
        nimg = json.loads(line)["nimg"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return nimg if isinstance(nimg, int | float) else math.inf


class TensorBoard:
    """Writes scalars and images for TensorBoard; it hides what an earlier process wrote after ``resume_nimg``.

    Its writer never writes again after the system has refused it once. A new one is opened then, at the next call.
    """

    def __init__(self, directory: Path, resume_nimg: int) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        # TensorBoard hides the purged step too, and the state at resume_nimg is the one that was resumed.
        self._purge_step: int | None = resume_nimg + 1
        with self._open():
            pass

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Add the metrics of a report, one series each."""
        with self._open() as writer:
            for tag, value in metrics.items():
                writer.add_scalar(tag, value, nimg)
            writer.flush()  # not only every two minutes, its default: a kill must not lose reports

    def add_image(self, tag: str, image: Tensor, nimg: int) -> None:
        """Add an image: uint8 (C, H, W) on the host, C being 1 (grey), 3 or 4."""
        with self._open() as writer:
            writer.add_image(tag, image, nimg)
            writer.flush()

    def rewind(self, nimg: int) -> None:
        """Hide what was written of images after ``nimg``, from the next call on."""
        self._purge_step = nimg + 1
        self.close()

    def close(self) -> None:
        """Write what is pending and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._directory), _quiet_threads():
                writer.close()

    @contextmanager
    def _open(self) -> Iterator[SummaryWriter]:
        """Give the writer, a new one where there is none; let go of it when it fails."""
        with writing(self._directory), _quiet_threads():
            try:
                if self._writer is None:
                    self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
                    self._purge_step = None
                yield self._writer
            except OSError:
                self._writer = None
                raise


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keep Python from printing what the system refuses to the writer's thread, which hands it to its caller too."""
    before = threading.excepthook

    def show(what: threading.ExceptHookArgs) -> None:
        if not issubclass(what.exc_type, OSError):
            before(what)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = before
