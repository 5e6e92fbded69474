"""Numbers that a recipe may leave to its data: their type, and where they must be given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic_core import core_schema

from bigsgan.config.sections import Section
from bigsgan.errors import UserError

AUTO = "auto"

_GIVEN_WITH = {"num_classes": ("multi_label", "condition_size", "missing_labels"), "image_channels": ("range",)}
"""Keys of ``data`` beside which a number cannot be left to the data."""


class FromData(int):
    """A number that a recipe leaves to its data, until that is read: meanwhile this one counts."""


@dataclass(frozen=True)
class OrAuto:
    """Lets a recipe write ``auto`` in place of an integer, which counts as ``meanwhile`` until the data is read."""

    meanwhile: int

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], core_schema.CoreSchema]) -> Any:
        def read(value: Any, number: Callable[[Any], int]) -> int:
            return FromData(self.meanwhile) if value == AUTO or isinstance(value, FromData) else number(value)

        written = core_schema.plain_serializer_function_ser_schema(
            lambda number: AUTO if isinstance(number, FromData) else number
        )
        return core_schema.no_info_wrap_validator_function(read, handler(kind), serialization=written)


def left_to_data(data: Section) -> list[str]:
    """Return the keys of the section ``data`` whose numbers are left to the data, and not read yet."""
    return [key for key in _GIVEN_WITH if isinstance(getattr(data, key), FromData)]


def check_left_to_data(data: Section, kinds: Collection[str]) -> None:
    """Refuse to leave numbers to data that does not tell them; data of some ``kinds`` does.

    Raises:
        UserError: One has to be given.
    """
    for key in left_to_data(data):
        kind: str = getattr(data, "kind")  # noqa: B009 - of a section that imports this module
        given = data.changed("data", _GIVEN_WITH[key]) if kind in kinds else [f"data.kind={kind}"]
        if given:
            problem, remedy = f"must be a number with {given[0]}", "give that of the data"
            raise UserError(f"data.{key}", AUTO, problem, remedy)
