"""Base classes of the sections of all model families."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bigsgan.config.data import Data
from bigsgan.config.sections import PositiveFloat, Section, Width
from bigsgan.errors import UserError
from bigsgan.images.size import Size

Depth = Annotated[int, Field(gt=0, le=64)]
"""Number of consecutive layers or blocks."""


class NetworkSection(Section):
    """One network of a family.

    Attributes:
        network: The section's key, ``generator`` or ``discriminator``.
        family: Name of the family, which selects the class of the section.
        draws: Whether the network draws random numbers, such as noise; its inputs then carry a seed for each sample.
        has_styles: Whether its first layer outputs style vectors, which path length regularization needs.
        truncates_w: Whether truncation by psi moves the mapping network's output towards its mean; otherwise latents
            are drawn within a threshold.
        has_guidance: Whether samples of a class may be guided away from those of any class.
        without_half: The setting by which no layer computes in its own half type, see ``computes_in``.
        paired: Whether it reads input images: G instead of latents, D in addition to the images that it judges.
        joins_domains: Whether it reads samples that join images of two domains.
        convolves: Of D: whether it has convolutions, whose double backward is slow on GPUs
            (docs/explanation/penalties.md).
        has_tangents: Whether all of its operations can be differentiated forward, and that backward, as penalties in
            forward mode need; torch's softmax cannot (2.14).
        has_tokens: Whether its last layer reads a class token and patch tokens, from which a teacher's features can
            be predicted.
        has_statistics: Whether some layer keeps statistics while training, of batch norm, spectral norm or styles.
        of_classes: Keys without effect where the data has no classes.
        is_transformer: Whether it consists of a transformer's blocks, whose matrices Muon updates.
        copies_generator: Of D: whether it begins with the weights of the generator of another run.
    """

    network: ClassVar[str] = "discriminator"
    draws: ClassVar[bool] = False
    has_styles: ClassVar[bool] = False
    truncates_w: ClassVar[bool] = False
    has_guidance: ClassVar[bool] = False
    without_half: ClassVar[str] = ""
    paired: ClassVar[bool] = False
    joins_domains: ClassVar[bool] = False
    convolves: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = True
    has_tokens: ClassVar[bool] = False
    has_statistics: ClassVar[bool] = True
    normalizes_batch: ClassVar[bool] = False
    of_classes: ClassVar[tuple[str, ...]] = ()
    is_transformer: ClassVar[bool] = False
    copies_generator: ClassVar[bool] = False
    family: str

    @property
    def images_per_sample(self) -> int:
        """Images that G makes for each sample and D judges together, stacked along the channels from coarse to fine.

        The last of them is the sample itself. D gets as many copies of each real image.
        """
        return 1

    @property
    def reads_times(self) -> bool:
        """Whether the inputs of a generator carry a time for each sample, behind the labels."""
        return False

    @property
    def num_steps(self) -> int:
        """Passes of a generator that make a sample."""
        return 1

    @property
    def simulates_steps(self) -> bool:
        """Whether a generator learns from its own images of the steps before, to which noise is added."""
        return False

    @property
    def seeds_samples(self) -> bool:
        """Whether the inputs that make a sample carry a seed."""
        return self.draws

    @property
    def freezes(self) -> bool:
        """Whether a part of the network is not trained; its parameters are buffers."""
        return False

    @property
    def num_codes(self) -> int:
        """Number of values that the latents of a pixel may have; 0 if they are not quantized."""
        return 0

    @property
    def learns_codes(self) -> bool:
        """Whether codes move by their gradients; of a network from outside its output ``quantized`` has some."""
        return True

    @property
    def own_width(self) -> int | None:
        """Features of each block, on which learning rates may depend; None for a family whose layers differ."""
        return None

    @property
    def computes_in(self) -> str | None:
        """The half type, bf16 or fp16, in which some layers compute in a float32 engine; None if there are none."""
        return None

    @property
    def has_batch_norm(self) -> bool:
        """Whether the network has batch norm."""
        return self.normalizes_batch or getattr(self, "norm", None) == "batch"

    @property
    def compares_images(self) -> bool:
        """Whether what the network computes of an image depends on the others of its micro-batch."""
        return self.has_batch_norm

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""

    def input_sides(self, data: Data) -> tuple[int, int] | None:
        """Return of what the sides of an image have to be multiples that G translates, and the shortest side.

        None if G takes only images of the data's size.
        """
        return None

    def check_micro_batch(self, size: int, num_parts: int = 1) -> None:
        """Raise UserError if the network does not support micro-batches of ``size`` images, ``num_parts`` a batch."""


def judged_outputs(section: NetworkSection) -> list[str]:
    """Return the names of what a discriminator returns after its logits."""
    return list(getattr(section, "outputs", []))


BOTTOM = 4
"""Least pixels of the shorter side of the smallest feature map, in networks that halve or double their maps."""


def unfit_size(data: Data, bound: str, number: int, family: str, nearest: Size) -> UserError:
    """Return the error that sides of images are not ``bound`` a number; ``nearest`` is the size to suggest.

    Both are of images as networks see them; the message has those of the data.
    """
    factor = data.codec.side_factor
    remedy = f"set data.resolution={nearest.times(factor).text}"
    detail = "feature maps double from one whose shorter side has 4 to 7 pixels" if "multiple" in bound else ""
    if factor > 1:
        detail = f"a pixel is {factor} of the data's, as data.codec.kind is {data.codec.kind}"
    problem = f"must be {bound} {number * factor} with {family}"
    return UserError("data.resolution", data.resolution.value, problem, remedy, detail)


def check_doubled(data: Data, family: str) -> None:
    """Raise UserError unless images are a map, whose shorter side has 4 to 7 pixels, doubled once or more."""
    if data.network_size.shorter < 2 * BOTTOM:
        nearest = Size(*(max(2 * BOTTOM, side) for side in data.network_size))
        raise unfit_size(data, "at least", 2 * BOTTOM, family, nearest_doubled(nearest))
    if data.network_size != (nearest := nearest_doubled(data.network_size)):
        raise unfit_size(data, "a multiple of", data.network_size.nominal // BOTTOM, family, nearest)


def nearest_doubled(size: Size) -> Size:
    """Return the nearest size that ``check_doubled`` accepts."""
    while not size.is_multiple_of(factor := size.nominal // BOTTOM):
        size = size.nearest_multiple_of(factor)
    return size


def bottom_of(size: Size) -> Size:
    """Return the smallest feature map of a network whose maps double from it to ``size``."""
    return size.over(size.nominal // BOTTOM)


class NoDiscriminator(NetworkSection):
    """No discriminator: G alone learns, from terms that read its images and outputs."""

    family: Literal["none"] = "none"
    convolves = has_statistics = False


MOST_STEPS = 1000
"""Largest number of steps from noise to an image."""


Guidance = Annotated[float, Field(ge=0, le=100)]
"""Factor on the distance of estimates from those without a label."""


class TimedGenerator(NetworkSection):
    """Keys of a generator that may read times, and then make images in several steps."""

    times: bool = False
    """Read a time t in (0, 1] for each sample, behind the labels, and estimate the image x from (1 - t) x + t z."""
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] = 1
    """Steps from noise to an image in samples. With a discriminator, G learns at their times, from images with
    noise."""
    noised: Literal["reals", "samples"] = "reals"
    """Images that this noise is added to: real ones, or those that G makes by the steps before, as it is when the
    update begins (``samples``; Yin et al. 2024, arXiv 2405.14867, section 4.5)."""
    sampler: Literal["ode", "sde"] = "ode"
    """A step goes from an estimate along its velocity (``ode``, Euler's method), or adds fresh noise (``sde``,
    multistep sampling of Song et al. 2023, arXiv 2303.01469, algorithm 1)."""
    time_shift: PositiveFloat = 1.0
    """Times t of steps become s t / (1 + (s - 1) t) (Esser et al. 2024, arXiv 2403.03206, section 5.3.2)."""
    guidance: Guidance = 1.0
    """Scale of classifier-free guidance in samples (Ho and Salimans 2022, arXiv 2207.12598). Unless 1, a step takes two
    passes."""

    @property
    def reads_times(self) -> bool:
        """Whether its inputs carry a time for each sample."""
        return self.times

    @property
    def num_steps(self) -> int:
        """Passes that make a sample."""
        return self.steps

    @property
    def simulates_steps(self) -> bool:
        """Whether noise is added to its own images of the steps before."""
        return self.noised == "samples" and self.steps > 1

    @property
    def step_times(self) -> list[float]:
        """Times at which steps begin, from 1 downwards."""
        times = [1 - step / self.steps for step in range(self.steps)]
        return [self.time_shift * time / (1 + (self.time_shift - 1) * time) for time in times]

    @property
    def renoises(self) -> bool:
        """Whether steps draw noise."""
        return self.sampler == "sde" and self.steps > 1

    @property
    def seeds_samples(self) -> bool:
        """Whether the inputs that make a sample carry a seed."""
        return self.draws or self.renoises


class GeneratorSection(NetworkSection):
    """A generator of images from latents."""

    network: ClassVar[str] = "generator"
    latent_size: Width
    """Numbers in a latent."""
