"""The objective of each network: an adversarial loss on logits, and for D the gradient penalties.

D sees one concatenated batch in equal segments: real, fake, perturbed copies for a finite-difference penalty, and
points between real and fake for a gradient penalty. If G makes several images of a sample, D sees them stacked along
the channels. A real image is repeated instead, and penalties at real images take D's gradient by the one image.
Shapes: n samples in a segment, S segments, images (S * n, C, H, W), logits (S * n,), or (S * n, P) of P patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from bigsgan.adversarial.extras import Extras
from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.losses import LOSSES, AdversarialLoss
from bigsgan.adversarial.teacher import distances
from bigsgan.adversarial.terms import weighted
from bigsgan.config.objective import Objective, OwnLoss
from bigsgan.engines import MicroBatch
from bigsgan.models.precision import full
from bigsgan.monitor import Statistics

# fp16 would flush small gradients at the images to 0. In other types a power of two changes nothing.
_PENALTY_SCALE = 2.0**10

_SEGMENTS = {"r1": 0, "r2": 1}
"""Number of the segment at whose images each takes D's gradient."""

GRADIENT_PENALTY = "gradient_penalty"
_NONE = Extras()


def statistic_names(section: Objective) -> list[str]:
    """Return the names of the objectives' statistics."""
    names = ["loss/generator", "loss/discriminator"]
    names += [f"{kind}/{images}" for kind in ("logits", "accuracy") for images in ("real", "fake")]
    names += ["teacher/class", "teacher/patch"] if section.teacher else []
    names += [f"loss/{name}" for name in ("l1", "feature_matching", "consistency") if getattr(section, name)]
    names += [f"loss/{term.label}" for term in section.terms]
    for name, penalty in section.gradient_norms.items():
        if penalty.form == "finite_difference" and penalty.check_every:
            names += [f"penalty/{name}_exact", f"slope/{name}", f"slope/{name}_exact"]
    return names + [f"penalty/{name}" for name in (*_SEGMENTS, GRADIENT_PENALTY, "lecam") if getattr(section, name)]


class DiscriminatorObjective:
    """D's loss for one of its steps.

    Attributes:
        perturbed: Which of R1 and R2 this step carries as finite differences.
        checked: Which of these are compared with the exact penalty, in a phase before D trains.
        segments: The segments of this step's micro-batches.
        num_segments: Number of segments of a concatenated micro-batch.
        num_differentiated: Number of segments at whose images D is differentiated for exact penalties.
        reads_features: See LossFunction.
    """

    reads_features = False

    def __init__(
        self,
        section: Objective,
        statistics: Statistics,
        d_step: int,
        penalty_weights: Mapping[str, float] = MappingProxyType({}),
        extras: Extras = _NONE,
    ) -> None:
        """Choose the loss of D's step number ``d_step``. R1 and R2 share one interval.

        Args:
            section: The recipe's objective.
            statistics: Collects losses and logits.
            d_step: Number of D's step in the run, from 0.
            penalty_weights: Weights of ``r1`` and ``r2`` that replace those of the section.
            extras: Those that observe the logits, and the number of images of a sample.
        """
        self._section, self._extras, self._images_per_sample = section, extras, extras.images_per_sample
        self._loss = _loss_of(section, extras)
        self._terms = [term for term in extras.terms if term.network == "discriminator"]
        self._statistics = statistics
        self._penalties, self.checked = section.due(d_step), section.checked(d_step)
        self._weights = {name: penalty_weights.get(name, p.weight) for name, p in section.gradient_norms.items()}
        self.perturbed = [name for name, p in self._penalties.items() if p.form == "finite_difference"]
        self._ends, num = dict[str, tuple[int, int]](), 2
        for name in self.perturbed:
            self._ends[name] = num, num + 1 if self._penalties[name].antithetic else _SEGMENTS[name]
            num += 1 + self._penalties[name].antithetic
        self.segments = section.segments(d_step)
        self.num_segments, self.num_differentiated, _ = self.segments
        assert self.num_segments == num + self.interpolates, "each segment belongs to a penalty, or is real or fake"
        self._exact = {name: _SEGMENTS[name] for name in self._penalties if name not in self.perturbed}
        if self.interpolates:
            self._exact[GRADIENT_PENALTY] = num

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss of this step contains the gradient of the logits by the images."""
        return bool(self._exact)

    @property
    def interpolates(self) -> bool:
        """Whether the last segment lies between real and fake images."""
        return self._section.gradient_penalty is not None

    def noise(
        self, draws: SampleDraws, counters: tuple[int, ...], samples: range, real: Tensor, fake: Tensor
    ) -> dict[str, Tensor]:
        """Draw what the penalties need of random numbers beside the images, by penalty, as ``batch`` takes it."""
        found = {}
        for name in self.perturbed:
            found[name] = draws.normal(name, counters, samples, tuple((real, fake)[_SEGMENTS[name]].shape[1:]))
        if self.interpolates:
            found[GRADIENT_PENALTY] = draws.uniform(GRADIENT_PENALTY, counters, samples, (1, 1, 1))
        return found

    def reals(self, real: MicroBatch) -> MicroBatch:
        """Return the first segment of ``batch``."""
        images, *rest = real
        return _repeated(images, self._images_per_sample * images.shape[1]), *rest

    def batch(self, real: MicroBatch, fake: MicroBatch, noise: dict[str, Tensor]) -> MicroBatch:
        """Concatenate the segments of one micro-batch.

        Args:
            real: Images (n, C, H, W) in [-1, 1] and D's other inputs, such as labels (n,).
            fake: The same of the generator, its images (n, images_per_sample * C, H, W).
            noise: For each penalty in ``perturbed`` standard normal noise, of the shape of the images; for the gradient
                penalty the share of each real image, (n, 1, 1, 1) in (0, 1).
        """
        segments = [real, fake]
        for name in self.perturbed:
            images, *rest = segments[_SEGMENTS[name]]
            step = self._sigma(name) * noise[name]
            segments.append((images + step, *rest))
            if self._penalties[name].antithetic:
                segments.append((images - step, *rest))
        if self.interpolates:
            images, *rest = real
            between = torch.lerp(fake[0], _repeated(images, fake[0].shape[1]), noise[GRADIENT_PENALTY])
            segments.append((between, *rest))
        return _join(segments)

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the loss of the logits of a concatenated micro-batch.

        With tangents of the logits along ``slopes``, its gradient contains that of the exact penalties; its value does
        not contain them. ``features`` are D's predictions of a teacher's features of real images, then these features.
        """
        segments = outputs.chunk(self.num_segments)
        real, fake = segments[0], segments[1]
        loss = self._loss.discriminator(real, fake)
        self._record(loss, real, fake)
        for value in weighted(self._terms, {"real_logits": real, "fake_logits": fake}, self._statistics):
            loss = loss + value
        if (anchors := self._extras.anchors) is not None and self._section.lecam:
            loss = loss + self._recorded("lecam", self._section.lecam.weight * anchors.penalty(real, fake), len(real))
        if features:
            loss = loss + self._distance_to_teacher(*features)
        if tangents is not None:
            loss = loss + tangents.sum()
        elif self.differentiates_inputs:
            (grads,) = torch.autograd.grad((outputs * _PENALTY_SCALE).sum(), inputs[0], create_graph=True)
            loss = loss + self._exact_penalties((full(grads) / _PENALTY_SCALE).chunk(self.num_segments))
        for name in self.perturbed:
            loss = loss + self._penalty(name, self._squared_slopes(name, segments))
        return loss

    def slopes(self, grads: Tensor) -> Tensor:
        """Return the direction v along which D's tangents are carried, and record the exact penalties.

        The exact penalties P are a function of the gradients g. As dP/dtheta = <dP/dg, dg/dtheta>, the gradient of
        <v, g> with fixed v = dP/dg is that of P.

        Args:
            grads: Gradients of the sum of the logits at the images of the first P = ``num_differentiated`` segments,
                (P * n, C, H, W) float32.

        Returns:
            v, for all segments, (S * n, C, H, W); zero in those without a penalty.
        """
        with torch.enable_grad():
            grads = grads.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._exact_penalties(grads.chunk(self.num_differentiated)), grads)
        rest = len(grads) // self.num_differentiated * (self.num_segments - self.num_differentiated)
        return torch.cat([found, found.new_zeros(rest, *found.shape[1:])])

    def note_slopes(self, outputs: Tensor) -> None:
        """Record the squared slopes by finite differences, given the logits of a checked micro-batch."""
        for name in self.checked:
            self._statistics.add(f"slope/{name}", self._squared_slopes(name, outputs.detach().chunk(self.num_segments)))

    def note_gradients(self, images: Tensor, grads: Tensor) -> None:
        """Record the exact penalties, and the exact squared slopes along the finite differences' directions.

        Both slopes are along the same e, so they differ by the effect of sigma, and not by chance.

        Args:
            images: Images of a checked micro-batch, (S * n, C, H, W).
            grads: Gradients of the sum of the logits at these images, of the same shape.
        """
        segments, at = images.chunk(self.num_segments), grads.chunk(self.num_segments)
        for name in self.checked:
            own, (end, start) = at[_SEGMENTS[name]], self._ends[name]
            direction = (segments[end] - segments[start]) / self._distance(name)
            square = self._squared_norms(own, _SEGMENTS[name])
            self._statistics.add(f"penalty/{name}_exact", self._weights[name] / 2 * square.mean(), len(square))
            self._statistics.add(f"slope/{name}_exact", (own * direction).sum(dim=(1, 2, 3)).square())

    def _distance_to_teacher(self, predicted: Tensor, whole: Tensor, patches: Tensor) -> Tensor:
        assert self._section.teacher is not None, "features are those of a teacher"
        of_class, of_patches = distances(predicted, whole, patches)
        self._statistics.add("teacher/class", of_class, len(predicted))
        self._statistics.add("teacher/patch", of_patches, len(predicted))
        return self._section.teacher.weight * (of_class + of_patches)

    def _exact_penalties(self, segments: Sequence[Tensor]) -> Tensor:
        """Return the sum of the exact penalties, given the gradients of the logits at the images of each segment."""
        return torch.stack([
            self._penalty(name, self._squared_norms(segments[number], number)) for name, number in self._exact.items()
        ]).sum()  # fmt: skip

    def _squared_norms(self, grads: Tensor, segment: int) -> Tensor:
        """Return the squared norms (n,) of a segment's gradients (n, images_per_sample * C, H, W) by its own images.

        A real image is repeated, so its gradient is the sum over its copies.
        """
        if segment == _SEGMENTS["r1"]:
            grads = grads.unflatten(1, (self._images_per_sample, -1)).sum(dim=1)
        return grads.square().sum(dim=(1, 2, 3))

    def _penalty(self, name: str, square: Tensor) -> Tensor:
        """Return the loss's term for a penalty of squared norms (n,): its value, which is recorded, times ``every``."""
        every = 1
        if name == GRADIENT_PENALTY:
            assert self._section.gradient_penalty is not None
            norm = (square + 1e-12).sqrt()  # the square root has no gradient at 0
            value = self._section.gradient_penalty.weight * (norm - 1).square().mean()
        else:
            every = self._penalties[name].every
            value = self._weights[name] / 2 * square.mean()
        return every * self._recorded(name, value, len(square))

    def _squared_slopes(self, name: str, segments: Sequence[Tensor]) -> Tensor:
        """Return ((D(x + sigma e) - D(x)) / sigma)^2, or from x - sigma e, (n,); its mean over e is near |grad|^2."""
        end, start = (full(segments[number]) for number in self._ends[name])
        return ((end - start) / self._distance(name)).view(len(start), -1).sum(dim=1).square()

    def _distance(self, name: str) -> float:
        """Return the distance of the two images of a finite difference, in units of e."""
        return self._sigma(name) * (1 + self._penalties[name].antithetic)

    def _sigma(self, name: str) -> float:
        sigma = self._penalties[name].sigma
        assert sigma is not None, "a plan's objective has a sigma"
        return sigma

    def _recorded(self, name: str, value: Tensor, num: int) -> Tensor:
        """Record a penalty, a mean of ``num`` samples, and return it."""
        self._statistics.add(f"penalty/{name}", value, num)
        return value

    def _record(self, loss: Tensor, real: Tensor, fake: Tensor) -> None:
        real, fake = real.detach(), fake.detach()
        for watcher in self._extras.watchers:
            watcher.observe(real, fake)
        self._statistics.add("loss/discriminator", loss, len(real))
        self._statistics.add("logits/real", real)
        self._statistics.add("logits/fake", fake)
        self._statistics.add("accuracy/real", (real > 0).float())
        self._statistics.add("accuracy/fake", (fake < 0).float())


class InputGradients:
    """The sum of D's logits, times ``scale``; only its gradient at the images leaves D.

    The scale is fixed: neither G's nor D's loss scale says how far this gradient may be scaled without overflow.
    """

    differentiates_inputs = False
    reads_features = False
    scale = _PENALTY_SCALE

    def __init__(self, num_segments: int, watch: Callable[[Tensor], None] | None = None) -> None:
        """Sum the logits of ``num_segments`` segments, after showing them to ``watch``."""
        self.num_segments, self._watch = num_segments, watch

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Return the scaled sum of the logits of a concatenated micro-batch."""
        if self._watch is not None:
            self._watch(outputs)
        return self.scale * outputs.float().sum()


class GeneratorObjective:
    """G's loss; only its gradient at the fake images leaves D."""

    differentiates_inputs = False

    def __init__(self, section: Objective, statistics: Statistics, extras: Extras = _NONE) -> None:
        self._loss = _loss_of(section, extras)
        self._terms = [term for term in extras.terms if term.network == "generator" and not term.of_images]
        self._statistics = statistics
        self._matching = section.feature_matching
        self.reads_features = self._matching > 0
        self.pairs = section.pairs

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
        """Return the loss of the logits of ``batch``."""
        real, fake = outputs.chunk(2) if self.pairs else (outputs, outputs)
        loss = self._loss.generator(real, fake)
        self._statistics.add("loss/generator", loss, len(fake))
        for value in weighted(self._terms, {"real_logits": real, "fake_logits": fake}, self._statistics):
            loss = loss + value
        return loss + self._feature_matching(features) if self.reads_features else loss

    def _feature_matching(self, features: Sequence[Tensor]) -> Tensor:
        """Average the mean |real - fake| over D's layers (Wang et al. 2018, arXiv 1711.11585, equation 4)."""
        distances = []
        for feature in features:
            real, fake = feature.float().chunk(2)  # float32: a mean over many small differences
            distances.append((fake - real.detach()).abs().mean())
        distance = torch.stack(distances).mean()
        self._statistics.add("loss/feature_matching", distance, len(features[0]) // 2)
        return self._matching * distance


def _loss_of(section: Objective, extras: Extras) -> AdversarialLoss:
    """Return the loss on logits; where none was built from outside, as in a planner, a loss of ours stands for it."""
    return extras.loss or LOSSES["hinge" if isinstance(section.loss, OwnLoss) else section.loss]


def _join(segments: list[MicroBatch]) -> MicroBatch:
    """Concatenate each entry over the segments; real images are repeated once for each image of a sample."""
    channels = max(images.shape[1] for images, *_ in segments)
    repeated = [(_repeated(images, channels), *rest) for images, *rest in segments]
    return tuple(torch.cat(entries) for entries in zip(*repeated, strict=True))


def _repeated(images: Tensor, channels: int) -> Tensor:
    """(n, C, H, W) -> (n, channels, H, W)."""
    return images.repeat(1, channels // images.shape[1], 1, 1) if images.shape[1] < channels else images
