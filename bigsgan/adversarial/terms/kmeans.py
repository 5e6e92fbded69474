"""Codes that begin with the centres of k-means.

Shapes: n samples of a micro-batch on one replica, P pixels of latents of Z channels, K codes, L latents of an update on
this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.adversarial.terms.drawn_latents import DrawnLatents
from bigsgan.adversarial.terms.outputs import OutputTerm
from bigsgan.adversarial.terms.term import Sum
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.engines import Engine, Outcome
from bigsgan.models.network import LayerStack
from bigsgan.models.quantizers import VectorQuantizer, nearest
from bigsgan.monitor import Statistics

Begin = Callable[[Tensor, Tensor, Tensor], None]
"""Takes uses (K,), codes (K, Z), and whether these are finite, ()."""


class KMeansStart(OutputTerm):
    """Codes are, after the first update, the centres of k-means (Lloyd 1982) of its latents, in any layout the same.

    It adds nothing to the loss. It begins with latents that are drawn. Codes that are divided by their norms are
    compared so, but are means of the latents. The update may be skipped.
    """

    def __init__(
        self,
        generator: AutoencoderGenerator,
        begin: Begin,
        sum_over_ranks: Sum,
        place: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Take G's section, what sets the codes, and this rank's number among all with their number."""
        super().__init__("kmeans", "generator", 0.0, ("encoded", "seeds"), lambda encoded, seeds: encoded.new_zeros(()))
        self.statistics = ()
        self._num_steps, self._normalized = generator.bottleneck.kmeans_steps, generator.bottleneck.normalized
        self._size = generator.num_codes, generator.latent_channels
        self._begin, self._total, self._place, self._device = begin, sum_over_ranks, place, device
        self._seen: list[tuple[Tensor, Tensor]] = []

    def is_due(self, number: int) -> bool:
        """Whether it is the first update."""
        return number == 0

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Keep the latents of a micro-batch; return 0, a scalar."""
        self._seen.append((read["seeds"], read["encoded"].detach().flatten(0, 1)))
        return read["encoded"].new_zeros(())

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Set the codes after the first update, unless a latent is not finite. A collective: all ranks call it."""
        if not self.is_due(update):
            return
        num_codes, width = self._size
        drawn, parts = DrawnLatents(num_codes, width, self._place, self._device), self._seen
        self._seen = []
        for seeds, part in parts:
            drawn.add(seeds, part)
        latents = torch.cat([part for _, part in parts] or [torch.zeros(0, width, device=self._device)]).double()
        counts, centres = self._centres(drawn.taken(self._total)[1].double(), latents)
        uses = counts * (len(counts) / counts.sum())
        self._begin(uses.float(), centres.float(), centres.isfinite().all())

    def _centres(self, centres: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents (K,) of the centres and these (K, Z), given the first ones and this rank's (L, Z)."""
        ones, counts = latents.new_ones(len(latents)), centres.new_zeros(len(centres))
        for _ in range(self._num_steps):
            numbers = nearest(latents, F.normalize(centres, dim=1) if self._normalized else centres)
            sums = torch.ops.aten.embedding_dense_backward(latents, numbers, len(centres), -1, False)
            counts = torch.zeros_like(counts).index_add_(0, numbers, ones)
            counts, sums = self._total(torch.cat([counts[:, None], sums], dim=1)).split([1, sums.shape[1]], dim=1)
            centres, counts = torch.where(counts > 0, sums / counts.clamp(min=1), centres), counts.flatten()
        return counts, centres


@torch.no_grad()
def set_codes(codebook: Tensor, uses: Tensor, codes: Tensor, taken: Tensor) -> None:
    """Set codes (K, Z), or a part of them as a vector, if they are ``taken``."""
    codebook.copy_(torch.where(taken, codes, codebook.to(codes.device)))  # masters may be on the host


def set_learned_codes(generator: Engine, uses: Tensor, codes: Tensor, taken: Tensor) -> None:
    """Set codes (K, Z) that learn by their gradients, if they are ``taken``. A collective: all ranks call it."""
    for shard in generator.shards():
        for piece in shard.pieces:
            if piece.name.endswith(".codebook"):
                own, part = (slice(i, i + piece.numel) for i in (piece.start, piece.offset))
                set_codes(shard.master[own], uses, codes.flatten()[part], taken)
    generator.publish()


def codes_of(network: LayerStack) -> Tensor | None:
    """Return the codes (K, Z), or this rank's part of them, if its layers of G have them."""
    return next((each.codebook for each in network.modules() if isinstance(each, VectorQuantizer)), None)
