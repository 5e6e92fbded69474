"""The distance between G's images and their latents (Lin et al. 2025, arXiv 2511.22475)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bigsgan.adversarial.terms.term import Term
from bigsgan.config.reconstruction import Transport


class TransportCost(Term):
    """A scheduled weight times the mean squared difference."""

    def __init__(self, section: Transport) -> None:
        super().__init__("transport", "generator", ("images", "latents"), factor=section.weight)
        self._section = section

    def begin_update(self, weights: Mapping[str, float]) -> None:
        """Take the scheduled weight, if there is one."""
        self.factor = weights.get(self.name, self._section.weight)

    def value(self, images: Tensor, latents: Tensor) -> Tensor:
        """Return the mean over images (n, C, H, W) and latents (n, C * H * W), a scalar."""
        return (images - latents.view_as(images)).square().mean()
