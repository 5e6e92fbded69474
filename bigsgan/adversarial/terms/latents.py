"""Terms of what an autoencoder's bottleneck returns.

Shapes: n samples of a micro-batch on one replica, Z channels, H x W pixels, P = H * W, K codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.adversarial.terms.outputs import OutputTerm
from bigsgan.adversarial.terms.term import Sum
from bigsgan.config.families.base import NetworkSection
from bigsgan.config.reconstruction import Codebook
from bigsgan.monitor import Statistics


def divergence(moments: Tensor) -> Tensor:
    """Return the divergence from a standard normal distribution (Kingma and Welling 2014, arXiv 1312.6114, appendix B).

    Args:
        moments: Means and log variances of normal distributions, (n, 2 * Z, H, W).
    """
    mean, log_variance = moments.flatten(1).chunk(2, dim=1)
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean() / 2


class CodeEntropy:
    """E[H(p)] - diversity * H(E[p]) of softmaxes p over codes (Yu et al. 2023, arXiv 2310.05737, equation 5)."""

    def __init__(self, diversity: float) -> None:
        self._diversity = diversity

    def means(self, entropies: Tensor, shares: Tensor) -> Tensor:
        """Return E[H(p)] and E[p], (1 + K,), of the means over the pixels of each sample, (n,) and (n, K)."""
        return torch.cat([entropies.mean(dim=0, keepdim=True), shares.mean(dim=0)])

    def __call__(self, means: Tensor) -> Tensor:
        """Return the value, a scalar, of means over all samples."""
        return means[0] - self._diversity * torch.special.entr(means[1:]).sum()


class CodebookTerm(OutputTerm):
    """Brings codes and latents near each other (van den Oord et al. 2017, arXiv 1711.00937, equation 3).

    If the number K of codes is known, a second statistic is the perplexity exp(-sum over codes of p log p), with the
    shares p of the pixels of a micro-batch, over all ranks: K if all codes are used alike, 1 if one is.
    """

    def __init__(self, section: Codebook, generator: NetworkSection, sum_over_replicas: Sum) -> None:
        """Take G's section, and what sums a vector, in place, over the ranks with the same layers of G."""
        super().__init__("codebook", "generator", section.weight, ("encoded", "quantized"), self._distance)
        self._num_codes, self._learns = generator.num_codes, generator.learns_codes
        self.statistics += ("codebook/perplexity",) if self._num_codes else ()
        self._commitment, self._sum = section.commitment, sum_over_replicas

    def _distance(self, encoded: Tensor, quantized: Tensor) -> Tensor:
        of_latents = self._commitment * F.mse_loss(encoded, quantized.detach())
        return F.mse_loss(quantized, encoded.detach()) + of_latents if self._learns else of_latents

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return the distances of a micro-batch, a scalar, and record the use of the codes. A collective."""
        if self._num_codes:
            codes = read["codes"].flatten()
            ones = torch.ones(codes.numel(), device=codes.device)
            counts = self._sum(ones.new_zeros(self._num_codes).index_add_(0, codes, ones))  # bincount would wait
            perplexity = torch.special.entr(counts / counts.sum()).sum().exp()
            statistics.add(self.statistics[1], perplexity, len(read["codes"]))
        return super().loss(read, statistics)
