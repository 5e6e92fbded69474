"""The reference's penalties on D's gradient, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsgan.adversarial import SampleDraws
from bigsgan.config import Recipe


class Penalties:
    """Those of one micro-batch of a step of D."""

    def __init__(
        self,
        recipe: Recipe,
        judged: Callable[..., Tensor],
        draws: SampleDraws,
        place: tuple[int, int],
        positions: range,
    ) -> None:
        """Take D, the step's place in the run, and the micro-batch's positions in the batch."""
        self._objective, self._judged, self._draws, self._place = recipe.objective, judged, draws, place
        self._positions, self._batch = positions, recipe.batch

    def norm(self, name: str, x: Tensor, y: Sequence[Tensor], logits: Tensor) -> Tensor:
        """Return the mean of |grad|^2 at images, or of the squared slopes."""
        section, used = getattr(self._objective, name), self._used(name)
        if section.form == "exact":
            (g,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            return g[used].square().sum((1, 2, 3)).mean()
        e = self._drawn(self._draws.noise, name, x.shape[1:])
        x, y, logits = x[used], [each[used] for each in y], logits[used]
        perturbed = self._judged(x + section.sigma * e, *y)
        slopes = (perturbed - logits) / section.sigma
        if section.antithetic:
            slopes = (perturbed - self._judged(x - section.sigma * e, *y)) / (2 * section.sigma)
        return slopes.view(len(x), -1).sum(1).square().mean()

    def distance(self, real: Tensor, fake: Tensor, y: Sequence[Tensor]) -> Tensor:
        """Return the mean of (|grad| - 1)^2 between real and fake images."""
        name = "gradient_penalty"
        used, share = self._used(name), self._drawn(self._draws.uniform, name, (1, 1, 1))
        between = (share * real[used] + (1 - share) * fake[used]).detach().requires_grad_()
        logits = self._judged(between, *(each[used] for each in y))
        (g,) = torch.autograd.grad(logits.sum(), between, create_graph=True)
        return (g.flatten(1).norm(dim=1) - 1).square().mean()

    def _used(self, name: str) -> list[int]:
        """The numbers of the images that a penalty uses: those at every so many positions of the batch."""
        shrink = getattr(self._objective, name).batch_shrink
        return [number for number, position in enumerate(self._positions) if position % shrink == 0]

    def _drawn(self, draw: Any, name: str, shape: Sequence[int]) -> Tensor:
        """Draw for all images of the batch that a penalty uses; return what these have."""
        shrink = getattr(self._objective, name).batch_shrink
        found: Tensor = draw(name, self._place, range(self._batch // shrink), tuple(shape))
        return found[[self._positions[number] // shrink for number in self._used(name)]]
