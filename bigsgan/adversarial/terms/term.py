"""A term: one part of a network's loss, with what it reads, when it is due, its value, its statistics and its state.

Its value is a mean over samples. The mean over micro-batches and replicas is then that over the batch, in any layout. A
term from outside may instead be a function of means over a micro-batch on all ranks (``own.OfMeans``).

D sees a batch in segments: ``real`` and ``fake`` images, and those that terms add, of all samples or one of so many. Of
each segment S a term of D may read ``S_logits``, and ``S_gradients``, the gradients of D's logits at the images.

Shapes: n samples of a micro-batch on one replica, images and gradients (n, C, H, W), images in [-1, 1], labels (n,),
logits (n,), or (n, P) of P patches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.terms.judged import LOGITS_ALONE, JudgedOutputs
from bigsgan.engines import LossFunction, MicroBatch, Outcome, Regularizer
from bigsgan.monitor import Statistics

IMAGES = ("images", "real_images", "labels", "latents", "input_images")
"""What a term of G may read where images arrive at D: G's images, real ones, classes, and what G makes images from."""

LOGITS = ("fake_logits", "real_logits")
"""What a term may read where D's logits are computed."""

GRADIENTS = ("fake_gradients", "real_gradients")
"""What a term of D may read beside: the gradients of D's logits at the images."""

FEATURES = "features"
"""Outputs of D's layers before the last, each (2 * n, ...), at real images and at G's. A term of G may read them."""

Sum = Callable[[Tensor], Tensor]
"""Sums a vector on the device elementwise over the ranks; the identity on one rank."""


class Term:
    """A part of a network's loss. A subclass gives ``value``, or ``loss`` where it records more than a value.

    Attributes:
        name: Its name in the recipe.
        network: The network whose loss it enters.
        reads: Names of what it reads, those of the arguments of ``value``; none if it only observes logits.
        every: It is due in every so many steps of D or updates of G.
        factor: Factor of its value in the loss.
        statistics: Names of what it records, the first that of its value; ``loss/<name>`` by default.
        entry: Name of its state in checkpoints; empty if it has none. A term with state is a ``SharedState`` too.
        segments: Names of the segments that it adds to D's batch.
        shrink: Of how many samples these segments have one, and ``S_gradients`` too.
        of_outputs: Whether it reads what G returns after its images.
        judged: What D returns after its logits, if it knows.
        targets: Computes what it compares D's predictions with, given real images as shown and D's seeds, if it does.
    """

    entry = ""
    of_outputs = False
    segments: tuple[str, ...] = ()
    shrink = 1
    judged: JudgedOutputs | None = None
    targets: Callable[..., MicroBatch] | None = None
    value: Callable[..., Tensor]  # the mean over the samples, a scalar, of what it reads by name

    def __init__(
        self, name: str, network: str, reads: tuple[str, ...] = (), every: int = 1, factor: float = 1.0
    ) -> None:
        self.name, self.network, self.reads, self.every, self.factor = name, network, reads, every, factor
        self.statistics: tuple[str, ...] = (f"loss/{name}",)

    @property
    def of_images(self) -> bool:
        """Whether it reads images, which arrive at D's first layer."""
        return bool(self.reads) and self.reads[0] in IMAGES and not self.of_outputs

    @property
    def differentiates(self) -> tuple[str, ...]:
        """Names of the segments at whose images it reads D's gradients."""
        return tuple(name.removesuffix("_gradients") for name in self.reads if name.endswith("_gradients"))

    def is_due(self, number: int) -> bool:
        """Whether D's step, or G's update, of this number has it."""
        return number % self.every == 0

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return what it adds to the loss of a micro-batch, a scalar, and record its value."""
        value = self.value(**{name: read[name] for name in self.reads})
        statistics.add(self.statistics[0], value, len(read[self.reads[0]]))
        return self.factor * value

    def begin_update(self, weights: Mapping[str, float]) -> None:
        """Take the weights that this update's schedule gives, by name."""

    def noise(
        self, draws: SampleDraws, counters: tuple[int, ...], samples: range, real: Tensor, fake: Tensor
    ) -> Tensor | None:
        """Draw the random numbers that its segments need, if any."""
        return None

    def added(self, real: MicroBatch, fake: MicroBatch, noise: Tensor | None) -> list[MicroBatch]:
        """Return the segments that it adds to D's batch, as ``segments`` names them."""
        return []

    def observe(self, real: Tensor, fake: Tensor) -> None:
        """Observe D's logits at this rank's real and fake images of a micro-batch of D's steps."""

    def finish_update(self, update: int, applied: Outcome) -> None:
        """End update number ``update`` (from 0) of its network, applied or skipped. A collective: all ranks call it.

        Its state is the same on all ranks then, as a checkpoint may be taken.
        """


class FunctionTerm(Term):
    """A term whose value is that of a function."""

    def __init__(
        self,
        name: str,
        network: str,
        weight: float,
        reads: tuple[str, ...],
        function: Callable[..., Tensor],
        every: int = 1,
    ) -> None:
        """Take a function of what it reads, by name; in each of its turns it counts ``every`` times."""
        super().__init__(name, network, reads, every, every * weight)
        self.value = function


class InnerTerm(Term, Regularizer):
    """A term of a tensor inside G, which enters G's own passes; an update has one at most.

    A double backward takes ``forward`` and ``penalty``, which records the value. In forward mode G is first
    differentiated at that tensor: ``direction`` makes the direction of its tangents, and ``along`` a loss of the
    images' tangents.

    Attributes:
        ahead: Number of G's layers before that tensor.
        probe: The loss that is differentiated.
    """

    ahead: int
    probe: LossFunction

    @abstractmethod
    def taking_part(self, inputs: MicroBatch) -> MicroBatch:
        """Return the samples of a micro-batch that take part."""

    @abstractmethod
    def direction(self, grads: Tensor) -> Tensor:
        """Return the tensor's tangents, given the gradient of ``probe`` at it, and record the value."""


def due(terms: Iterable[Term], network: str, number: int) -> list[Term]:
    """Return the terms of a network that its step of this number has."""
    return [term for term in terms if term.network == network and term.is_due(number)]


def judged_of(terms: Iterable[Term]) -> JudgedOutputs:
    """Return what D returns after its logits, as a term knows it; nothing if none does."""
    return next((term.judged for term in terms if term.judged is not None), LOGITS_ALONE)


def targets_of(terms: Iterable[Term]) -> Callable[..., MicroBatch] | None:
    """Return what computes the targets of D's predictions, if a term compares them."""
    return next((term.targets for term in terms if term.targets is not None), None)


def inner_term(terms: Iterable[Term]) -> InnerTerm | None:
    """Return the term of a tensor inside G, if there is one."""
    found = [term for term in terms if isinstance(term, InnerTerm)]
    assert len(found) < 2, "an update has one term of a tensor inside G at most"
    return found[0] if found else None


def images_read(
    images: Tensor, conditions: MicroBatch, real: Tensor | None, latents: Tensor | None = None
) -> dict[str, Tensor]:
    """Return what terms of images read, by name.

    Args:
        images: Images (n, C, H, W) that G made.
        conditions: D's inputs beside them: labels (n,), and the input images of pairs.
        real: The real images of the batch, which G reads too if it makes images from images that are no pairs; None if
            no term reads any.
        latents: Those that G made the images from (n, Z), if a term reads them.
    """
    labels, *inputs = conditions if latents is None else conditions[:1]
    read = {"images": images, "labels": labels}
    found = {"real_images": real, "latents": latents, "input_images": inputs[0] if inputs else real}
    return read | {name: each for name, each in found.items() if each is not None}


def image_gradient(terms: Sequence[Term], read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
    """Return the gradient of the terms' sum at G's images of one micro-batch, (n, C, H, W) float32."""
    images = read["images"].detach().requires_grad_()
    with torch.enable_grad():
        total = torch.stack([term.loss({**read, "images": images}, statistics) for term in terms]).sum()
        (found,) = torch.autograd.grad(total, images)
    return found
