"""Terms of what a generator returns after its images, which enter its own passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import FunctionTerm, Term, due
from bigsgan.config import Recipe
from bigsgan.engines import MicroBatch
from bigsgan.monitor import Statistics


class OutputTerm(FunctionTerm):
    """A function of G's outputs, and maybe of its images, its input images and classes. D does not see the outputs."""

    of_outputs = True


class OutputLoss:
    """The sum of terms of an update, as a loss of one of G's passes."""

    def __init__(self, terms: Sequence[Term], recipe: Recipe, statistics: Statistics) -> None:
        """Take the terms that are due, and the recipe, which names what G reads and returns."""
        self._terms, self._statistics = terms, statistics
        self._inputs, self._outputs = recipe.generator_reads, recipe.outputs

    def __call__(
        self, images: Tensor, outputs: Sequence[Tensor], inputs: MicroBatch, targets: MicroBatch = ()
    ) -> Tensor:
        """Return the mean loss over this rank's samples of a micro-batch, a scalar.

        Args:
            images: (n, C, H, W).
            outputs: What G returns after them, each (n, ...).
            inputs: G's inputs: latents or images, labels (n,), times (n,) if it reads some, and seeds if it draws.
            targets: The real images (n, C, H, W), if G learns alone.
        """
        read = {"images": images, **dict(zip(self._inputs, inputs, strict=True))}
        read |= zip(self._outputs, outputs, strict=True)
        read |= zip(("real_images",), targets, strict=False)
        return torch.stack([term.loss(read, self._statistics) for term in self._terms]).sum()


def output_loss(terms: Iterable[Term], recipe: Recipe, update: int, statistics: Statistics) -> OutputLoss | None:
    """Return the loss of G's outputs in an update; None if no term reads them."""
    found = [term for term in due(terms, "generator", update) if term.of_outputs]
    return OutputLoss(found, recipe, statistics) if found else None
