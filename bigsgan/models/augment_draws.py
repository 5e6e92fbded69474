"""The random numbers of augmentations: each transformation of each sample draws from a stream of its own.

Shapes: N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bigsgan.models import noise

_FIRST_STREAM = 0xADA00
# The position is the number of the stream: new names go to the end, or a resumed run would draw other numbers.
_NAMES = (
    *("flip", "quarter_turns", "shift", "scale", "rotation_before", "stretch", "rotation_after", "translation"),
    *("brightness", "contrast", "luma_flip", "hue", "saturation", "band0", "band1", "band2", "band3"),
    *("noise", "grain", "cutout"),
    *("diff_brightness", "diff_saturation", "diff_contrast", "diff_translation", "diff_cutout", "diff_flip"),
)
# Two streams a name: the strength, and whether the transformation acts at all.
_PLACES = {name: 2 * i for i, name in enumerate(_NAMES)}
_STREAMS = range(_FIRST_STREAM, _FIRST_STREAM + 2 * len(_NAMES))
_NUMBERS = 2
"""Numbers of each stream that are drawn together; few transformations need more."""


class AugmentationDraws:
    """Draws for one batch of samples in the images' type; they only depend on the seeds (N,) int64.

    Small draws are cut out of one drawing of all streams, as each operation on a GPU is a launch.
    """

    def __init__(self, seeds: Tensor, dtype: torch.dtype) -> None:
        self.seeds, self.dtype = seeds, dtype
        # Not a cached_property, whose lock before Python 3.12 breaks the graph of torch.compile.
        self._kept: dict[str, Tensor] = {}

    def uniform(self, name: str, *shape: int) -> Tensor:
        """Return uniform numbers in (0, 1): (N, *shape)."""
        return self._drawn("uniform", name, shape)

    def normal(self, name: str, *shape: int) -> Tensor:
        """Return standard normal numbers: (N, *shape)."""
        return self._drawn("normal", name, shape)

    def gate(self, name: str) -> Tensor:
        """Return uniform numbers in (0, 1) that decide whether a transformation acts: (N,)."""
        return self._of_all_streams("uniform")[:, _PLACES[name] + 1, 0]

    def _drawn(self, kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        num, place = math.prod(shape), _PLACES[name]
        if num > _NUMBERS:
            drawn = noise.draw(self.seeds, _STREAMS[place : place + 1], num, kind)[:, 0]
        else:  # equal to a drawing of its own, as two normal numbers come from one word
            drawn = self._of_all_streams(kind)[:, place, :num]
        return drawn.reshape(-1, *shape).to(self.dtype)

    def _of_all_streams(self, kind: str) -> Tensor:
        if kind not in self._kept:
            self._kept[kind] = noise.draw(self.seeds, _STREAMS, _NUMBERS, kind)
        return self._kept[kind]

    def chosen(self, name: str, probability: Tensor, value: Tensor, otherwise: float) -> Tensor:
        """Return ``value`` (N, ...) for a share ``probability`` (1,) of the samples, and ``otherwise`` for the rest."""
        acts = self.gate(name) < probability
        return torch.where(acts.view(-1, *(1 for _ in value.shape[1:])), value, otherwise)

    def factor(self, name: str, probability: Tensor, std: float) -> Tensor:
        """Return powers of 2, with normal exponents of ``std``, for a share of the samples, 1 for the rest: (N,)."""
        return self.chosen(name, probability, torch.exp2(std * self.normal(name)), 1)
