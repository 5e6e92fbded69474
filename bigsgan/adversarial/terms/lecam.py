"""Keeps D's logits near their moving averages (Tseng et al. 2021, arXiv 2104.03310)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.adversarial.terms.term import Sum, Term
from bigsgan.checkpoint import SharedState
from bigsgan.config import objective
from bigsgan.engines import Outcome, chosen


class LeCam(Term, SharedState):
    """Moving averages of D's logits, and a weight times the regularization that keeps logits near them.

    R = E[max(0, D(x) - a_fake)^2] + E[max(0, a_real - D(G(z)))^2] (Tseng et al. 2021, arXiv 2104.03310, equation 6,
    for logits on their correct sides of the averages), with the averages from before the update. A named entry of a
    run's state.
    """

    entry = "anchors"

    def __init__(self, section: objective.LeCam, device: torch.device, sum_over_ranks: Sum) -> None:
        super().__init__("lecam", "discriminator", ("real_logits", "fake_logits"))
        self.statistics = ("penalty/lecam",)
        self._section, self._sum_over_ranks = section, sum_over_ranks
        self._seen = torch.zeros(4, device=device)  # sum and count of real logits, and of fake ones
        self._anchors = torch.zeros(3, device=device)  # real, fake, and 1 where they are known

    def observe(self, real: Tensor, fake: Tensor) -> None:
        """Add logits, of any shape."""
        num = real.new_full((), float(real.numel()))  # made on the device: a copy from the host would wait
        self._seen += torch.stack([real.sum(), num, fake.sum(), num])

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Move the averages by the means over all ranks; the first update's means become the averages."""
        real, num_real, fake, num_fake = self._sum_over_ranks(self._seen.clone()).unbind()
        self._seen.zero_()
        known = self._anchors[2]
        means = torch.stack([real / num_real, fake / num_fake])
        means = torch.where(known > 0, torch.lerp(means, self._anchors[:2], self._section.decay), means)
        moved = torch.cat([means, torch.ones_like(self._anchors[2:])])
        # The update may be applied although an earlier one of D's steps was skipped for logits that overflowed.
        moved = torch.where(moved.isfinite().all(), moved, self._anchors)
        self._anchors.copy_(chosen(applied, moved, self._anchors))

    def value(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """Return weight * R of the logits of a micro-batch, a scalar; 0 until averages are known."""
        a_real, a_fake, known = self._anchors.clone().unbind()
        far = F.relu(real_logits - a_fake).square().mean() + F.relu(a_real - fake_logits).square().mean()
        return self._section.weight * (known * far)

    def state(self) -> dict[str, Tensor]:
        """Return the averages (3,): of real logits, of fake ones, and 1 if they are known."""
        return {"anchors": self._anchors}
