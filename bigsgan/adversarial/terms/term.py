"""A term: a part of a network's loss beside the adversarial loss.

Its value is a mean over samples. The mean over micro-batches and replicas is then that over the batch, in any layout.

Shapes: n samples of a micro-batch on one replica, images (n, C, H, W) in [-1, 1], labels (n,), logits (n,), or (n, P)
of P patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.monitor import Statistics

IMAGES = ("images", "real_images", "labels", "input_images")
"""What a term of G may read where images arrive at D: G's images, the real ones, classes, and the inputs of pairs."""

LOGITS = ("fake_logits", "real_logits")
"""What a term may read where D's logits are computed."""


class Term(NamedTuple):
    """A part of a network's loss."""

    name: str  # its statistic is loss/<name>, without the weight
    network: str  # the network whose loss it enters
    weight: float
    reads: tuple[str, ...]  # some of IMAGES, or some of LOGITS: names of the arguments of ``value``
    value: Callable[..., Tensor]  # the mean over the samples, a scalar

    @property
    def of_images(self) -> bool:
        """Whether it reads images, and not logits."""
        return self.reads[0] in IMAGES


def weighted(terms: Iterable[Term], inputs: Mapping[str, Tensor], statistics: Statistics) -> list[Tensor]:
    """Return each term's value, which is recorded, times its weight."""
    found = []
    for term in terms:
        value = term.value(**{name: inputs[name] for name in term.reads})
        statistics.add(f"loss/{term.name}", value, len(inputs[term.reads[0]]))
        found.append(term.weight * value)
    return found


def image_gradient(terms: Iterable[Term], inputs: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
    """Return the gradient of the terms' sum at G's images of one micro-batch, (n, C, H, W) float32."""
    images = inputs["images"].detach().requires_grad_()
    with torch.enable_grad():
        total = torch.stack(weighted(terms, {**inputs, "images": images}, statistics)).sum()
        (found,) = torch.autograd.grad(total, images)
    return found
