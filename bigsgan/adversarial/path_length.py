"""Path length regularisation of a generator with styles (Karras et al. 2020, arXiv 1912.04958, section 3.2).

Shapes: n samples, L style vectors of W numbers each, images (n, C, H, W).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bigsgan.adversarial.watchers import Sum
from bigsgan.checkpoint import SharedState
from bigsgan.config.sections import PathLength
from bigsgan.engines import MicroBatch, Outcome, chosen
from bigsgan.models import noise
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics

NAME = "penalty/path_length"

# fp16 would flush small gradients at the styles to 0. A power of two changes nothing in the other types.
_SCALE = 2.0**6
_STREAM = 2**32  # of a sample's seed; layers count theirs from 0


class PathLengthPenalty(SharedState):
    """weight * every * E[(|J^T y| - a)^2], on every ``every``-th update of G. A named entry of a run's state.

    J is the derivative of the images by the style vectors, y standard normal over the square root of the number of
    pixels, and a the moving average of |J^T y|, as it was before the update.
    """

    def __init__(self, section: PathLength, statistics: Statistics, device: torch.device, sum_over_ranks: Sum) -> None:
        self._section, self._statistics, self._sum_over_ranks = section, statistics, sum_over_ranks
        self._average = torch.zeros(1, device=device)
        self._seen = torch.zeros(2, device=device)  # sum and number of lengths
        statistics.declare(NAME)

    def is_due(self, update: int) -> bool:
        """Whether update number ``update`` carries the penalty."""
        return update % self._section.every == 0

    def forward(self, network: LayerStack, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
        """Images of a generator whose first layer leaves the style vectors at the head of its carry, and those."""
        styles, *rest = network.part(0, 1).fold(*inputs)
        return network.part(1, len(network.layers))(styles, *rest), styles

    def loss(self, images: Tensor, styles: Tensor, inputs: MicroBatch) -> Tensor:
        """The penalty on this rank's micro-batch, a scalar.

        Args:
            images: (n, C, H, W).
            styles: (n, L, W), which they were made from.
            inputs: Of the generator, the last of them seeds (n,).
        """
        pixels = images.shape[2] * images.shape[3]
        probe = noise.normal(inputs[-1], _STREAM, tuple(images.shape[1:])) / math.sqrt(pixels)
        (grads,) = torch.autograd.grad((images * probe).sum() * _SCALE, styles, create_graph=True)
        lengths = (grads.float() / _SCALE).square().sum(dim=2).mean(dim=1).sqrt()
        self._seen += torch.stack([lengths.detach().sum(), lengths.new_full((), float(len(lengths)))])
        value = self._section.weight * (lengths - self._average.clone()).square().mean()
        self._statistics.add(NAME, value.detach())
        return self._section.every * value

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Move the average by the mean over all ranks, if the update carried the penalty. All ranks call this."""
        if not self.is_due(update):
            return
        total, number = self._sum_over_ranks(self._seen.clone()).unbind()
        self._seen.zero_()
        moved = torch.lerp(self._average, total / number, self._section.decay)
        self._average.copy_(chosen(applied, moved, self._average))

    def state(self) -> dict[str, Tensor]:
        """The average, (1,)."""
        return {"average": self._average}
