"""The type of a size in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import GetPydanticSchema
from pydantic_core import PydanticCustomError, core_schema

from bigsgan.config.sections import Pixels
from bigsgan.images.size import Size


def _sized(value: Any, pixels: Callable[[Any], int]) -> Size:
    if isinstance(value, Size):
        return value
    if not isinstance(value, list | tuple):
        return Size.of(pixels(value))
    if len(value) != 2:
        texts = {"problem": "must be one number, or a height and a width", "remedy": "give one, or two in brackets"}
        raise PydanticCustomError("unfit", "{problem}", texts)
    return Size(*map(pixels, value))


def _schema(_: object, handler: Callable[[Any], core_schema.CoreSchema]) -> core_schema.CoreSchema:
    written = core_schema.plain_serializer_function_ser_schema(lambda size: size.value)
    return core_schema.no_info_wrap_validator_function(_sized, handler(Pixels), serialization=written)


ImageSize = Annotated[Size, GetPydanticSchema(_schema)]
"""One number for a square, or a height and a width in brackets."""
