"""The labels of a sheet's columns, as a user asks for them: classes by number or name, or vectors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.data.conditions import Conditions, conditions_of
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import check_regular
from bigsgan.training.sampling import column_classes, column_labels


def open_conditions(data: Data, given: Path | None = None) -> Conditions:
    """Return what samples are conditioned on: classes, or the vectors of a file, or of the data if none is given.

    Raises:
        UserError: The file or the data cannot be read, or does not fit; or a file is given for classes.
    """
    if given is not None:
        if not data.has_vectors:
            problem, remedy = "needs a run whose labels are vectors", "remove the option"
            raise UserError("--conditions", None, problem, f"{remedy}, or give --classes" * bool(data.num_classes))
        return _vectors(data, given)
    if not data.has_vectors:
        return conditions_of(data, None)
    try:
        return conditions_of(data, build_dataset(data))
    except UserError as error:
        remedy = f"{error.remedy}; or give vectors of {data.condition_width} numbers (--conditions)"
        raise UserError(error.field, error.value, error.problem, remedy, error.detail) from None


def _vectors(data: Data, path: Path) -> np.ndarray:
    """Read vectors (M, K) from a .npy file, or from text with commas."""
    width, remedy = data.condition_width, "give a .npy file (M, K), or a line of numbers with commas for each vector"
    try:
        check_regular(path)
        is_array = path.suffix == ".npy"
        found = np.load(path, allow_pickle=False) if is_array else np.loadtxt(path, delimiter=",", ndmin=2)
        found = np.atleast_2d(found).astype(np.float32)
    except (OSError, ValueError, TypeError) as error:
        raise UserError("--conditions", str(path), f"cannot be read: {reason(error, path)}", remedy) from None
    if found.ndim != 2 or found.shape[1] != width or not len(found):
        problem = f"must hold vectors of {width} numbers, got the shape {found.shape}"
        raise UserError("--conditions", str(path), problem, remedy)
    if not np.isfinite(found).all():
        raise UserError("--conditions", str(path), "has numbers that are not finite", "correct them")
    return found


def labels_of_columns(
    data: Data, asked: Sequence[range | str] | None, num: int, conditions: Conditions, given: bool = False
) -> Tensor:
    """Return the label of each column, (columns,) int64 or (columns, K) float32.

    Args:
        data: The run's section.
        asked: Classes or their names; several names or numbers of one image are joined by +. None for all that fit.
        num: Number of images.
        conditions: From ``open_conditions``.
        given: Whether the user gave these, and each is a column.

    Raises:
        UserError: A class does not exist, labels have more than classes, or there are more columns than ``num``.
    """
    if not data.has_vectors:
        return torch.tensor(choose_columns(data, asked, num))
    if asked is None:
        found = torch.from_numpy(np.array(conditions)) if given else column_labels(data, conditions)
        _check_shown(len(found), num, "conditions")
        return found
    if given or data.condition_size or not data.num_classes:
        problem = "cannot be combined with --conditions" if given else "cannot tell the other numbers of a label"
        raise UserError("--classes", None, problem, "remove the option" if given else "give --conditions")
    several = [labels for part in asked for labels in _labels_of(data, part, num)]
    _check_shown(len(several), num, "classes")
    vectors = torch.zeros(len(several), data.condition_width)
    for vector, labels in zip(vectors, several, strict=True):
        vector[labels] = 1
    return vectors


def _labels_of(data: Data, part: range | str, num: int) -> list[list[int]]:
    """Return the classes of each column that a part of ``--classes`` asks for."""
    names = data.class_names or []
    if not isinstance(part, str) or part in names:
        return [[label] for label in choose_columns(data, [part], num)]
    words = [range(int(word), int(word) + 1) if word.isdecimal() else word for word in map(str.strip, part.split("+"))]
    return [choose_columns(data, words, num)]


def _check_shown(columns: int, num: int, what: str) -> None:
    if columns > num:
        problem = f"must be at least {columns}, the number of {what}"
        raise UserError("--num", num, problem, f"give --num {columns} or more")


def choose_columns(data: Data, asked: Sequence[range | str] | None, num: int) -> list[int]:
    """The class of each column: those of ``asked``, else the first that fit; all 0 if there are no classes.

    Raises:
        UserError: A class does not exist, or ``num`` images would not show every column.
    """
    num_classes = data.num_classes
    if asked is None:
        return column_classes(num_classes)
    if not num_classes:
        raise UserError("--classes", None, "needs a run with classes", "remove the option")
    numbered = [_numbered(data, part) if isinstance(part, str) else part for part in asked]
    for part in numbered:
        if part.stop > num_classes:
            problem = f"must be 0 to {num_classes - 1}, the classes of the run"
            raise UserError("--classes", part.stop - 1, problem, "give numbers in this range")
    _check_shown(sum(map(len, numbered)), num, "classes")
    return [label for part in numbered for label in part]


def _numbered(data: Data, name: str) -> range:
    """Return the class of a name."""
    names = data.class_names or []
    if name in names:
        return range(names.index(name), names.index(name) + 1)
    close = difflib.get_close_matches(name, names, n=1)
    remedy = (
        f"did you mean {close[0]}?" if close else "give numbers and ranges such as 3,17,200-209, or names of the run"
    )
    detail = "" if names else "the run has no names of classes"
    raise UserError("--classes", name, "must be a class", remedy, detail)
