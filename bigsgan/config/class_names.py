"""Names of classes: those that a recipe gives, and those that its data has."""

from __future__ import annotations

from collections.abc import Sequence

from bigsgan.config.data import LONGEST_NAME, MOST_NAMES, Data
from bigsgan.errors import UserError

_MOST_BYTES = 2**17


def with_class_names(data: Data, found: Sequence[str]) -> Data:
    """Return the section with the data's own names of classes, unless it has names.

    The classes' own numbers are no names, nor are names that two classes share, or more of them than a recipe's file
    should hold.

    Raises:
        UserError: It has the data's names in another order.
    """
    if not data.num_classes or len(found) != data.num_classes or not _are_names(found):
        return data
    given = data.class_names
    if given is None:
        return data.model_copy(update={"class_names": list(found)})
    if given != list(found) and set(given) == set(found):
        number = next(i for i in range(len(given)) if given[i] != found[i])
        problem = f"must have {found[number]!r} as class {number}, as the data has"
        raise UserError("data.class_names", given[number], problem, "remove it, or give the names in this order")
    return data


def are_own_numbers(names: Sequence[str]) -> bool:
    """Return whether each name is the number of its class, with or without zeros before it, which tells nothing."""
    return all(name.isdecimal() and name.lstrip("0") == str(number or "") for number, name in enumerate(names))


def _are_names(found: Sequence[str]) -> bool:
    try:
        num_bytes = sum(len(name.encode()) for name in found)
    except UnicodeEncodeError:  # of a folder
        return False
    fit = all(0 < len(name) <= LONGEST_NAME and name.isprintable() for name in found)
    are_few = len(set(found)) == len(found) <= MOST_NAMES and num_bytes <= _MOST_BYTES
    return fit and are_few and not are_own_numbers(found)
