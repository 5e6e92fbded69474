"""The labels of a sheet's columns, as a user asks for them: classes by number or name, or vectors."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.config.run_directory import SOME_LABELS
from bigsgan.data import build_dataset
from bigsgan.data.conditions import Conditions, read_vectors, some_conditions
from bigsgan.errors import UserError
from bigsgan.training.sampling import column_classes, column_labels

_log = logging.getLogger(__name__)


def open_conditions(run: Path, data: Data) -> Conditions:
    """Return what samples of a run are conditioned on: classes, the vectors that it keeps, or else those of the data.

    Raises:
        UserError: Neither can be read, or does not fit.
    """
    path = run / SOME_LABELS
    if data.has_vectors and os.path.isfile(path):
        return read_vectors(data, path, "--run")
    return some_conditions(data, build_dataset(data)) if data.has_vectors else range(max(data.num_classes, 1))


def labels_of_columns(
    data: Data, asked: Sequence[str] | None, num: int, conditions: Callable[[], Conditions], given: Path | None
) -> Tensor:
    """Return the label of each column, (columns,) int64 or (columns, K) float32.

    Args:
        data: The run's section.
        asked: As ``choose_columns`` reads it; several names or numbers of one image are joined by +.
        num: Number of images.
        conditions: Returns what ``open_conditions`` does.
        given: File with a vector for each column.

    Raises:
        UserError: A class does not exist, labels have more than classes, or there are more columns than ``num``.
    """
    if given is not None and (asked is not None or not data.has_vectors):
        needs = "cannot be combined with --classes" if asked else "needs a run whose labels are vectors"
        raise UserError("--conditions", None, needs, "remove the option")
    if not data.has_vectors:
        return torch.tensor(choose_columns(data, asked, num))
    if given is not None:
        found = torch.from_numpy(read_vectors(data, given, "--conditions"))
        _check_shown(len(found), num, "conditions")
        return found
    if asked is None:
        return column_labels(data, conditions())
    if data.condition_size or not data.num_classes:
        problem = "cannot tell the other numbers of a label"
        raise UserError("--classes", None, problem, "give the labels of columns by --conditions")
    several = [labels for part in asked for labels in _labels_of(data, part, num)]
    _check_shown(len(several), num, "classes")
    vectors = torch.zeros(len(several), data.condition_width)
    for vector, labels in zip(vectors, several, strict=True):
        vector[labels] = 1
    return vectors


def _labels_of(data: Data, part: str, num: int) -> list[list[int]]:
    """Return the classes of each column that a part of ``--classes`` asks for."""
    if "+" not in part or part in (data.class_names or []):
        return [[label] for label in choose_columns(data, [part], num)]
    if not data.multi_label:
        raise UserError("--classes", part, "must be one class for each column", "remove the +, or set data.multi_label")
    return [choose_columns(data, [word.strip() for word in part.split("+")], num)]


def _check_shown(columns: int, num: int, what: str) -> None:
    if columns > num:
        problem = f"must be at least {columns}, the number of {what}"
        raise UserError("--num", num, problem, f"give --num {columns} or more")


def choose_columns(data: Data, asked: Sequence[str] | None, num: int) -> list[int]:
    """The class of each column: those of ``asked``, else the first that fit; all 0 if there are no classes.

    Args:
        data: The run's section.
        asked: Names of classes, numbers such as 3, and ranges such as 200-209. A name goes before a number.
        num: Number of images.

    Raises:
        UserError: A class does not exist, or ``num`` images would not show every column.
    """
    num_classes = data.num_classes
    if asked is None:
        return column_classes(num_classes)
    if not num_classes:
        raise UserError("--classes", None, "needs a run with classes", "remove the option")
    numbered = [_numbered(data, part) for part in asked]
    for part in numbered:
        if part.stop > num_classes:
            problem = f"must be 0 to {num_classes - 1}, the classes of the run"
            raise UserError("--classes", part.stop - 1, problem, "give numbers in this range")
    _check_shown(sum(map(len, numbered)), num, "classes")
    return [label for part in numbered for label in part]


def _numbered(data: Data, name: str) -> range:
    """Return the class of a name, or those of a number or range, without expanding it."""
    names, ends = data.class_names or [], re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", name)
    if name in names:
        number = names.index(name)
        if ends and name != str(number):
            _log.warning("--classes: %s is the name of class %d, which is meant", name, number)
        return range(number, number + 1)
    if ends and int(ends[1]) <= int(ends[2] or ends[1]):
        return range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    close = difflib.get_close_matches(name, names, n=1)
    remedy = (
        f"did you mean {close[0]}?" if close else "give numbers and ranges such as 3,17,200-209, or names of the run"
    )
    detail = "" if names else "the run has no names of classes"
    raise UserError("--classes", name, "must be a class", remedy, detail)
