"""Numbers that a recipe may leave to its data: their types, and where they must be given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError, core_schema

from bigsgan.config.sections import Section
from bigsgan.errors import UserError
from bigsgan.images.size import Size

AUTO = "auto"

_GIVEN_WITH: dict[str, tuple[str, ...]] = {
    "num_classes": ("multi_label", "condition_size", "missing_labels"),
    "image_channels": (),
    "range": (),
    "resolution": ("crop_from",),
}
"""Keys of ``data`` that may be left to the data, and those beside which they cannot."""

_NUMBERS = {
    "num_classes": "the number of classes, or 0 to train without them",
    "image_channels": "1 for grey or 3 for colour, or what images of data.range have",
    "range": "the values of black and of white",
    "resolution": "the pixels of a side, or height and width",
}
"""What these numbers are."""


class FromData(int):
    """A number that a recipe leaves to its data, until that is read: meanwhile this one counts."""


class ListFromData(list[float]):
    """Numbers that a recipe leaves to its data, until that is read: meanwhile these count."""


class SizeFromData(Size):
    """A size that a recipe leaves to its data, until that is read: meanwhile this one counts, the largest of all."""

    @property
    def written(self) -> str:
        """As a recipe has it."""
        return f"{AUTO} {self.text}"


_LEFT = (FromData, ListFromData, SizeFromData)


@dataclass(frozen=True)
class OrAuto:
    """Lets a recipe write ``auto`` in place of an integer, or of a list of numbers.

    It counts as ``meanwhile`` until the data is read.
    """

    meanwhile: int | tuple[float, ...]

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], core_schema.CoreSchema]) -> Any:
        def read(value: Any, given: Callable[[Any], Any]) -> Any:
            if not (isinstance(value, _LEFT) or (isinstance(value, str) and value == AUTO)):
                return given(value)
            return FromData(self.meanwhile) if isinstance(self.meanwhile, int) else ListFromData(self.meanwhile)

        written = core_schema.plain_serializer_function_ser_schema(
            lambda value: AUTO if isinstance(value, _LEFT) else value
        )
        return core_schema.no_info_wrap_validator_function(read, handler(kind), serialization=written)


@dataclass(frozen=True)
class SizeOrAuto:
    """Lets a recipe write ``auto`` and the largest size in place of a size."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], core_schema.CoreSchema]) -> Any:
        def read(value: Any, given: Callable[[Any], Size]) -> Size:
            if isinstance(value, SizeFromData) or not isinstance(value, str):
                return given(value) if not isinstance(value, SizeFromData) else value
            first, _, largest = value.partition(" ")
            if first == AUTO and largest.isdecimal():
                return SizeFromData(*given(int(largest)))
            problem = "must be one number, a height and a width, or auto and the largest side"
            texts = {"problem": problem, "remedy": "give one such as 64, [48, 64] or 'auto 64'"}
            raise PydanticCustomError("unfit", "{problem}", texts)

        written = core_schema.plain_serializer_function_ser_schema(
            lambda size: size.written if isinstance(size, SizeFromData) else size.value
        )
        return core_schema.no_info_wrap_validator_function(read, handler(kind), serialization=written)


def left_to_data(data: Section) -> list[str]:
    """Return the keys of the section ``data`` whose numbers are left to the data, and not read yet."""
    return [key for key in _GIVEN_WITH if isinstance(getattr(data, key), _LEFT)]


def check_left_to_data(data: Section, kinds: Collection[str], files: Collection[str]) -> None:
    """Refuse to leave numbers to data that does not tell them; data of some ``kinds`` does.

    A range, and the channels and sizes of data that has one, are told by those of ``files`` alone.

    Raises:
        UserError: One has to be given.
    """
    for key in left_to_data(data):
        kind: str = getattr(data, "kind")  # noqa: B009 - of a section that imports this module
        is_wide = key != "num_classes" and getattr(data, "range") is not None  # noqa: B009
        tells = kind in (files if is_wide else kinds)
        given = data.changed("data", _GIVEN_WITH[key]) if tells else [f"data.kind={kind}"]
        if given:
            what = {"range": "two numbers", "resolution": "a size"}.get(key, "a number")
            remedy = f"set data.{key} to {_NUMBERS[key]}"
            value = getattr(data, key)
            written = value.written if isinstance(value, SizeFromData) else AUTO
            raise UserError(f"data.{key}", written, f"must be {what} with {given[0]}", remedy)
