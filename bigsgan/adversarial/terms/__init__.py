"""The terms of the losses: parts beside the adversarial loss and the penalties on gradients."""

from __future__ import annotations

from functools import partial

import torch

from bigsgan.adversarial.terms.consistency import consistency
from bigsgan.adversarial.terms.l1 import l1
from bigsgan.adversarial.terms.own import adversarial_loss, own_terms
from bigsgan.adversarial.terms.term import IMAGES, LOGITS, Term, image_gradient, weighted
from bigsgan.config import Recipe

__all__ = ["IMAGES", "LOGITS", "Term", "adversarial_loss", "build_terms", "image_gradient", "weighted"]


def build_terms(recipe: Recipe, device: torch.device) -> tuple[Term, ...]:
    """Return the terms of a recipe: ours, then those from outside.

    Raises:
        UserError: One from outside cannot be built, or does not fit.
    """
    section, found = recipe.objective, list[Term]()
    if section.consistency:
        value = partial(consistency, recipe.generator.images_per_sample)
        found.append(Term("consistency", "generator", section.consistency.weight, ("images",), value))
    if section.l1:
        found.append(Term("l1", "generator", section.l1, ("images", "real_images"), l1))
    return (*found, *own_terms(recipe, device))
