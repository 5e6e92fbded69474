"""What D returns after its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class JudgedOutputs(NamedTuple):
    """D's outputs of an image, which lie behind its logits in one tensor (n, P + E)."""

    names: Sequence[str] = ()
    sizes: Callable[[], Sequence[int]] = tuple  # returns how many numbers each has

    def logits(self, judged: Tensor) -> Tensor:
        """Return the logits, (n, P), or (n,) where D returns nothing else."""
        return judged[:, : judged.shape[1] - sum(self.sizes())] if self.names else judged

    def read(self, segment: str, judged: Tensor) -> dict[str, Tensor]:
        """Return what terms may read of a segment, by name: its logits, and each output as (n, E_i)."""
        found = {f"{segment}_logits": self.logits(judged)}
        if not self.names:
            return found
        sizes = self.sizes()
        outputs = judged[:, -sum(sizes) :].split(list(sizes), dim=1)
        return found | {f"{segment}_{name}": each for name, each in zip(self.names, outputs, strict=True)}


def mean_of(**read: Tensor) -> Tensor:
    """Return the mean over samples of the one output that a term reads, a scalar."""
    (output,) = read.values()
    return output.mean()


LOGITS_ALONE = JudgedOutputs()
