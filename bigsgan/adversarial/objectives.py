"""The objective of each network, the sum of its terms, as a loss of D's logits.

D sees one concatenated batch in segments: real, fake, and those that terms add (segments.py). If G makes several images
of a sample, D sees them stacked along the channels. A real image is repeated instead, and D's gradient at a real image
is by the one image.

Shapes: n samples in a segment, or n / k in those that terms add, N in all, images (N, C, H, W), logits (N,), or (N, P)
of P patches. What D returns beside its logits lies behind them in the same tensor, which is called D's outputs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.segments import Division
from bigsgan.adversarial.terms import (
    FEATURES,
    LOGITS_ALONE,
    PREDICTED,
    FiniteDifference,
    JudgedOutputs,
    Term,
    due,
    judged_of,
)
from bigsgan.config.objective import Segments, num_differentiated
from bigsgan.engines import MicroBatch
from bigsgan.models.precision import full
from bigsgan.monitor import Statistics

# fp16 would flush small gradients at the images to 0. In other types a power of two changes nothing.
_GRADIENT_SCALE = 2.0**10


class DiscriminatorObjective:
    """D's loss for one of its steps.

    Attributes:
        checked: The finite differences that are compared with the exact penalty, in a phase before D trains.
        segments: The segments of this step's micro-batches.
        judged: What D returns after its logits.
        num_segments: Number of segments of a concatenated micro-batch.
        num_differentiated: Number of segments at whose images D is differentiated.
        reads_features: See LossFunction.
    """

    reads_features = False

    def __init__(
        self,
        terms: Iterable[Term],
        statistics: Statistics,
        d_step: int,
        images_per_sample: int = 1,
        learns: bool = True,
    ) -> None:
        """Take the terms that are due.

        Args:
            terms: Those of the game.
            statistics: Collects losses and logits.
            d_step: Number of D's step in the run, from 0.
            images_per_sample: Number of images of a sample that G makes.
            learns: Whether the loss counts; if not, it is multiplied by 0.
        """
        self._statistics, self._images_per_sample, self._learns = statistics, images_per_sample, learns
        self._terms = due(terms, "discriminator", d_step)
        self.judged = judged_of(self._terms)
        self.checked = [term for term in self._terms if isinstance(term, FiniteDifference) and term.is_checked(d_step)]
        self._of_gradients = [term for term in self._terms if term.differentiates]
        self._of_logits = [term for term in self._terms if term.reads and not term.differentiates]
        self._names = ["real", "fake", *(name for term in self._terms for name in term.segments)]
        self.num_segments = len(self._names)
        at = {segment for term in self._of_gradients for segment in term.differentiates}
        self.num_differentiated = num_differentiated(at, self.num_segments)
        self.segments = Segments(self.num_segments, self.num_differentiated, bool(self.checked))
        shrink = max((term.shrink for term in self._terms), default=1)
        self._division = Division(self.num_segments, self.num_differentiated, shrink)

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss of this step contains the gradient of the logits by the images."""
        return bool(self._of_gradients)

    def noise(
        self, draws: SampleDraws, counters: tuple[int, ...], samples: range, real: Tensor, fake: Tensor
    ) -> dict[str, Tensor]:
        """Draw what the terms need of random numbers beside the images, by term, as ``batch`` takes it."""
        shrink = self._division.shrink
        part = range(samples.start // shrink, samples.stop // shrink)  # numbers of the samples that penalties use
        found = {term.name: term.noise(draws, counters, part, real, fake) for term in self._terms}
        return {name: noise for name, noise in found.items() if noise is not None}

    def reals(self, real: MicroBatch) -> MicroBatch:
        """Return the first segment of ``batch``."""
        images, *rest = real
        return _repeated(images, self._images_per_sample * images.shape[1]), *rest

    def differentiated(self, inputs: MicroBatch) -> MicroBatch:
        """Return what belongs to the images that penalties differentiate at, of ``reals`` if these suffice, or all."""
        if self.num_differentiated == 1:
            return tuple(entry[:: self._division.shrink] for entry in inputs)
        return self.split(inputs)[0]

    def split(self, inputs: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """Return the same of a whole micro-batch, and the rest; there is none if penalties use all images."""
        if self._division.shrink == 1:
            return inputs, ()
        first, rest = zip(*(self._division.split(entry) for entry in inputs), strict=True)
        return first, rest

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """Join D's outputs of what was split."""
        return self._division.join(first, rest)

    def batch(self, real: MicroBatch, fake: MicroBatch, noise: dict[str, Tensor]) -> MicroBatch:
        """Concatenate the segments of one micro-batch.

        Args:
            real: Images (n, C, H, W) in [-1, 1] and D's other inputs, such as labels (n,).
            fake: The same of the generator, its images (n, images_per_sample * C, H, W).
            noise: What ``noise`` has drawn.
        """
        used_real, used_fake = (tuple(each[:: self._division.shrink] for each in inputs) for inputs in (real, fake))
        added = [each for term in self._terms for each in term.added(used_real, used_fake, noise.get(term.name))]
        return _join([real, fake, *added])

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the loss of D's outputs for a concatenated micro-batch.

        A penalty that is differentiated twice goes through ``inputs`` that ``split`` returned first.
        With tangents of the outputs along ``slopes``, its gradient contains that of the terms that read gradients; its
        value does not contain them. ``features`` are D's predictions of a teacher's features of real images, then these
        features.
        """
        read: dict[str, Any] = {}
        for name, each in self._by_segment(outputs).items():
            read |= self.judged.read(name, each)
        read |= zip(PREDICTED, features, strict=False)
        real, fake = read["real_logits"].detach(), read["fake_logits"].detach()
        for term in self._terms if self._learns else ():
            term.observe(real, fake)
        loss = _total(self._of_logits, read, self._statistics)
        if tangents is not None:
            loss = loss + self.judged.logits(tangents).sum()
        elif self._of_gradients:
            scaled = self.judged.logits(outputs) * _GRADIENT_SCALE
            (grads,) = torch.autograd.grad(scaled.sum(), inputs[0], create_graph=True)
            num = self.num_segments if self._division.shrink == 1 else self.num_differentiated
            loss = loss + self._of_slopes((full(grads) / _GRADIENT_SCALE).chunk(num))
        return loss if self._learns else 0.0 * loss

    def slopes(self, grads: Tensor) -> Tensor:
        """Return the direction v along which D's tangents are carried, and record the terms that read gradients.

        Their sum P is a function of the gradients g. As dP/dtheta = <dP/dg, dg/dtheta>, the gradient of <v, g> with
        fixed v = dP/dg is that of P.

        Args:
            grads: Gradients of the sum of the logits at the images that ``differentiated`` returns, (P * n / k, C, H,
                W) float32, with P = ``num_differentiated``.

        Returns:
            v, for all images, (N, C, H, W); zero at those without a penalty.
        """
        with torch.enable_grad():
            grads = grads.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._of_slopes(grads.chunk(self.num_differentiated)), grads)
        return self._division.join(found)

    def note_slopes(self, outputs: Tensor) -> None:
        """Record the squared slopes by finite differences, given D's outputs for a checked micro-batch."""
        for term in self.checked:
            term.check_logits(self._by_segment(self.judged.logits(outputs)), self._statistics)

    def note_gradients(self, images: Tensor, grads: Tensor) -> None:
        """Record the exact penalties of a checked micro-batch, and the exact slopes.

        Args:
            images: Images of the micro-batch, (N, C, H, W).
            grads: Gradients of the sum of the logits at these images, of the same shape.
        """
        for term in self.checked:
            gradients = self._gradients(self._division.segments(grads))
            term.check_gradients(self._by_segment(images), gradients, self._statistics)

    def _by_segment(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the segments of a concatenated tensor by name."""
        return dict(zip(self._names, self._division.segments(whole), strict=True))

    def _gradients(self, segments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients (n, C, H, W) by name, given the first or all segments of them.

        A real image is repeated, so its own is the sum over the copies.
        """
        found = dict(zip(self._names, segments, strict=False))
        found["real"] = found["real"].unflatten(1, (self._images_per_sample, -1)).sum(dim=1)
        return found

    def _of_slopes(self, segments: Sequence[Tensor]) -> Tensor:
        """Return the sum of the terms that read gradients, given those at the images of the first or all segments."""
        read = {f"{name}_gradients": each for name, each in self._gradients(segments).items()}
        return torch.stack([term.loss(read, self._statistics) for term in self._of_gradients]).sum()


class InputGradients:
    """The sum of D's logits, times ``scale``; only its gradient at the images leaves D.

    The scale is fixed: neither G's nor D's loss scale says how far this gradient may be scaled without overflow.
    """

    differentiates_inputs = False
    reads_features = False
    scale = _GRADIENT_SCALE

    def __init__(
        self,
        num_segments: int,
        watch: Callable[[Tensor], None] | None = None,
        judged: JudgedOutputs = LOGITS_ALONE,
    ) -> None:
        """Sum the logits of ``num_segments`` segments, after showing D's outputs to ``watch``."""
        self.num_segments, self._watch, self._judged = num_segments, watch, judged

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the scaled sum of the logits of a concatenated micro-batch."""
        if self._watch is not None:
            self._watch(outputs)
        return self.scale * self._judged.logits(outputs).float().sum()


class GeneratorObjective:
    """G's loss; only its gradient at the fake images leaves D."""

    differentiates_inputs = False

    def __init__(self, terms: Iterable[Term], statistics: Statistics, update: int = 0, pairs: bool = False) -> None:
        """Take the terms that are due in an update; ``pairs`` is whether D judges real images too."""
        found = due(terms, "generator", update)
        of_logits = [term for term in found if term.reads and not (term.of_images or term.of_outputs)]
        self._terms, self._statistics, self.pairs = of_logits, statistics, pairs
        self._judged = judged_of(found)
        self.reads_features = any(FEATURES in term.reads for term in of_logits)

    @property
    def num_segments(self) -> int:
        """Number of segments that D sees; the fakes are the last."""
        return 2 if self.pairs else 1

    def batch(self, real: MicroBatch | None, fake: MicroBatch) -> MicroBatch:
        """Return D's inputs: the fakes, after the reals if the loss pairs them."""
        return fake if real is None else _join([real, fake])

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the loss of D's outputs for ``batch``."""
        real, fake = outputs.chunk(2) if self.pairs else (outputs, outputs)
        read: dict[str, Any] = {
            **self._judged.read("real", real),
            **self._judged.read("fake", fake),
            FEATURES: features,
        }
        return _total(self._terms, read, self._statistics)


def _total(terms: Iterable[Term], read: Mapping[str, Any], statistics: Statistics) -> Tensor:
    """Return the sum of the terms' losses, one after the other."""
    return functools.reduce(torch.add, (term.loss(read, statistics) for term in terms))


def _join(segments: list[MicroBatch]) -> MicroBatch:
    """Concatenate each entry over the segments; real images are repeated once for each image of a sample."""
    channels = max(images.shape[1] for images, *_ in segments)
    repeated = [(_repeated(images, channels), *rest) for images, *rest in segments]
    return tuple(torch.cat(entries) for entries in zip(*repeated, strict=True))


def _repeated(images: Tensor, channels: int) -> Tensor:
    """(n, C, H, W) -> (n, channels, H, W)."""
    return images.repeat(1, channels // images.shape[1], 1, 1) if images.shape[1] < channels else images
