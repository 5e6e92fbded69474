"""A codebook whose codes follow moving averages of the latents nearest to them.

Shapes: n samples of a micro-batch on one replica, P pixels of latents of Z channels, K codes, R codes that may begin
anew after an update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bigsgan.adversarial.terms.latents import CodebookTerm
from bigsgan.adversarial.terms.term import Sum
from bigsgan.checkpoint import SharedState
from bigsgan.config.families.autoencoder import AutoencoderGenerator, Revival
from bigsgan.config.reconstruction import Codebook
from bigsgan.engines import Outcome, chosen
from bigsgan.models import noise
from bigsgan.models.network import LayerStack
from bigsgan.models.quantizers import VectorQuantizer
from bigsgan.monitor import Statistics

_STREAM = 2**32
"""Stream of the draws by which latents are chosen."""
_FINE = 2.0**-24
"""Factor of a second draw, so that no two latents have the same key."""


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
        self._drawn = None if averages.revival is None else DrawnLatents(averages.revival, width, place, device)

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
            uses, moved = self._drawn.revived(uses, moved, self._sum_over_all)
        self._uses.copy_(chosen(applied, uses, self._uses))
        if self._codebook is not None:
            self._codebook.copy_(chosen(applied, moved, codes))

    def state(self) -> dict[str, Tensor]:
        """Return the average uses of the codes, (K,); 1 if all are used alike."""
        return {"uses": self._uses}


class DrawnLatents:
    """R latents of an update's batch, drawn by the seeds of its samples, so that no layout changes them."""

    def __init__(self, section: Revival, width: int, place: tuple[int, int], device: torch.device) -> None:
        """Begin without latents, which have ``width`` channels."""
        self._section, self._place = section, place
        self._keys = torch.full((section.most,), torch.inf, dtype=torch.float64, device=device)
        self._latents = torch.zeros(section.most, width, device=device)

    def add(self, seeds: Tensor, latents: Tensor) -> None:
        """Keep the R latents with the smallest keys among those so far and these: (n,), (n * P, Z)."""
        coarse, fine = noise.draw(seeds, range(_STREAM, _STREAM + 2), len(latents) // len(seeds), "uniform").unbind(1)
        keys = (coarse.double() + _FINE * fine.double()).flatten()
        self._keys, self._latents = self._least(torch.cat([self._keys, keys]), torch.cat([self._latents, latents]))

    def revived(self, uses: Tensor, codes: Tensor, total: Sum) -> tuple[Tensor, Tensor]:
        """Return uses (K,) and codes (K, Z) in which those used least begin anew; forget the latents. A collective."""
        rank, num = self._place
        keys = torch.zeros(num, len(self._keys), dtype=torch.float64, device=uses.device)
        latents = torch.zeros(num, *self._latents.shape, device=uses.device)
        keys[rank], latents[rank] = self._keys, self._latents
        keys, latents = self._least(total(keys).flatten(), total(latents).flatten(0, 1))
        self._keys.fill_(torch.inf)
        is_dead = uses < self._section.below
        places = torch.where(is_dead, uses, torch.inf).argsort(stable=True)[: len(keys)]
        begins = is_dead[places] & keys[: len(places)].isfinite()
        latents = latents[: len(places)]
        uses = uses.index_copy(0, places, torch.where(begins, 1.0, uses[places]))
        return uses, codes.index_copy(0, places, torch.where(begins[:, None], latents, codes[places]))

    def _least(self, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the R smallest keys and their latents, of equal ones, which repeated passes leave, the first."""
        order = keys.argsort(stable=True)
        keys = keys[order]
        is_again = torch.cat([keys.new_zeros(1, dtype=torch.bool), keys[1:] == keys[:-1]])
        again = torch.where(is_again, torch.inf, keys).argsort(stable=True)[: len(self._keys)]
        return torch.where(is_again, torch.inf, keys)[again], latents[order[again]]


def averaged_codes(network: LayerStack) -> Tensor | None:
    """Return the codes that follow averages, if this rank's layers of G have them."""
    found = (each.codebook for each in network.modules() if isinstance(each, VectorQuantizer) and each.averages)
    return next(found, None)
