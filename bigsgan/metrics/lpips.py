"""Perceptual distances of images to their targets.

Shapes: n images (n, C, H, W), 0 to 255.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.data.autoencoders import weights_digest
from bigsgan.data.perceptual import Features, Fields, distances, open_features
from bigsgan.images.codec import decode
from bigsgan.images.size import Size
from bigsgan.metrics.weight_files import CHUNK, DIGITS_OF_HASH
from bigsgan.runtime import comm


class Lpips:
    """Perceptual distance of each image to its target (Zhang et al. 2018, arXiv 1801.03924, equation 1).

    Attributes:
        about: The network, for records.
    """

    def __init__(self, network: PerceptualNetwork, size: Size, fields: Fields) -> None:
        """Load the network onto this rank's device; the ``fields`` named its files.

        Raises:
            UserError: It cannot be read, or does not fit images of this size.
        """
        self._features: Features = open_features(network, size, fields, comm.device())
        files = [Path(file) for file in (network.path, network.heads) if file]
        self.about = {"lpips": network.path, "lpips_sha256": weights_digest(files, fields.path)[:DIGITS_OF_HASH]}

    @torch.no_grad()
    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the distances (n,) float64, of images of uint8."""
        found = []
        for pair in zip(images.split(CHUNK), targets.split(CHUNK), strict=True):
            of_layers = distances(self._features, *(decode(each) for each in pair))
            found.append(torch.stack([each.flatten(1).mean(dim=1) for each in of_layers]).sum(dim=0).double())
        return torch.cat(found)
