"""What each network minimises: an adversarial loss on logits, and for D the gradient penalties.

D sees one concatenated batch in equal segments: real, fake, and with a finite-difference penalty the perturbed copies.
Shapes: n samples in a segment, S segments, images (S * n, C, H, W), logits (S * n,), or (S * n, P) of P patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from bigsgan.adversarial.losses import LOSSES
from bigsgan.adversarial.watchers import LogitAnchors, LogitWatcher
from bigsgan.config.sections import Objective, Penalty
from bigsgan.engines import MicroBatch
from bigsgan.monitor import Statistics

# fp16 would flush small gradients at the images to 0. A power of two changes nothing in the other types.
_PENALTY_SCALE = 2.0**10

_GRADIENTS = ("r1", "r2")
GRADIENT_PENALTY = "gradient_penalty"


def statistic_names(section: Objective) -> list[str]:
    """Names of the statistics that the objectives add to, where the logits or the images are."""
    names = ["loss/generator", "loss/discriminator"]
    names += [f"{kind}/{images}" for kind in ("logits", "accuracy") for images in ("real", "fake")]
    names += [f"loss/{name}" for name in ("l1", "feature_matching") if getattr(section, name)]
    return names + [f"penalty/{name}" for name in (*_GRADIENTS, GRADIENT_PENALTY, "lecam") if getattr(section, name)]


class DiscriminatorObjective:
    """D's loss for one phase.

    Attributes:
        penalised: Whether this phase carries R1 or R2.
        reads_features: See LossFunction.
    """

    reads_features = False

    def __init__(
        self,
        section: Objective,
        statistics: Statistics,
        phase: int,
        penalty_weights: Mapping[str, float] = MappingProxyType({}),
        watchers: Sequence[LogitWatcher] = (),
        anchors: LogitAnchors | None = None,
    ) -> None:
        """Decide what discriminator phase number ``phase`` minimises. R1 and R2 share one interval.

        Args:
            section: The game.
            statistics: Where losses and logits are added.
            phase: Number of the discriminator's update, from 0.
            penalty_weights: Of ``r1`` and ``r2``, where they are not those of the section.
            watchers: Who is shown the logits.
            anchors: Of LeCam's regularisation.
        """
        self._watchers, self._anchors, self._section = watchers, anchors, section
        self._loss = LOSSES[section.loss]
        self._statistics = statistics
        self._penalties: dict[str, Penalty] = {}
        if section.r1:
            self._penalties["r1"] = section.r1
        if section.r2:
            self._penalties["r2"] = section.r2
        self._weights = {name: penalty_weights.get(name, p.weight) for name, p in self._penalties.items()}
        self.penalised = any(phase % penalty.every == 0 for penalty in self._penalties.values())

    @property
    def differentiates_inputs(self) -> bool:
        """Whether the loss of this phase has the gradient of the logits by the images."""
        return self._is_exact or self.interpolates

    @property
    def _is_exact(self) -> bool:
        """Whether this phase carries R1 or R2 in exact form."""
        return self.penalised and not self.perturbed

    @property
    def perturbed(self) -> list[str]:
        """Penalties in finite-difference form, if this phase carries them."""
        if not self.penalised:
            return []
        return [name for name, penalty in self._penalties.items() if penalty.form == "finite_difference"]

    @property
    def num_segments(self) -> int:
        """Segments of a concatenated micro-batch."""
        return 2 + len(self.perturbed) + self.interpolates

    @property
    def interpolates(self) -> bool:
        """Whether the last segment lies between real and fake images."""
        return self._section.gradient_penalty is not None

    def batch(self, real: MicroBatch, fake: MicroBatch, noise: dict[str, Tensor]) -> MicroBatch:
        """Concatenate the segments of one micro-batch.

        Args:
            real: Images (n, C, H, W) in [-1, 1] and what else D reads, such as labels (n,).
            fake: The same of the generator.
            noise: Standard normal noise (n, C, H, W) for each penalty in ``perturbed``; for the gradient penalty the
                share of each real image, (n, 1, 1, 1) in (0, 1).
        """
        segments = [real, fake]
        for name in self.perturbed:
            images, *rest = real if name == "r1" else fake
            segments.append((images + self._penalties[name].sigma * noise[name], *rest))
        if self.interpolates:
            images, *rest = real
            segments.append((torch.lerp(fake[0], images, noise[GRADIENT_PENALTY]), *rest))
        return _join(segments)

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Loss of the logits of a concatenated micro-batch.

        With tangents of the logits along ``slopes``, its value lacks the exact penalties; its gradient has theirs.
        """
        segments = outputs.chunk(self.num_segments)
        real, fake = segments[0], segments[1]
        loss = self._loss.discriminator(real, fake)
        self._record(loss, real, fake)
        if self._anchors is not None and self._section.lecam:
            loss = loss + self._add("lecam", self._section.lecam.weight * self._anchors.penalty(real, fake))
        squares: dict[str, Tensor] = {}
        if tangents is not None:
            along = tangents.float().chunk(self.num_segments)
            for name, factor in self._factors().items():
                own = along[self._segment(name)]
                loss = loss + factor * own.sum() / len(own)  # a mean over samples, of the sum of their patches
        elif self.differentiates_inputs:
            gradients = self._squared_gradients(outputs, inputs[0])
            if self._is_exact:
                squares = {name: gradients[self._segment(name)] for name in self._penalties}
            if self._section.gradient_penalty:
                deviation = _norm(gradients[-1]) - 1
                loss = loss + self._add(
                    GRADIENT_PENALTY, self._section.gradient_penalty.weight * deviation.square().mean()
                )
        for name, moved in zip(self.perturbed, segments[2:], strict=False):
            squares[name] = self._squared_slope(name, real, fake, moved)
        for name, square in squares.items():
            loss = loss + self._penalties[name].every * self._add(name, self._weights[name] / 2 * square.mean())
        return loss

    def slopes(self, grads: Tensor) -> Tensor:
        """The direction along which D's tangents are carried, and note of the exact penalties.

        A penalty E[phi(|g|)] has the gradient of factor * E[tangent of the logit] along slopes = phi'(|g|) g / |g|, up
        to what ``_factors`` has of it.

        Args:
            grads: Of the sum of the logits at the images, (S * n, C, H, W) float32.

        Returns:
            As large; zero in segments without a penalty.
        """
        segments = grads.chunk(self.num_segments)
        found = [torch.zeros_like(segment) for segment in segments]
        for name in self._factors():
            own = segments[self._segment(name)]
            square = own.square().sum(dim=(1, 2, 3))
            slope: Tensor | float = 1.0
            if name == GRADIENT_PENALTY:
                assert self._section.gradient_penalty is not None
                norm = _norm(square)
                self._add(name, self._section.gradient_penalty.weight * (norm - 1).square().mean())
                slope = (2 * (norm - 1) / norm).view(-1, 1, 1, 1)
            else:
                self._add(name, self._weights[name] / 2 * square.mean())
            found[self._segment(name)] = own * slope
        return torch.cat(found)

    def _factors(self) -> dict[str, float]:
        """Of the tangents' means, by exact penalty."""
        found = {}
        if self._is_exact:
            found = {name: penalty.every * self._weights[name] for name, penalty in self._penalties.items()}
        if self._section.gradient_penalty:
            found[GRADIENT_PENALTY] = self._section.gradient_penalty.weight
        return found

    def _segment(self, name: str) -> int:
        """The segment at whose images a penalty takes D's gradient."""
        return {"r1": 0, "r2": 1, GRADIENT_PENALTY: self.num_segments - 1}[name]

    def _add(self, name: str, value: Tensor) -> Tensor:
        """Take note of a penalty."""
        self._statistics.add(f"penalty/{name}", value.detach())
        return value

    def _squared_gradients(self, logits: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        """|grad of each logit at its image|^2, by segment: (n,) each."""
        (grads,) = torch.autograd.grad((logits * _PENALTY_SCALE).sum(), images, create_graph=True)
        return (grads.float() / _PENALTY_SCALE).square().sum(dim=(1, 2, 3)).chunk(self.num_segments)

    def _squared_slope(self, name: str, real: Tensor, fake: Tensor, moved: Tensor) -> Tensor:
        """((D(x + sigma e) - D(x)) / sigma)^2, whose mean over e is |grad|^2 to first order: (n,)."""
        still = real if name == "r1" else fake
        return ((moved - still) / self._penalties[name].sigma).flatten().view(len(still), -1).sum(dim=1).square()

    def _record(self, loss: Tensor, real: Tensor, fake: Tensor) -> None:
        real, fake = real.detach(), fake.detach()
        for watcher in self._watchers:
            watcher.observe(real, fake)
        self._statistics.add("loss/discriminator", loss.detach())
        self._statistics.add("logits/real", real)
        self._statistics.add("logits/fake", fake)
        self._statistics.add("accuracy/real", (real > 0).float())
        self._statistics.add("accuracy/fake", (fake < 0).float())


class InputGradients:
    """The sum of D's logits, of which only the gradient at the images leaves D, times ``scale``.

    Its scale is its own: G's updates tell nothing of how steep D is, and D's of what D's slope may be multiplied with.
    """

    differentiates_inputs = False
    reads_features = False
    scale = _PENALTY_SCALE

    def __init__(self, num_segments: int) -> None:
        self.num_segments = num_segments

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Of the logits of a concatenated micro-batch."""
        return self.scale * outputs.float().sum()


class GeneratorObjective:
    """G's loss, of which only the gradient at the fake images leaves D."""

    differentiates_inputs = False

    def __init__(self, section: Objective, statistics: Statistics) -> None:
        self._loss = LOSSES[section.loss]
        self._statistics = statistics
        self._matching = section.feature_matching
        self.reads_features = self._matching > 0
        self.pairs = self._loss.pairs or self.reads_features

    @property
    def num_segments(self) -> int:
        """Segments of what D sees; the fakes are the last."""
        return 2 if self.pairs else 1

    def batch(self, real: MicroBatch | None, fake: MicroBatch) -> MicroBatch:
        """What D sees: the fakes, after the reals if the loss pairs them."""
        return fake if real is None else _join([real, fake])

    def __call__(
        self, outputs: Tensor, inputs: MicroBatch, features: Sequence[Tensor] = (), tangents: Tensor | None = None
    ) -> Tensor:
        """Loss of the logits of ``batch``."""
        real, fake = outputs.chunk(2) if self.pairs else (outputs, outputs)
        loss = self._loss.generator(real, fake)
        self._statistics.add("loss/generator", loss.detach())
        return loss + self._feature_matching(features) if self.reads_features else loss

    def _feature_matching(self, features: Sequence[Tensor]) -> Tensor:
        """Mean over D's layers of the mean |real - fake| (Wang et al. 2018, arXiv 1711.11585, equation 4)."""
        distances = []
        for feature in features:
            real, fake = feature.float().chunk(2)  # float32: a mean over many small differences
            distances.append((fake - real.detach()).abs().mean())
        distance = torch.stack(distances).mean()
        self._statistics.add("loss/feature_matching", distance.detach())
        return self._matching * distance


class Reconstruction:
    """The part of G's loss that looks at images and not at logits: ``weight`` times the mean of |image - target|."""

    def __init__(self, weight: float, statistics: Statistics) -> None:
        self._weight, self._statistics = weight, statistics

    def grads(self, images: Tensor, targets: Tensor) -> Tensor:
        """d(loss)/d(images) of one micro-batch, (n, C, H, W)."""
        difference = images.detach() - targets
        self._statistics.add("loss/l1", difference.abs())
        return difference.sign() * (self._weight / difference.numel())


def _norm(square: Tensor) -> Tensor:
    return (square + 1e-12).sqrt()  # the square root has no gradient at 0


def _join(segments: list[MicroBatch]) -> MicroBatch:
    """Concatenate each entry over the segments."""
    return tuple(torch.cat(entries) for entries in zip(*segments, strict=True))
