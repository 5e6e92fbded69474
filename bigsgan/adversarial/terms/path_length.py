"""Path length regularization of a generator with styles (Karras et al. 2020, arXiv 1912.04958, section 3.2).

Shapes: n samples, every shrink-th of which takes part, L style vectors of W numbers each, images (n, C, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import InnerTerm, Sum
from bigsgan.checkpoint import SharedState
from bigsgan.config.objective import PathLength
from bigsgan.engines import MicroBatch, Outcome, chosen
from bigsgan.models import noise
from bigsgan.models.network import LayerStack
from bigsgan.models.precision import full
from bigsgan.monitor import Statistics

NAME = "penalty/path_length"

_STREAM = 2**32  # number of a stream of a sample's seed; layers count theirs from 0


class PathLengthPenalty(InnerTerm, SharedState):
    """weight * every * E[(|J^T y| - a)^2], on every ``every``-th update of G. A named entry of a run's state.

    J is the derivative of the images by the style vectors, y is standard normal over the square root of the number of
    pixels, and a is the moving average of |J^T y|. The paper (equation 4) does not say whether a contains this update's
    lengths. In NVlabs' loss.py it does: a moves first and is constant in the loss, as here. Here it moves by the mean
    over all ranks and over the micro-batches of the update so far. There each process has its own average, which each
    micro-batch moves anew; with one process and one micro-batch both are the same.

    In forward mode, ``Probed`` gives J^T y times its scale, of which ``direction`` makes the tangents' direction; see
    models/dual.py.
    """

    entry = "path_length"
    ahead = PathLength.ahead

    def __init__(
        self,
        section: PathLength,
        statistics: Statistics,
        device: torch.device,
        sum_over_ranks: Sum,
        sum_over_replicas: Sum | None = None,
    ) -> None:
        """Begin without an average.

        Args:
            section: The recipe's section.
            statistics: Collects the penalty.
            device: This rank's device.
            sum_over_ranks: Sums a vector on the device elementwise over the ranks; the identity on one rank.
            sum_over_replicas: The same over the ranks that hold G's first layers; defaults to all ranks.
        """
        super().__init__("path_length", "generator", every=section.every)
        self.statistics = (NAME,)
        self.probe = Probed()
        self._section, self._statistics, self._sum_over_ranks = section, statistics, sum_over_ranks
        self._sum_over_replicas = sum_over_replicas or sum_over_ranks
        self._average = torch.zeros(1, device=device)
        self._own = torch.zeros(2, device=device)  # sum and number of this rank's lengths in this update
        self._seen = torch.zeros(2, device=device)  # the same over all ranks

    def forward(self, network: LayerStack, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return images, and the style vectors of the samples that take part.

        The generator's first layer puts the style vectors at the head of its carry.
        """
        styles, *rest = network.part(0, self.ahead).fold(*inputs)
        if not styles.requires_grad:  # they are latents, in a generator without a mapping network
            styles.requires_grad_()
        synthesis, shrink = network.part(self.ahead, len(network.layers)), self._section.batch_shrink
        if shrink == 1:
            return synthesis(styles, *rest), styles
        # In separate passes, so that the double backward only goes through the samples that take part.
        parts = [(styles[i::shrink], *(entry[i::shrink] for entry in rest)) for i in range(shrink)]
        images = torch.stack([synthesis(*part) for part in parts], dim=1)
        return images.flatten(0, 1), parts[0][0]

    def penalty(self, images: Tensor, styles: Tensor, inputs: MicroBatch) -> Tensor:
        """Return the penalty on this rank's micro-batch, a scalar. All ranks that hold G call this.

        Args:
            images: (n, C, H, W).
            styles: (n / batch_shrink, L, W), the styles of the images that take part.
            inputs: The generator's inputs; the last are seeds (n,).
        """
        probed = probe(images, inputs, self._section.batch_shrink).sum()
        (grads,) = torch.autograd.grad(probed * Probed.scale, styles, create_graph=True)
        lengths = _lengths(full(grads) / Probed.scale)
        return self._section.every * self._penalty(lengths, self._count(lengths))

    def taking_part(self, inputs: MicroBatch) -> MicroBatch:
        """Return the samples of a micro-batch that take part."""
        return tuple(entry[:: self._section.batch_shrink] for entry in inputs)

    def direction(self, grads: Tensor) -> Tensor:
        """Return the style vectors' tangents, and record the penalty. Ranks with G's first layers call this together.

        The penalty phi(|g|) = (|g| - a)^2 of g = J^T y has the gradient of <g, v> with fixed v = phi'(|g|) d|g|/dg, up
        to the factors in ``along``.

        Args:
            grads: The gradient of ``probe``, J^T y times its scale, (n / shrink, L, W) float32.

        Returns:
            (n, L, W); zero for samples that do not take part.
        """
        grads = grads / Probed.scale
        shrink, lengths = self._section.batch_shrink, _lengths(grads)
        average = self._count(lengths)
        self._penalty(lengths, average)
        slope = 2 * (lengths - average) / (lengths.clamp(min=1e-12) * grads.shape[1])  # |g|^2 is a mean over L
        found = grads.new_zeros(len(grads) * shrink, *grads.shape[1:])
        found[::shrink] = slope.view(-1, 1, 1) * grads
        return found

    def along(self, tangents: Tensor, inputs: MicroBatch) -> Tensor:
        """Return a scalar with the penalty's gradient, given the images' tangents (n, C, H, W) along ``direction``."""
        probed = probe(tangents, inputs, self._section.batch_shrink)
        return self._section.every * self._section.weight * probed.sum() / len(probed)

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Keep the average that the update moved, if it was applied. All ranks call this, even those without styles."""
        if not self.is_due(update):
            return
        self._seen = self._sum_over_ranks(self._own.clone())
        self._average.copy_(chosen(applied, self._moved(), self._average))
        self._own.zero_()
        self._seen.zero_()

    def _count(self, lengths: Tensor) -> Tensor:
        """Count lengths; return the average, moved by these and the other ranks' lengths."""
        seen = torch.stack([lengths.detach().sum(), lengths.new_full((), float(len(lengths)))])
        self._own += seen
        self._seen += self._sum_over_replicas(seen.clone())
        return self._moved()

    def _penalty(self, lengths: Tensor, average: Tensor) -> Tensor:
        value = self._section.weight * (lengths - average).square().mean()
        self._statistics.add(NAME, value, len(lengths))
        return value

    def _moved(self) -> Tensor:
        """Return the average, moved by the mean of the lengths seen in this update."""
        total, number = self._seen.unbind()
        return torch.lerp(self._average, total / number, self._section.decay)

    def state(self) -> dict[str, Tensor]:
        """Return the average, (1,)."""
        return {"average": self._average}


class Probed:
    """The sum of images times y, times ``scale``; only its gradient, J^T y at the styles, leaves G."""

    differentiates_inputs = False
    reads_features = False
    num_segments = 1
    scale = 2.0**6  # fp16 would flush small gradients at the styles to 0; a power of two changes nothing in other types

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the scaled sum for images (n, C, H, W) and inputs that end in seeds (n,)."""
        return self.scale * probe(outputs, inputs).sum()


def probe(images: Tensor, inputs: MicroBatch, shrink: int = 1) -> Tensor:
    """Return every shrink-th of the images (n, C, H, W), or their tangents, times y, drawn from the inputs' seeds."""
    pixels = images.shape[2] * images.shape[3]
    y = noise.normal(inputs[-1][::shrink], _STREAM, tuple(images.shape[1:])) / math.sqrt(pixels)
    return images[::shrink] * y


def _lengths(grads: Tensor) -> Tensor:
    """(n, L, W) -> (n,): the root of the mean over L of |grads|^2."""
    return grads.square().sum(dim=2).mean(dim=1).sqrt()
