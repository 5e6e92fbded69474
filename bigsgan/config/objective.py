"""The recipe's ``objective`` section: the game, which is the loss on logits, how often D steps, and the penalties."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from bigsgan.config.adversarial_weight import Adversarial
from bigsgan.config.outside import outside_name
from bigsgan.config.reconstruction import Codebook, DistributionMatching, Flow, Huber, Perceptual, Transport
from bigsgan.config.sections import (
    Fraction,
    NaturalFloat,
    NaturalInt,
    PathText,
    Pixels,
    PositiveFloat,
    PositiveInt,
    Section,
    Width,
)
from bigsgan.errors import UserError, counted

Method = Literal["auto", "double_backward", "forward_mode"]


class Penalty(Section):
    """weight / 2 * E[|grad of D's logit at the images|^2], on every ``every``-th step of D, times ``every``.

    R1 takes it at real images and R2 at fake ones (Mescheder et al. 2018, arXiv 1801.04406; lazily: Karras et al. 2020,
    arXiv 1912.04958).
    """

    weight: PositiveFloat
    """Factor."""
    final_weight: NaturalFloat | None = None
    """Weight at ``decay_nimg`` images, along a cosine."""
    decay_nimg: PositiveInt | None = None
    """Images until ``final_weight``; by default ``total_nimg``."""
    every: PositiveInt = 1
    """Steps of D from one penalty to the next."""
    batch_shrink: PositiveInt = 1
    """Use [one of so many images](../explanation/penalties.md#on-a-part-of-the-batch) of the batch; the mean is over
    these."""
    form: Literal["exact", "finite_difference"] = "exact"
    """The gradient itself, or a [finite difference](../explanation/penalties.md#finite-differences) (Lin et al. 2025,
    arXiv 2501.08316)."""
    method: Method = "auto"
    """How an exact penalty is computed; ``auto`` [depends on the
    layout](../explanation/penalties.md#which-way-is-taken)."""
    sigma: PositiveFloat | None = None
    """Step of a finite difference. By default 0.1 in bf16, 0.03 in fp16 and 0.01 in float32, by the coarsest type of
    D's layers."""
    antithetic: bool = False
    """Take the difference from both sides: more exact, one more segment in D's batch."""
    check_every: NaturalInt = 64
    """Penalized steps between two comparisons with the exact penalty; 0 for none."""


class GradientPenalty(Section):
    """weight * E[(|grad of D's logit| - 1)^2] between real and fake (Gulrajani et al. 2017, arXiv 1704.00028)."""

    weight: PositiveFloat = 10.0
    """Factor."""
    batch_shrink: PositiveInt = 1
    """As for R1."""
    method: Method = "auto"
    """As for R1."""


DIFFERENTIATED = {"r1": "real", "r2": "fake", "gradient_penalty": "between"}
"""The segment of D's batch at whose images each penalty takes D's gradient."""


def num_differentiated(at: Collection[str], num_segments: int) -> int:
    """Number of segments of D's batch at whose images D is differentiated, given the names of those that are needed.

    For the first, the real images, it is one; for others all ``num_segments``.
    """
    return 0 if not at else 1 if set(at) == {"real"} else num_segments


def num_images(num_segments: int, num: int, shrink: int) -> int:
    """Number of images in segments of D's batch: ``num`` real and fake ones each, one of ``shrink`` in each other."""
    return min(num_segments, 2) * num + max(num_segments - 2, 0) * (num // shrink)


def _check_shrink(field: str, shrink: int, size: int, remedy: str) -> None:
    if size % shrink:
        problem = f"must divide the {counted(size, 'image')} of a micro-batch on one rank"
        raise UserError(field, shrink, problem, f"set {remedy}={math.gcd(size, shrink)}")


class Segments(NamedTuple):
    """The segments of D's micro-batches in one of its steps: real images, fake images, and what penalties add."""

    trains: int = 2  # all of them
    differentiated: int = 0  # of these, those at whose images D is differentiated for exact penalties: the first or all
    checks: bool = False  # whether a finite difference is compared with the exact penalty, before D trains


class LeCam(Section):
    """Keeps D's logits near their moving averages (Tseng et al. 2021, arXiv 2104.03310)."""

    weight: PositiveFloat = 0.3
    """Weight of the squared distance."""
    decay: Fraction = 0.99
    """Share of the old averages that an update keeps."""


class Consistency(Section):
    """weight / (L - 1) * the sum over i < L of E[mean (x_i - x_L)^2] / (L - i), for the L images of a sample.

    It keeps the coarser ones near the last (Hyun et al. 2026, arXiv 2605.26449).
    """

    weight: PositiveFloat = 0.1
    """Factor."""


class PathLength(Section):
    """weight * E[(length - mean length)^2] of paths in the space of styles, every ``every`` updates, times ``every``.

    For StyleGAN2 (Karras et al. 2020, arXiv 1912.04958, section 3.2).
    """

    weight: PositiveFloat = 2.0
    """Factor."""
    every: PositiveInt = 4
    """Updates of G from one penalty to the next."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Weight of a new mean in the mean length."""
    batch_shrink: PositiveInt = 1
    """Use one of so many samples (2 in NVlabs' code)."""
    method: Method = "auto"
    """As for R1, for the generator."""
    ahead: ClassVar[int] = 1  # layers of G that make the styles

    def check_micro_batch(self, size: int) -> None:
        """Raise UserError if ``batch_shrink`` does not divide the ``size`` images of a micro-batch on each rank."""
        field = "objective.path_length.batch_shrink"
        _check_shrink(field, self.batch_shrink, size, field)


class Teacher(Section):
    """weight * E[(1 - cosine at the class token) + mean over patches of (1 - cosine there)], on real images.

    Cosines of a frozen network's features with D's prediction of them (GAT, arXiv 2509.24935), in a CAT at full size.
    """

    path: PathText
    """Program (.pt2, or of torch.jit.save) with [DINOv2's
    interface](../how-to/latents.md#a-teacher-for-the-discriminator)."""
    weight: PositiveFloat = 1.0
    """Factor."""
    resolution: Pixels = 224
    """Pixels a side of the images that it reads."""
    width: Width = 768
    """Features of the teacher's tokens; 768 in DINOv2's ViT-B."""
    hidden: Width = 2048
    """Features of both hidden layers of D's perceptron that predicts them."""


class Orthogonal(Section):
    """Strength of each network's orthogonal regularization (Brock et al. 2019, equation 3).

    ``--G_ortho 2e-4`` of BigGAN-PyTorch is 1e-4 here.
    """

    generator: NaturalFloat = 0.0
    """Strength for G."""
    discriminator: NaturalFloat = 0.0
    """Strength for D."""


class OwnLoss(Section):
    """A loss on logits from your own code; see docs/how-to/own-loss.md."""

    use: outside_name("terms")  # type: ignore[valid-type]
    """``package.module:Class``, [a loss on logits](../how-to/own-loss.md#the-loss-on-logits)."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments of the class."""
    pairs: bool = False
    """G's loss reads ``real_logits`` too."""


class OwnTerm(Section):
    """A part of a network's loss from your own code; see docs/how-to/own-loss.md."""

    use: outside_name("terms")  # type: ignore[valid-type]
    """``package.module:name`` of [a term](../how-to/own-loss.md#terms)."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")] | None = None
    """Name of its statistic, loss/<name>; by default that of the function or class."""
    network: Literal["generator", "discriminator"] = "generator"
    """Network whose loss it enters."""
    weight: float = 1.0
    """Factor."""
    every: PositiveInt = 1
    """Compute it in one of so many steps of D, or updates of G, with so many times its weight."""
    differentiates: list[Literal["real", "fake"]] = Field(default=[])
    """Images at which it takes gradients of D's logits."""
    arguments: dict[str, Any] = Field(default={})
    """Further arguments."""

    @property
    def label(self) -> str:
        """Name of its statistic."""
        return self.name or self.use.rpartition(":")[2].replace(".", "_")

    @property
    def method(self) -> Method:
        """How it is computed, if it differentiates."""
        return "auto"


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) and ":" in value else value


class Objective(Section):
    """The game: the loss on logits, how often D steps, and the penalties."""

    loss: Annotated[
        Literal["hinge", "non_saturating", "least_squares", "wasserstein", "relativistic"] | OwnLoss,
        BeforeValidator(_named),
    ] = "hinge"
    """Loss of D's logits; ``package.module:Class`` for your own."""
    d_steps: Annotated[int, Field(gt=0, le=1000)] = 1
    """Updates of D before each of G, each with a batch of its own."""
    schedule: Literal["exact", "generator_first", "overlapped"] = "exact"
    """D's steps first (``exact``), or G's update. With ``overlapped``, another game, each network learns from the other
    [as it was an update ago](../how-to/separate-ranks.md#let-updates-overlap)."""
    reuse_fakes: bool = False
    """G's update and D's last step (with ``generator_first`` the first) [share latents and
    images](../how-to/speed-up.md#reuse-the-fakes)."""
    pool: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Earlier images kept for each sample; D sees one of these half the time (CycleGAN)."""
    fake_labels: Literal["uniform", "frequencies", "data"] = "uniform"
    """Labels of G's images: uniform, as frequent as in the data, or those of the real images beside them, which a
    relativistic loss needs. Images made of real ones with noise keep theirs."""
    l1: NaturalFloat = 0.0
    """Weight of the mean absolute difference of G's images from their targets: those of pairs, or the images that G
    reads, also with noise."""
    l2: NaturalFloat = 0.0
    """Weight of their mean squared difference."""
    huber: Huber | None = None
    perceptual: Perceptual | None = None
    feature_matching: NaturalFloat = 0.0
    """Weight of the mean absolute difference of D's features of G's images and the targets."""
    kl: NaturalFloat = 0.0
    """Weight of the divergence of latents from a standard normal distribution, summed over latents. G's output
    ``moments`` has their means and log variances, side by side."""
    codebook: Codebook | None = None
    cycle: NaturalFloat = 0.0
    """Weight of the mean absolute difference of images and their translations back, G's output ``again``, summed over
    both domains (Zhu et al. 2017, arXiv 1703.10593, equation 2)."""
    identity: NaturalFloat = 0.0
    """Weight of the same difference for G's output ``same``, translations of images of the target domain."""
    consistency: Consistency | None = None
    r1: Penalty | None = None
    r2: Penalty | None = None
    gradient_penalty: GradientPenalty | None = None
    lecam: LeCam | None = None
    centering: NaturalFloat = 0.0
    """Weight of the mean of (D(x) + D(G(z)))^2, which keeps a relativistic D's logits near 0 (Lin et al. 2025, arXiv
    2511.22475)."""
    transport: Transport | None = None
    flow: Flow | None = None
    distribution_matching: DistributionMatching | None = None
    path_length: PathLength | None = None
    teacher: Teacher | None = None
    orthogonal: Orthogonal = Orthogonal()
    adversarial: Adversarial = Adversarial()
    discriminator_from_nimg: NaturalInt = 0
    """Images before which D's loss is 0, except ``orthogonal`` and weight decay."""
    terms: list[OwnTerm] = Field(default=[])
    """Parts of the losses from your own code."""

    @model_validator(mode="after")
    def _check(self) -> Objective:
        taken = ["generator", "discriminator", "l1", "l2", "huber", "perceptual", "feature_matching", "consistency"]
        taken += ["kl", "codebook", "centering", "transport", "flow", "cycle", "identity"]
        taken += ["entropy"] if self.codebook and self.codebook.entropy else []
        taken += ["denoising", "matching"] if self.distribution_matching else []
        for number, term in enumerate(self.terms):
            if term.label in taken:
                problem, remedy = "is the name of another part of the losses", "give it a name of its own"
                raise UserError(f"objective.terms.{number}.name", term.label, problem, remedy)
            if term.differentiates and term.network == "generator":
                field, remedy = f"objective.terms.{number}.differentiates", "set network: discriminator, or remove it"
                raise UserError(field, term.differentiates, "must be empty with network=generator", remedy)
            taken.append(term.label)
        return self

    @property
    def of_targets(self) -> dict[str, float]:
        """Weights of the terms that compare G's images with targets, by name, if they are given."""
        found = {"l1": self.l1, "l2": self.l2}
        found |= {name: each.weight for name in ("huber", "perceptual") if (each := getattr(self, name))}
        return {name: weight for name, weight in found.items() if weight}

    @property
    def pairs(self) -> bool:
        """Whether G's objective compares its images with real ones, so that D judges both."""
        own = isinstance(self.loss, OwnLoss) and self.loss.pairs
        return own or self.loss == "relativistic" or self.feature_matching > 0

    @property
    def gradient_norms(self) -> dict[str, Penalty]:
        """R1 and R2, by name, if they are given."""
        return {name: penalty for name, penalty in (("r1", self.r1), ("r2", self.r2)) if penalty}

    @property
    def scheduled(self) -> dict[str, Penalty | Transport]:
        """The parts of the losses whose weights may follow a schedule, by name, if they are given."""
        return {**self.gradient_norms, **({"transport": self.transport} if self.transport else {})}

    @property
    def exact_penalties(self) -> dict[str, Penalty | GradientPenalty | OwnTerm]:
        """Penalties on the gradient of D, by name, except finite differences."""
        found: dict[str, Penalty | GradientPenalty | OwnTerm] = {}
        found |= {name: penalty for name, penalty in self.gradient_norms.items() if penalty.form == "exact"}
        found |= {"gradient_penalty": self.gradient_penalty} if self.gradient_penalty else {}
        return found | {f"terms.{n}": term for n, term in enumerate(self.terms) if term.differentiates}

    @property
    def penalties(self) -> dict[str, Penalty | GradientPenalty]:
        """R1, R2 and the gradient penalty, by name, if they are given."""
        return {**self.gradient_norms, **({"gradient_penalty": self.gradient_penalty} if self.gradient_penalty else {})}

    @property
    def batch_shrink(self) -> int:
        """Of how many images of D's batch its penalties use one."""
        return next((penalty.batch_shrink for penalty in self.penalties.values()), 1)

    def check_micro_batch(self, size: int) -> None:
        """Raise UserError if D's penalties cannot use their part of the ``size`` images of a micro-batch on a rank."""
        for name in self.penalties:
            _check_shrink(f"objective.{name}.batch_shrink", self.batch_shrink, size, "each penalty's batch_shrink")

    @property
    def intervals(self) -> dict[str, int]:
        """By name, in every how many of D's steps a part of its loss is due, where that may be not in each."""
        own = {f"terms.{n}": term.every for n, term in enumerate(self.terms) if term.network == "discriminator"}
        return {name: penalty.every for name, penalty in self.gradient_norms.items()} | own

    def due(self, d_step: int) -> dict[str, Penalty]:
        """Return those of R1 and R2 that D's step of this number carries, by name."""
        return {name: penalty for name, penalty in self.gradient_norms.items() if d_step % penalty.every == 0}

    def checked(self, d_step: int) -> list[str]:
        """Return the names of the finite differences that this step compares with the exact penalty."""
        return [
            name
            for name, penalty in self.due(d_step).items()
            if penalty.form == "finite_difference"
            and penalty.check_every
            and d_step // penalty.every % penalty.check_every == 0
        ]

    def segments(self, d_step: int) -> Segments:
        """Return the segments of D's micro-batches in this step."""
        due, interpolates = self.due(d_step), self.gradient_penalty is not None
        trains = 2 + sum(1 + p.antithetic for p in due.values() if p.form == "finite_difference") + interpolates
        at = set[str]()
        for name, penalty in self.exact_penalties.items():
            if d_step % self.intervals.get(name, 1) == 0:
                at.update(penalty.differentiates if isinstance(penalty, OwnTerm) else [DIFFERENTIATED[name]])
        return Segments(trains, num_differentiated(at, trains), bool(self.checked(d_step)))

    def methods(self, network: str) -> dict[str, Method]:
        """Return how a network's exact penalties are computed, by name: those on D's gradient, or G's path length."""
        if network == "discriminator":
            return {name: penalty.method for name, penalty in self.exact_penalties.items()}
        return {"path_length": self.path_length.method} if self.path_length else {}
