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
    pixels, and a the moving average of |J^T y|. The paper (equation 4) does not say whether this update's lengths are
    in a. In NVlabs' loss.py they are: a moves first and is held constant in the loss, and so it is here. It moves by
    the mean over all ranks and over the micro-batches of the update so far. There each process has an average of its
    own, which each micro-batch moves anew; at one process and one micro-batch both are the same.
    """

    def __init__(self, section: PathLength, statistics: Statistics, device: torch.device, sum_over_ranks: Sum) -> None:
        self._section, self._statistics, self._sum_over_ranks = section, statistics, sum_over_ranks
        self._average = torch.zeros(1, device=device)
        self._seen = torch.zeros(2, device=device)  # sum and number of lengths in this update, over all ranks
        statistics.declare(NAME)

    def is_due(self, update: int) -> bool:
        """Whether update number ``update`` carries the penalty."""
        return update % self._section.every == 0

    def forward(self, network: LayerStack, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
        """Images of a generator whose first layer leaves the style vectors at the head of its carry, and those.

        The styles are those of the samples that take part.
        """
        styles, *rest = network.part(0, 1).fold(*inputs)
        synthesis, shrink = network.part(1, len(network.layers)), self._section.batch_shrink
        if shrink == 1:
            return synthesis(styles, *rest), styles
        # In passes of their own, so that the double backward goes through the samples that take part alone.
        parts = [(styles[i::shrink], *(entry[i::shrink] for entry in rest)) for i in range(shrink)]
        images = torch.stack([synthesis(*part) for part in parts], dim=1)
        return images.flatten(0, 1), parts[0][0]

    def loss(self, images: Tensor, styles: Tensor, inputs: MicroBatch) -> Tensor:
        """The penalty on this rank's micro-batch, a scalar. All ranks call this.

        Args:
            images: (n, C, H, W).
            styles: (n / batch_shrink, L, W), which those that take part were made from.
            inputs: Of the generator, the last of them seeds (n,).
        """
        shrink = self._section.batch_shrink
        pixels = images.shape[2] * images.shape[3]
        probe = noise.normal(inputs[-1][::shrink], _STREAM, tuple(images.shape[1:])) / math.sqrt(pixels)
        (grads,) = torch.autograd.grad((images[::shrink] * probe).sum() * _SCALE, styles, create_graph=True)
        lengths = (grads.float() / _SCALE).square().sum(dim=2).mean(dim=1).sqrt()
        seen = torch.stack([lengths.detach().sum(), lengths.new_full((), float(len(lengths)))])
        self._seen += self._sum_over_ranks(seen)
        value = self._section.weight * (lengths - self._moved()).square().mean()
        self._statistics.add(NAME, value.detach())
        return self._section.every * value

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Keep the average that the update moved, if it was applied."""
        if not self.is_due(update):
            return
        self._average.copy_(chosen(applied, self._moved(), self._average))
        self._seen.zero_()

    def _moved(self) -> Tensor:
        """The average, moved by the mean of the lengths seen in this update."""
        total, number = self._seen.unbind()
        return torch.lerp(self._average, total / number, self._section.decay)

    def state(self) -> dict[str, Tensor]:
        """The average, (1,)."""
        return {"average": self._average}
