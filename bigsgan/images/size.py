"""Height and width of images and feature maps, and what makes images fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Size:
    """Pixels of an image or feature map; it unpacks as height and width."""

    height: int
    width: int

    @classmethod
    def of(cls, value: Size | int | list[int] | tuple[int, int]) -> Size:
        """Return the size that is written as one number, of a square, or as a height and a width."""
        if isinstance(value, Size):
            return value
        return cls(value, value) if isinstance(value, int) else cls(*value)

    def __iter__(self) -> Iterator[int]:
        return iter((self.height, self.width))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    @property
    def value(self) -> int | list[int]:
        """As a recipe has it: one number for a square, or height and width."""
        return self.height if self.is_square else [self.height, self.width]

    @property
    def text(self) -> str:
        """As a sentence or an override has it: one number for a square, or both in brackets."""
        return str(self.value).replace(" ", "")

    @property
    def is_square(self) -> bool:
        """Whether the sides are equally long."""
        return self.height == self.width

    @property
    def shorter(self) -> int:
        """Length of the shorter side."""
        return min(self)

    @property
    def longer(self) -> int:
        """Length of the longer side."""
        return max(self)

    @property
    def num_pixels(self) -> int:
        """Pixels in all."""
        return self.height * self.width

    @property
    def nominal(self) -> int:
        """The power of two that the shorter side reaches: of a square's tables, in networks that double a small map."""
        return 1 << (self.shorter.bit_length() - 1)

    def is_multiple_of(self, factor: int) -> bool:
        """Whether both sides are."""
        return not self.height % factor and not self.width % factor

    def exceeds(self, other: Size) -> bool:
        """Whether the size holds another, and one side at least is longer."""
        return self != other and self.height >= other.height and self.width >= other.width

    def over(self, factor: int) -> Size:
        """Return the size with both sides divided, and rounded down."""
        return Size(self.height // factor, self.width // factor)

    def times(self, factor: int) -> Size:
        """Return the size with both sides multiplied."""
        return Size(self.height * factor, self.width * factor)

    def nearest_multiple_of(self, factor: int) -> Size:
        """Return the size whose sides are the nearest multiples of a number, and not 0."""
        return Size(*(max(1, (2 * side + factor) // (2 * factor)) * factor for side in self))


Fit = Literal["crop", "pad", "stretch"]
_FITTED = {"crop": "cropped to", "pad": "padded with black to", "stretch": "stretched to"}


class Fitting(NamedTuple):
    """What makes an image fit: the size that it gets, and how, which ``Data.fit`` tells."""

    size: Size
    how: Fit = "crop"

    @property
    def text(self) -> str:
        """What becomes of images."""
        return f"{_FITTED[self.how]} {self.size}"
