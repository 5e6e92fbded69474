"""How an autoencoder uses its codes."""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.config.metrics import Metric
from bigsgan.runtime import comm


class CodeUse:
    """Counts the codes of the images at positions below the metric's number, of which each rank sees some."""

    def __init__(self, metric: Metric) -> None:
        """Begin without images."""
        self.metric = metric
        self._counts = torch.zeros(0, dtype=torch.float64)

    def add(self, codes: Tensor | None, num_codes: int, positions: Tensor) -> None:
        """Count the codes (n, P) of images at these positions (n,); None on a rank that does not make them."""
        if not len(self._counts):
            self._counts = torch.zeros(num_codes, dtype=torch.float64)
        if codes is not None:
            inside = codes.cpu()[positions < self.metric.num]
            self._counts += torch.bincount(inside.flatten(), minlength=num_codes)

    def values(self) -> dict[str, float]:
        """Return the share of all codes that occur, and exp(-sum over codes of p log p), p their shares. A collective.

        The perplexity is the number of codes if all occur alike, and 1 if one does.
        """
        counts = comm.sum_over_ranks(self._counts.to(comm.device()))
        perplexity = torch.special.entr(counts / counts.sum()).sum().exp()
        use, name = (counts > 0).double().mean(), self.metric.name
        return {f"{name}_use": float(use), f"{name}_perplexity": float(perplexity)}
