"""Adjusts the probability p of ADA's augmentations to the discriminator."""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import Sum, Term
from bigsgan.checkpoint import SharedState
from bigsgan.config.augmentation import Augmentation
from bigsgan.engines import Outcome, chosen


def adjusted_probability(p: Tensor, signs: Tensor, target: float, step: float) -> Tensor:
    """Adjust p once (Karras et al. 2020, arXiv 2006.06676, section 3 and appendix D).

    p + step * sign(r - target), at least 0, with the heuristic r = E[sign(D(real))]: D overfits if it is sure of most
    training images.

    Args:
        p: (1,).
        signs: (2,): sum of the signs, and their number. If there are none, p stays.
        target: Target of r.
        step: Images since the last adjustment / images in which p can rise from 0 to 1.
    """
    total, count = signs.unbind()
    direction = torch.sign(total / count.clamp(min=1) - target)
    return (p + step * torch.where(count > 0, direction, 0)).clamp(min=0)


class AdaptiveProbability(Term, SharedState):
    """Watches the signs of D's logits at real images, and steers p by them; never waits for the device.

    A named entry of a run's state: the signs since the last adjustment, summed over all ranks, so equal on all.
    """

    entry = "augmentation"

    def __init__(
        self, section: Augmentation, batch: int, device: torch.device, p: Tensor | None, sum_over_ranks: Sum
    ) -> None:
        """Begin without signs.

        Args:
            section: The recipe's section, with a ``target``.
            batch: Number of images in an update.
            device: Device of the logits.
            p: The layer's buffer (1,), changed in place; None on a rank without that layer.
            sum_over_ranks: Sums a vector on the device elementwise over the ranks; the identity on one rank.
        """
        super().__init__("augmentation", "discriminator")
        self.statistics = ()
        assert section.target is not None
        self._target, self._interval = section.target, section.interval
        self._step = batch * section.interval / section.ramp_nimg
        self._p, self._sum_over_ranks = p, sum_over_ranks
        # float32 counts exactly up to 2**24 logits.
        self._own = torch.zeros(2, dtype=torch.float32, device=device)
        self._signs = torch.zeros_like(self._own)

    @torch.no_grad()
    def observe(self, real: Tensor, fake: Tensor) -> None:
        """Add D's logits at this rank's real images; NaN, from an overflow, does not count."""
        known = ~real.isnan()
        signs = torch.where(known, real, 0).sign()
        self._own += torch.stack([signs.sum(dtype=torch.float32), known.sum(dtype=torch.float32)])

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """End update number ``update`` (from 0): the ranks share their signs, and every ``interval`` updates p moves.

        Signs of a skipped update do not count.

        A collective: all ranks call it, even those that saw no logits or do not hold p.
        """
        # In each update, though p moves less often, so that a checkpoint's state never differs by rank.
        signs = self._sum_over_ranks(self._own.clone())
        self._own.zero_()
        self._signs += chosen(applied, signs, torch.zeros_like(signs))
        if (update + 1) % self._interval:
            return
        if self._p is not None:
            self._p.copy_(adjusted_probability(self._p, self._signs, self._target, self._step))
        self._signs.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the signs since the last adjustment, (2,): their sum over all ranks, and their number."""
        return {"signs": self._signs}
