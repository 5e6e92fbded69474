"""Latents of an update's batch that are drawn at random.

Shapes: n samples of a micro-batch on one replica, P pixels of latents of Z channels, K codes, R drawn latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import Sum
from bigsgan.models import noise

_STREAM = 2**32
"""Stream of the draws by which latents are chosen."""
_FINE = 2.0**-24
"""Factor of a second draw, so that no two latents have the same key."""


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
        self._keys, places = self._least(torch.cat([self._keys, keys]))
        self._latents = torch.cat([self._latents, latents])[places]

    def taken(self, total: Sum) -> tuple[Tensor, Tensor]:
        """Return the keys (R,) and the latents (R, Z), those of the smallest first, and forget them. A collective."""
        (rank, num), most = self._place, len(self._keys)
        keys = torch.zeros(num, most, dtype=torch.float64, device=self._keys.device)
        keys[rank] = self._keys
        self._keys.fill_(torch.inf)
        found, places = self._least(total(keys).flatten())
        is_own = torch.div(places, most, rounding_mode="floor") == rank
        return found, total(torch.where(is_own[:, None], self._latents[places % most], 0.0))

    def revived(self, uses: Tensor, codes: Tensor, below: float, total: Sum) -> tuple[Tensor, Tensor]:
        """Return uses (K,) and codes (K, Z) in which those used least, if ``below`` that, begin anew. A collective."""
        keys, latents = self.taken(total)
        is_dead = uses < below
        places = torch.where(is_dead, uses, torch.inf).argsort(stable=True)[: len(keys)]
        begins = is_dead[places] & keys[: len(places)].isfinite()
        latents = latents[: len(places)]
        uses = uses.index_copy(0, places, torch.where(begins, 1.0, uses[places]))
        return uses, codes.index_copy(0, places, torch.where(begins[:, None], latents, codes[places]))

    def _least(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the R smallest keys and their places; of equal ones, which repeated passes leave, the first."""
        order = keys.argsort(stable=True)
        keys = keys[order]
        is_repeated = torch.cat([keys.new_zeros(1, dtype=torch.bool), keys[1:] == keys[:-1]])
        keys = torch.where(is_repeated, torch.inf, keys)
        first = keys.argsort(stable=True)[: len(self._keys)]
        return keys[first], order[first]
