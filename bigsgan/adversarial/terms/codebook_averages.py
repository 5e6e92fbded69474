"""A codebook whose codes follow moving averages of the latents nearest to them.

Shapes: n samples of a micro-batch on one replica, P pixels of latents of Z channels, K codes, R codes that may begin
anew after an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.adversarial.terms.latents import CodebookTerm
from bigsgan.adversarial.terms.term import Sum
from bigsgan.checkpoint import SavedValues, SharedState
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.reconstruction import Codebook
from bigsgan.engines import Outcome, chosen
from bigsgan.models import noise
from bigsgan.models.network import LayerStack
from bigsgan.models.quantizers import VectorQuantizer, nearest
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
    After the first update, applied or not, e_k and U_k are those of k-means if it is asked for.
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
        self._begin = partial(Means, generator, place, device) if averages.kmeans_steps else None
        self._means = self._begin() if self._begin else None

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return the distances of a micro-batch, a scalar, and note its latents. A collective.

        Where passes are repeated, it is called equally often with each micro-batch.
        """
        latents, codes = read["encoded"].detach().flatten(0, 1), read["codes"].flatten()
        ones, num = torch.ones(len(codes), device=codes.device), len(self._counts)
        self._counts.index_add_(0, codes, ones)
        # The gradient of an embedding is this sum in an order that does not change.
        self._sums += torch.ops.aten.embedding_dense_backward(latents, codes, num, -1, False)
        for each in (self._drawn, self._means):
            if each is not None:
                each.add(read["seeds"], latents)
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
        if self._means is not None and update == 0:
            uses, moved = self._means.found(codes, self._sum_over_all)
            applied = True
        self._means = None
        self._uses.copy_(chosen(applied, uses, self._uses))
        if self._codebook is not None:
            self._codebook.copy_(chosen(applied, moved, codes))

    def load(self, saved: SavedValues) -> None:
        """Restore the state; the first update may come again."""
        super().load(saved)
        self._means = self._begin() if self._begin else None

    def state(self) -> dict[str, Tensor]:
        """Return the average uses of the codes, (K,); 1 if all are used alike."""
        return {"uses": self._uses}


class DrawnLatents:
    """R latents of an update's batch, drawn by the seeds of its samples, so that no layout changes them."""

    def __init__(self, most: int, width: int, place: tuple[int, int], device: torch.device) -> None:
        """Begin without latents, of which there are ``most`` and which have ``width`` channels."""
        self._place = place
        self._keys = torch.full((most,), torch.inf, dtype=torch.float64, device=device)
        self._latents = torch.zeros(most, width, device=device)

    def add(self, seeds: Tensor, latents: Tensor) -> None:
        """Keep the R latents with the smallest keys among those so far and these: (n,), (n * P, Z)."""
        coarse, fine = noise.draw(seeds, range(_STREAM, _STREAM + 2), len(latents) // len(seeds), "uniform").unbind(1)
        keys = (coarse.double() + _FINE * fine.double()).flatten()
        self._keys, self._latents = self._least(torch.cat([self._keys, keys]), torch.cat([self._latents, latents]))

    def taken(self, total: Sum) -> tuple[Tensor, Tensor]:
        """Return the keys (R,) and the latents (R, Z), those of the smallest first, and forget them. A collective."""
        rank, num = self._place
        keys = torch.zeros(num, len(self._keys), dtype=torch.float64, device=self._keys.device)
        latents = torch.zeros(num, *self._latents.shape, device=self._keys.device)
        keys[rank], latents[rank] = self._keys, self._latents
        self._keys.fill_(torch.inf)
        return self._least(total(keys).flatten(), total(latents).flatten(0, 1))

    def revived(self, uses: Tensor, codes: Tensor, below: float, total: Sum) -> tuple[Tensor, Tensor]:
        """Return uses (K,) and codes (K, Z) in which those used least, if ``below`` that, begin anew. A collective."""
        keys, latents = self.taken(total)
        is_dead = uses < below
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


class Means:
    """k-means of an update's latents (Lloyd 1982), which begins with some that are drawn, in any layout the same.

    Codes that are divided by their norms are compared so, but are means of the latents.
    """

    def __init__(self, generator: AutoencoderGenerator, place: tuple[int, int], device: torch.device) -> None:
        """Begin without latents."""
        averages = generator.bottleneck.ema
        assert averages is not None, "codes follow averages"
        self._num_steps, self._normalized = averages.kmeans_steps, generator.bottleneck.normalized
        self._drawn = DrawnLatents(generator.num_codes, generator.latent_channels, place, device)
        self._latents = [torch.zeros(0, generator.latent_channels, device=device)]

    def add(self, seeds: Tensor, latents: Tensor) -> None:
        """Keep latents (n * P, Z) of samples with seeds (n,)."""
        self._drawn.add(seeds, latents)
        self._latents.append(latents)

    def found(self, codes: Tensor, total: Sum) -> tuple[Tensor, Tensor]:
        """Return uses (K,) and codes (K, Z), in place of ``codes`` unless a latent is not finite. A collective."""
        latents = torch.cat(self._latents).double()
        centres, ones = self._drawn.taken(total)[1].double(), torch.ones(len(latents), device=latents.device)
        counts = centres.new_zeros(len(centres))
        for _ in range(self._num_steps):
            numbers = nearest(latents, F.normalize(centres, dim=1) if self._normalized else centres)
            sums = torch.ops.aten.embedding_dense_backward(latents, numbers, len(centres), -1, False)
            counts = torch.zeros_like(counts).index_add_(0, numbers, ones.double())
            counts, sums = total(torch.cat([counts[:, None], sums], dim=1)).split([1, sums.shape[1]], dim=1)
            centres, counts = torch.where(counts > 0, sums / counts.clamp(min=1), centres), counts.flatten()
        uses = (counts * (len(counts) / counts.sum())).to(codes.dtype)
        is_finite = centres.isfinite().all()
        return torch.where(is_finite, uses, 1.0), torch.where(is_finite, centres.to(codes.dtype), codes)


def averaged_codes(network: LayerStack) -> Tensor | None:
    """Return the codes that follow averages, if this rank's layers of G have them."""
    found = (each.codebook for each in network.modules() if isinstance(each, VectorQuantizer) and each.averages)
    return next(found, None)
