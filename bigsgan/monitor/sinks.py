"""Where reports are kept: one JSON object a line in metrics.jsonl, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from bigsgan.atomic import replacing
from bigsgan.errors import UserError
from bigsgan.paths import check_regular


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write ``path`` (disk full, no permission) into a message for the user."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise UserError(
            str(path), None, problem, "make room or allow writing there, or choose another place"
        ) from error


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
            self._file = path.open("a", encoding="utf-8")

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Append the metrics of a report as one line."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with writing(self._path):
            self._file.write(json.dumps({"nimg": nimg, **finite}, allow_nan=False) + "\n")
            self._file.flush()

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
        return json.loads(line)["nimg"]
    except (ValueError, TypeError, KeyError):
        return math.inf


class TensorBoard:
    """Writes scalars and images for TensorBoard; it hides what an earlier process wrote after ``resume_nimg``."""

    def __init__(self, directory: Path, resume_nimg: int) -> None:
        self._directory = directory
        with writing(directory):
            # TensorBoard hides the purged step too, and the state at resume_nimg is the one that was resumed.
            self._writer = SummaryWriter(str(directory), purge_step=resume_nimg + 1)

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Add the metrics of a report, one series each."""
        with writing(self._directory):
            for tag, value in metrics.items():
                self._writer.add_scalar(tag, value, nimg)
            self._writer.flush()  # not only every two minutes, its default: a kill must not lose reports

    def add_image(self, tag: str, image: Tensor, nimg: int) -> None:
        """Add an image: uint8 (C, H, W) on the host, C being 1 (grey), 3 or 4."""
        with writing(self._directory):
            self._writer.add_image(tag, image, nimg)
            self._writer.flush()

    def close(self) -> None:
        """Write what is pending and close the event file."""
        with writing(self._directory):
            self._writer.close()
