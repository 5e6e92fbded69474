"""Scores from a network's class probabilities of images: inception score, divergences between histograms.

Shapes: N images, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.runtime import comm

SPLITS = 10


class ClassScores:
    """Sums over class probabilities p, float64 on the host, which ranks add up.

    Attributes:
        num: Number of images in each split, (splits,).
        probabilities: Sum of p by split, (splits, K).
        negative_entropy: Sum of p log p by split, (splits,).
        histogram: Number of images by their most probable class, (K,).
    """

    def __init__(self, num_classes: int, splits: int = SPLITS) -> None:
        self.num = torch.zeros(splits, dtype=torch.float64)
        self.probabilities = torch.zeros(splits, num_classes, dtype=torch.float64)
        self.negative_entropy = torch.zeros(splits, dtype=torch.float64)
        self.histogram = torch.zeros(num_classes, dtype=torch.float64)

    def add(self, logits: Tensor, split: Tensor) -> None:
        """Count logits (n, K) of images that belong to splits (n,)."""
        logs = logits.double().cpu().log_softmax(1)
        p = logs.exp()
        self.num.index_add_(0, split, torch.ones(len(p), dtype=torch.float64))
        self.probabilities.index_add_(0, split, p)
        self.negative_entropy.index_add_(0, split, (p * logs).sum(1))
        self.histogram += torch.bincount(p.argmax(1), minlength=p.shape[1])

    def over_ranks(self) -> ClassScores:
        """Scores of all ranks' images. A collective."""
        merged = ClassScores(self.probabilities.shape[1], len(self.num))
        for name, own in vars(self).items():
            setattr(merged, name, comm.sum_over_ranks(own.clone().to(comm.device())).cpu())
        return merged

    def inception_score(self) -> tuple[float, float]:
        """exp of the mean KL(p(class | image) || p(class)): mean and standard deviation over splits with images.

        Salimans et al. 2016, arXiv 1606.03498, section 4.
        """
        filled = self.num > 0
        num = self.num[filled]
        marginal = self.probabilities[filled] / num[:, None]
        divergence = self.negative_entropy[filled] / num - (torch.special.xlogy(marginal, marginal)).sum(1)
        scores = divergence.exp()
        return float(scores.mean()), float(scores.std(correction=0))


def kullback_leibler(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats of two histograms of counts (K,), after adding one image to every class of both.

    Otherwise a single class without images in q would make it infinite.
    """
    p, q = (p + 1) / (p + 1).sum(), (q + 1) / (q + 1).sum()
    return float((p * (p / q).log()).sum())


def jensen_shannon(p: Tensor, q: Tensor) -> float:
    """Jensen-Shannon divergence in nats, 0 to log 2, of two histograms of counts (K,)."""
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2

    def divergence(x: Tensor) -> Tensor:
        return (torch.special.xlogy(x, x) - torch.special.xlogy(x, middle)).sum()

    return float((divergence(p) + divergence(q)) / 2)
