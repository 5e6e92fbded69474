"""Destinations of reports: metrics.jsonl, metrics.csv and TensorBoard's event files; wandb_run.py has another."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from bigsgan.config.run_directory import CSV_HEADER, EVENT_FILES
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import check_regular, parse_json, writing
from bigsgan.table import finite

CHARTS = {
    "losses": ("^loss/(generator|discriminator)$", "^penalty/"),
    "real and fake": ("^logits/(real|fake)$", "^accuracy/(real|fake)$"),
    "both networks": ("^grad_norm/", "^spectral_norm/", "^lr/", "^skipped/"),
}
"""TensorBoard's charts with several curves: patterns of their names, by group, in the order in which they are shown."""


_AXIS = "The step is the number of images seen."

_MOST_UNWRITTEN = 10_000
"""Reports that TensorBoard catches up when there is room again."""


class Sink(Protocol):
    """Takes reports after ``nimg`` images. Raises UserError if they cannot be written."""

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Add the metrics of a report."""

    def add_image(self, tag: str, image: Tensor, path: Path, nimg: int) -> None:
        """Add an image: uint8 (C, H, W) on the host, where C is 1 (grey), 3 or 4; ``path`` is its PNG file."""

    def rewind(self, nimg: int) -> None:
        """Drop or hide reports after ``nimg`` images."""

    def restore(self) -> None:
        """Write again what was removed, as far as it is known."""

    def close(self) -> None:
        """Write all pending reports."""


class Rows:
    """Appends the rows of a report to a file, which holds no images.

    Every report is passed to the system at once, so that a killed run loses none. Opening an existing file drops a row
    that a kill left half written, and the rows after ``resume_nimg`` images, as the resumed run reports these again.
    """

    header = b""

    def __init__(self, path: Path, resume_nimg: int) -> None:
        self._path = path
        with writing(path):
            if path.exists():
                check_regular(path)
                self._keep_rows(resume_nimg)
            self._file = path.open("a+b", buffering=0)
            self._pending = b"" if self._file.tell() else self.header

    def encode(self, metrics: Mapping[str, float], nimg: int) -> bytes:
        """Return the rows of a report, each with its line end."""
        raise NotImplementedError

    def row_nimg(self, row: bytes) -> float:
        """Return the images seen at a row's report; infinity if the row is not whole."""
        raise NotImplementedError

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Append earlier rows for which the disk had no room, and the rows of a report.

        Raises:
            UserError: The disk is full. The rows are kept for the next call, and the file ends with a whole row.
        """
        self._pending += self.encode(metrics, nimg)
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

    def add_image(self, tag: str, image: Tensor, path: Path, nimg: int) -> None:
        """Do nothing."""

    def rewind(self, nimg: int) -> None:
        """Drop the rows after ``nimg`` images, which are the last ones; this needs no disk space."""
        self._pending = b"".join(row for row in self._pending.splitlines(True) if self.row_nimg(row) <= nimg)
        with writing(self._path):
            kept = itertools.takewhile(lambda row: self.row_nimg(row) <= nimg, self._all().splitlines(True))
            self._file.truncate(sum(map(len, kept)))

    @property
    def is_displaced(self) -> bool:
        """Whether the path does not lead to the file any more: it, or its directory, was removed or renamed."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return True

    @property
    def is_replaced(self) -> bool:
        """Whether the path leads to other rows than these."""
        with suppress(OSError):
            return not self._written().startswith(self._path.read_bytes())
        return False

    def restore(self) -> None:
        """Write the rows again, if the path does not lead to their file any more; append to other rows there.

        Raises:
            UserError: The file cannot be written.
        """
        if self.is_displaced:
            with writing(self._path):
                if not self.is_replaced:
                    with replacing(self._path) as unfinished:
                        unfinished.write_bytes(self._written())
                self._file.close()
                self._file = self._path.open("a+b", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _written(self) -> bytes:
        """Return what the open file holds; nothing where a server has let go of a removed file."""
        try:
            return self._all()
        except OSError:
            return b""

    def _all(self) -> bytes:
        self._file.seek(0)
        return self._file.read()

    def _keep_rows(self, resume_nimg: int) -> None:
        """Rewrite the file with only its whole rows of at most ``resume_nimg`` images."""
        with replacing(self._path) as kept, self._path.open("rb") as old, kept.open("wb") as new:
            for row in old:
                if self.row_nimg(row) <= resume_nimg:
                    new.write(row.rstrip(b"\n") + b"\n")


class JsonLines(Rows):
    """One strict JSON object for each report, ``nimg`` first; non-finite numbers are written as null."""

    def encode(self, metrics: Mapping[str, float], nimg: int) -> bytes:
        """Return one row."""
        return json.dumps(finite({"nimg": nimg, **metrics}), allow_nan=False).encode() + b"\n"

    def row_nimg(self, row: bytes) -> float:
        """Return the row's ``nimg``; a row that can be parsed is whole, with or without its line end."""
        try:
            nimg = parse_json(row)["nimg"]
        except (ValueError, TypeError, KeyError):
            return math.inf
        return nimg if isinstance(nimg, int | float) else math.inf

    def reports(self) -> Iterator[tuple[dict[str, float], int]]:
        """Yield the numbers of each report, and the images seen."""
        for row in self._written().splitlines():
            report = parse_json(row)
            nimg = report.pop("nimg")
            yield {name: math.nan if value is None else value for name, value in report.items()}, nimg


class CSV(Rows):
    """A row for each number: ``nimg,name,value``, with all digits; non-finite numbers are nan, inf or -inf.

    A table with a column for each name would need more columns when a new name comes, such as an alarm's.
    """

    header = CSV_HEADER

    def encode(self, metrics: Mapping[str, float], nimg: int) -> bytes:
        """Return a row for each metric."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows((nimg, name, value) for name, value in metrics.items())
        return text.getvalue().encode()

    def row_nimg(self, row: bytes) -> float:
        """Return the row's ``nimg``; without its line end it is not whole, as the beginning of a value is one too."""
        nimg, *others = row.split(b",")
        if row == self.header:
            return -math.inf
        return int(nimg) if nimg.isdigit() and len(others) == 2 and row.endswith(b"\n") else math.inf


class TensorBoard:
    """Writes scalars and images for TensorBoard, and hides reports of earlier processes after ``resume_nimg``.

    TensorBoard's writer never writes again once the system has refused a write. The next call opens a new writer.
    """

    def __init__(self, directory: Path, resume_nimg: int) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._unwritten = deque[tuple[dict[str, float], int]](maxlen=_MOST_UNWRITTEN)
        # TensorBoard also hides the purged step itself; the reports at resume_nimg stay.
        self._purge_step: int | None = resume_nimg + 1
        with self._open():
            pass

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Add earlier reports for which there was no room, and the metrics of a report, each as its own series."""
        self._unwritten.append((dict(metrics), nimg))
        plugin = SummaryMetadata.PluginData(plugin_name="scalars")  # without which TensorBoard drops the description
        about = SummaryMetadata(summary_description=_AXIS, data_class=DATA_CLASS_SCALAR, plugin_data=plugin)
        with self._open() as writer:
            assert writer.file_writer is not None  # which is open
            for each, step in self._unwritten:
                values = [Summary.Value(tag=tag, simple_value=value, metadata=about) for tag, value in each.items()]
                writer.file_writer.add_summary(Summary(value=values), step)
            writer.flush()  # by default it flushes every two minutes, but a kill must not lose reports
        self._unwritten.clear()

    def add_text(self, tag: str, text: str, nimg: int) -> None:
        """Add a text in Markdown."""
        with self._open() as writer:
            writer.add_text(tag, text, nimg)
            writer.flush()

    def add_charts(self) -> None:
        """Say which curves the dashboard of custom scalars shows on one chart, over the images seen."""
        layout = {
            group: {f"{_title(pattern)} over images seen": ["Multiline", [pattern]] for pattern in patterns}
            for group, patterns in CHARTS.items()
        }
        with self._open() as writer:
            writer.add_custom_scalars(layout)
            writer.flush()

    def add_image(self, tag: str, image: Tensor, path: Path, nimg: int) -> None:
        """Add an image."""
        with self._open() as writer:
            writer.add_image(tag, image, nimg)
            writer.flush()

    def rewind(self, nimg: int) -> None:
        """Hide reports after ``nimg`` images, from the next call on."""
        while self._unwritten and self._unwritten[-1][1] > nimg:
            self._unwritten.pop()
        self._purge_step = nimg + 1
        self.close()

    def restore(self) -> None:
        """Begin a new event file, if the old one was removed; the images so far are lost."""
        if not self.is_there:
            self.close()

    @property
    def is_there(self) -> bool:
        """Whether there are event files."""
        return any(self._directory.glob(f"{EVENT_FILES}*"))

    def close(self) -> None:
        """Write all pending reports and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._directory), _quiet_threads():
                writer.close()

    @contextmanager
    def _open(self) -> Iterator[SummaryWriter]:
        """Yield the writer, a new one if there is none; drop it if it fails."""
        with writing(self._directory), _quiet_threads():
            try:
                if self._writer is None:
                    self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
                    self._purge_step = None
                yield self._writer
            except OSError:
                self._writer = None
                raise


def _title(pattern: str) -> str:
    """Return the readable part of a pattern: the name before the slash."""
    return pattern.removeprefix("^").partition("/")[0].replace("_", " ")


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keep Python from printing the writer thread's OSErrors, which the writer's caller gets too."""
    before = threading.excepthook

    def show(what: threading.ExceptHookArgs) -> None:
        if not issubclass(what.exc_type, OSError):
            before(what)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = before
