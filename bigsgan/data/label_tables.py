"""Reads CSV files of labels: a row for each image.

The first column has the image's path below the root; the others are a class, or the numbers of a label. Columns are
separated by commas, semicolons or tabs.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bigsgan.config.data import Data
from bigsgan.data.listing import is_image, plain_name
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import read_text

_MOST_BYTES = 1 << 30
_SEPARATORS = ",;\t"


def read_table(data: Data, images: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the label of each image in ``data.labels_file``, and the names of classes if it tells them.

    A first row is a head unless its path is one of ``images``, or has the suffix of one. One column of texts names
    classes, which are numbered by these names in order. With ``data.multi_label``, the names of the first columns are
    those of classes; -1 counts as 0, as CelebA writes it. Empty cells are a missing label.

    Raises:
        UserError: It cannot be read, or is not of this form.
    """
    path = Path(str(data.labels_file))

    def refused(problem: str, remedy: str = "give rows of a path and numbers, with commas") -> UserError:
        return UserError("data.labels_file", str(path), problem, remedy)

    in_archive = os.path.isfile(str(data.root))
    csv.field_size_limit(_MOST_BYTES)  # a row of many numbers is one field with another separator
    try:
        lines = read_text(path, _MOST_BYTES).removeprefix("\ufeff").splitlines()
        for separator in _SEPARATORS:
            rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=separator) if row]
            if any(plain_name(row[0], in_archive) in images for row in rows):
                break
        else:
            remedy = f"write an image's path below data.root there, such as {min(images)}"
            raise refused("has no image in its first column", remedy)
    except (OSError, ValueError, csv.Error) as error:
        raise refused(f"cannot be read: {reason(error, path)}") from None
    first = plain_name(rows[0][0], in_archive)
    head = [] if first in images or is_image(first, arrays=True) else rows.pop(0)
    if uneven := [row for row in rows if not len(row) == len(head or rows[0]) > 1]:
        raise refused(f"has rows of other lengths than its first one, or of one column, such as {','.join(uneven[0])}")
    cells = {plain_name(name, in_archive): row for name, *row in rows}
    if len(cells) != len(rows):
        raise refused("has two rows for one image", "give one for each")
    filled = [name for name, row in cells.items() if any(row)]
    odd = [name for name in filled if _numbers(cells[name]) is None]
    if odd and len(odd) == len(filled) and len(rows[0]) == 2 and not data.condition_size:
        numbers, classes = numbered([text or None for (text,) in cells.values()])
        return dict(zip(cells, numbers, strict=True)), classes
    if odd:
        kind = "an empty cell" if "" in cells[odd[0]] else "a cell that is no number"
        raise refused(f"has {kind} in the row of {odd[0]}")
    listed = {name: _label(data, _numbers(row)) for name, row in cells.items()}
    return listed, head[1 : 1 + data.num_classes] if data.multi_label else []


def numbered(texts: Sequence[str | None]) -> tuple[list[int | None], list[str]]:
    """Return the class of each name, None for None, and the names in order, which number the classes."""
    names = sorted({text for text in texts if text is not None})
    numbers = {name: number for number, name in enumerate(names)}
    return [None if text is None else numbers[text] for text in texts], names


def _numbers(cells: Sequence[str]) -> list[float] | None:
    """Return a row's numbers, or None if some cell is none."""
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return None


def _label(data: Data, numbers: list[float] | None) -> Any:
    if numbers is None:
        return None
    if data.multi_label:
        marks = [0.0 if number == -1 else number for number in numbers[: data.num_classes]]
        return marks + numbers[data.num_classes :]
    return numbers if len(numbers) > 1 or data.condition_size else numbers[0]
