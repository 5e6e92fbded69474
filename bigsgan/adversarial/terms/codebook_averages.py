"""A codebook whose codes follow moving averages of the latents nearest to them.

Shapes: n samples of a micro-batch on one replica, P pixels of latents of Z channels, K codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bigsgan.adversarial.terms.drawn_latents import DrawnLatents
from bigsgan.adversarial.terms.latents import CodebookTerm
from bigsgan.adversarial.terms.term import Sum
from bigsgan.checkpoint import SharedState
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.reconstruction import Codebook
from bigsgan.engines import Outcome, chosen
from bigsgan.monitor import Statistics


class AveragedCodebook(CodebookTerm, SharedState):
    """Draws latents to their codes, and moves the codes at the end of each update.

    With the share u_k of latents that code k has in a batch, times K, their mean z_k, and the averages U_k and e_k:

        U_k <- decay * U_k + (1 - decay) * u_k
        e_k <- e_k + (1 - decay) * u_k / U_k * (z_k - e_k)

    This is e_k = M_k / U_k with an average M_k of u_k z_k (van den Oord et al. 2017, arXiv 1711.00937, appendix A.1).
    A named entry of a run's state: the averages U (K,), equal on all ranks. The codes are G's.
    """

    entry = "codebook"

    def __init__(
        self,
        section: Codebook,
        generator: AutoencoderGenerator,
        codebook: Tensor | None,
        sums: tuple[Sum, Sum],
        place: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Begin with codes that are used alike.

        Args:
            section: The recipe's.
            generator: That of the network, with averages.
            codebook: The codes (K, Z), changed in place; None on a rank that does not hold them.
            sums: They sum a tensor elementwise over the ranks with the same layers of G, and over all ranks.
            place: This rank's number among all, and the number of ranks.
            device: Device of the latents.
        """
        super().__init__(section, generator, sums[0])
        averages, (num, width) = generator.bottleneck.ema, (generator.num_codes, generator.latent_channels)
        assert averages is not None, "codes follow averages"
        self._decay, self._codebook, self._sum_over_all = averages.decay, codebook, sums[1]
        self._uses = torch.ones(num, device=device)
        self._counts, self._sums = torch.zeros(num, device=device), torch.zeros(num, width, device=device)
        self._below = averages.revival.below if averages.revival else 0.0
        most = averages.revival.most if averages.revival else 0
        self._drawn = DrawnLatents(most, width, place, device) if most else None

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return the distances of a micro-batch, a scalar, and note its latents. A collective.

        Where passes are repeated, it is called equally often with each micro-batch.
        """
        latents, codes = read["encoded"].detach().flatten(0, 1), read["codes"].flatten()
        ones, num = torch.ones(len(codes), device=codes.device), len(self._counts)
        self._counts.index_add_(0, codes, ones)
        # The gradient of an embedding is this sum in an order that does not change.
        self._sums += torch.ops.aten.embedding_dense_backward(latents, codes, num, -1, False)
        if self._drawn is not None:
            self._drawn.add(read["seeds"], latents)
        return super().loss(read, statistics)

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Move the averages and the codes by the latents of all ranks. A collective: all ranks call it."""
        found = self._sum_over_all(torch.cat([self._counts[:, None], self._sums], dim=1))
        self._counts.zero_(), self._sums.zero_()
        found = found * (len(found) / found[:, 0].sum())
        shares, totals = found[:, 0], found[:, 1:]
        uses = torch.lerp(shares, self._uses, self._decay)
        codes = self._codebook if self._codebook is not None else torch.zeros_like(totals)
        far = totals - shares[:, None] * codes
        moved = codes + (1 - self._decay) * far / uses[:, None].clamp(min=torch.finfo(uses.dtype).tiny)
        if self._drawn is not None:
            uses, moved = self._drawn.revived(uses, moved, self._below, self._sum_over_all)
        self.begin_anew(uses, moved, applied)

    def begin_anew(self, uses: Tensor, codes: Tensor, taken: Outcome) -> None:
        """Set the averages (K,) and the codes (K, Z), if they are ``taken``."""
        self._uses.copy_(chosen(taken, uses, self._uses))
        if self._codebook is not None:
            self._codebook.copy_(chosen(taken, codes, self._codebook))

    def state(self) -> dict[str, Tensor]:
        """Return the average uses of the codes, (K,); 1 if all are used alike."""
        return {"uses": self._uses}
