"""The reference's losses on logits, and of what an autoencoder's bottleneck returns, written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from bigsgan.config import Recipe

LOSSES = {
    "hinge": (lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(), lambda r, f: -f.mean()),
    "non_saturating": (lambda r, f: (-F.logsigmoid(r) - F.logsigmoid(-f)).mean(), lambda r, f: -F.logsigmoid(f).mean()),
    "least_squares": (lambda r, f: ((r - 1) ** 2 + f**2).mean() / 2, lambda r, f: ((f - 1) ** 2).mean() / 2),
    "wasserstein": (lambda r, f: (f - r).mean(), lambda r, f: -f.mean()),
    "relativistic": (lambda r, f: -F.logsigmoid(r - f).mean(), lambda r, f: -F.logsigmoid(f - r).mean()),
}


def losses_on_logits(recipe: Recipe) -> tuple[Any, Any]:
    """Return the losses of D and of G: of two discriminators, with as many logits each, the sums."""
    found = LOSSES.get(str(recipe.objective.loss), LOSSES["hinge"])
    if not recipe.discriminator.joins_domains:
        return found

    def of_both(loss: Any) -> Any:
        return lambda r, f: sum(loss(None if r is None else r.chunk(2, 1)[i], f.chunk(2, 1)[i]) for i in range(2))

    d_loss, g_loss = (of_both(loss) for loss in found)
    return d_loss, g_loss


def of_judged(recipe: Recipe, network: str, outputs: Sequence[Tensor]) -> Tensor | float:
    """Return what distribution matching adds to a network's loss, of D's errors and losses of G's images, (n, 1)."""
    section = recipe.objective.distribution_matching
    if section is None:
        return 0.0
    denoising, matching = outputs
    return section.denoising * denoising.mean() if network == "discriminator" else section.weight * matching.mean()


def of_outputs(recipe: Recipe, images: Tensor, *outputs: Tensor) -> Tensor | float:
    """Return the divergence from a standard normal distribution, or the distances of codes and latents, weighed.

    Or how far two generators' images are from those that they read.
    """
    objective = recipe.objective
    if objective.cycle or objective.identity:
        num, weights = recipe.data.input_channels, (objective.cycle, objective.identity)
        pairs = [(made[:, part], images[:, part]) for made in outputs for part in (slice(num), slice(num, None))]
        far = [F.l1_loss(ours, theirs) for ours, theirs in pairs]
        return sum(weight * (far[2 * i] + far[2 * i + 1]) for i, weight in enumerate(weights) if weight)
    if objective.kl:
        mean, log_variance = outputs[0].chunk(2, dim=1)
        theirs, standard = Normal(mean, log_variance.exp().sqrt()), Normal(0.0, 1.0)
        return objective.kl * kl_divergence(theirs, standard).sum((1, 2, 3)).mean()
    if section := objective.codebook:
        latents, codes, *_ = outputs
        to_codes, to_latents = ((codes - latents.detach()) ** 2).mean(), ((latents - codes.detach()) ** 2).mean()
        return section.weight * (recipe.generator.learns_codes * to_codes + section.commitment * to_latents)
    return 0.0
