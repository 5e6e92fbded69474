"""Keeps the logits of a relativistic D near 0, which its loss leaves free (Lin et al. 2025, arXiv 2511.22475)."""

from __future__ import annotations

from torch import Tensor


def centering(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return the mean squared sum of the logits (n,) of a real and a fake image, a scalar."""
    return (real_logits + fake_logits).square().mean()
