"""The sections of a recipe for optimizers, EMA, checkpoints and initial weights.

All classes are frozen, refuse unknown keys and do not convert types (``true`` is not 1). Durations end in ``_nimg`` and
count images, as all durations in a run do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bigsgan.errors import UserError
from bigsgan.runtime.paths import expanded

NETWORKS = ("generator", "discriminator")

LARGEST_INT = 2**63 - 1
"""The largest 64-bit integer, the type of tensors and random generators."""

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Size of the smallest normal and the largest number of float32."""

SMALLEST_WIDTH, LARGEST_WIDTH = 0.001, 0.288
"""Limits of sigma_rel of a power function average. At 12 ** -0.5 its exponent is 0, and all weights count alike."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NaturalInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
LARGEST_SIDE = 2**14
Pixels = Annotated[int, Field(gt=0, le=LARGEST_SIDE)]
"""Length of an image's side."""
Width = Annotated[int, Field(gt=0, le=2**16)]
"""Features of a layer. Above the limit, sizes of tensors would not fit in 64 bits."""


def _expand(text: str) -> str:
    try:
        return expanded(text)
    except ValueError as error:
        texts = {"problem": str(error), "remedy": "write the whole path"}
        raise PydanticCustomError("unfit", "{problem}", texts) from None


PathText = Annotated[str, AfterValidator(_expand)]
"""A path, in which ``~`` stands for a home directory."""

PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def both_engines(*settings: str) -> list[str]:
    """Return overrides of the engines of both networks, given those of one, such as ``compile=whole``."""
    return [f"engines.{network}.{setting}" for network in NETWORKS for setting in settings]


class Section(BaseModel):
    """Base class of all sections of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: object) -> object:
        """Refuse numbers that are 0 or infinite in float32, in which networks and optimizers compute."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and number and not SMALLEST_FLOAT <= abs(number) <= LARGEST_FLOAT:
                problem = f"must be 0 or of a size from {SMALLEST_FLOAT:.2g} to {LARGEST_FLOAT:.2g}, as float32 is"
                remedy = f"give a {'larger' if abs(number) < 1 else 'smaller'} number"
                raise PydanticCustomError("unfit", "{problem}", {"problem": problem, "remedy": remedy})
        return value

    def refuse_changed(self, name: str, keys: Iterable[str], condition: str, remedy: str = "remove it") -> None:
        """Refuse values of ``keys`` other than their defaults, as they have no effect under a condition.

        ``name`` is that of the section, empty for a recipe, and ``condition`` follows "must be unset with".
        """
        for key in keys:
            for field in self.changed(name, [key]):
                raise UserError(field, getattr(self, key), f"must be unset with {condition}", remedy)

    def changed(self, name: str, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` whose values are not their defaults, behind the section's ``name``."""
        return [
            f"{name}.{key}".strip(".") for key in keys if getattr(self, key) != type(self).model_fields[key].default
        ]


class Muon(Section):
    """How ``kind: muon`` updates matrices, as torch.optim.Muon does."""

    lr_multiplier: PositiveFloat = 1.0
    """Their learning rate, relative to ``lr``."""
    momentum: Fraction = 0.95
    """Share of the old momentum that an update keeps."""
    nesterov: bool = True
    """Use the momentum after the next step with the same gradient."""
    adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral_unclamped"] = "match_rms_adamw"
    """Factor on the rate of an A x B matrix: 0.2 sqrt(max(A, B)), for updates as large as AdamW's; sqrt(max(1, A / B)),
    torch's default; or sqrt(A / B)."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Steps of the Newton-Schulz iteration."""
    ns_coefficients: list[float] = Field(default=[3.4445, -4.775, 2.0315], min_length=3, max_length=3)
    """Coefficients of its polynomial."""
    eps: PositiveFloat = 1e-7
    """Least norm that divides a matrix before it."""


class ParameterGroup(Section):
    """Parameters of a network with a learning rate of their own."""

    parameters: Annotated[str, Field(min_length=1)]
    """Pattern of parameters' names, or of their ends after a dot: ``*`` stands for any text, ``[0-6]`` for a digit. The
    first group that fits counts."""
    lr_multiplier: PositiveFloat = 1.0
    """Their learning rate, relative to ``lr``."""
    frozen_from_nimg: NaturalInt | None = None
    """Images from which on their rate is 0. Gradients still count in ``clip_norm``; buffers go on."""

    def is_frozen(self, nimg: int) -> bool:
        """Whether they stay as they are in the update that begins at so many images."""
        return self.frozen_from_nimg is not None and nimg >= self.frozen_from_nimg


class Optimizer(Section):
    """One network's optimizer, with the learning rate as a function of images seen."""

    kind: Literal["adam", "adamw", "sgd", "rmsprop", "muon"] = "adam"
    """``adamw`` applies weight decay to the weights (Loshchilov and Hutter 2019, arXiv 1711.05101). ``muon`` is
    [Muon](#muon)."""
    lr: PositiveFloat
    """Learning rate."""
    reference_width: Width | None = None
    """Width for which ``lr`` and ``final_lr`` are given: they are multiplied by it and divided by this network's width
    (GAT, arXiv 2509.24935)."""
    betas: list[Fraction] = Field(default=[0.0, 0.999], min_length=2, max_length=2)
    """Adam's decay rates; the second is ``alpha`` of ``rmsprop``."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator by Adam, also in ``muon``, and ``rmsprop``."""
    momentum: Fraction = 0.0
    """Momentum of ``sgd`` and ``rmsprop``."""
    muon: Muon | None = None
    """Needs ``kind: muon``, for which the defaults hold without it."""
    weight_decay: NaturalFloat = 0.0
    """Added to the gradient, except by ``adamw`` and ``muon``."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """``matrices`` are parameters of two or more dimensions, with embeddings and learned constants."""
    clip_norm: PositiveFloat | None = None
    """Norm to which larger gradients are scaled down."""
    warmup_nimg: NaturalInt = 0
    """Images over which the learning rate rises to ``lr``."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Curve of the learning rate from ``lr`` to ``final_lr``."""
    final_lr: NaturalFloat = 0.0
    """Learning rate at ``decay_nimg``."""
    final_beta2: Fraction | None = None
    """Adam's second decay rate at ``decay_nimg``, along the same curve."""
    decay_from_nimg: NaturalInt | None = None
    """Images at the decay's beginning; by default the end of the warm-up."""
    decay_nimg: PositiveInt | None = None
    """Images at the decay's end; by default ``total_nimg``."""
    groups: list[ParameterGroup] = Field(default=[])
    """Parameters with learning rates of their own."""

    @property
    def is_adam(self) -> bool:
        """Whether it is Adam, with either kind of weight decay."""
        return self.kind in ("adam", "adamw")

    @property
    def has_adam(self) -> bool:
        """Whether Adam updates all parameters or, with Muon, those that are not its matrices."""
        return self.is_adam or self.kind == "muon"

    @property
    def decays_from(self) -> int:
        """Images at the beginning of the decay."""
        return self.warmup_nimg if self.decay_from_nimg is None else self.decay_from_nimg

    @property
    def matrices(self) -> Muon:
        """How Muon updates matrices."""
        return self.muon or Muon()

    def check(self, field: str, total_nimg: int) -> None:
        """Raise UserError if keys do not fit each other, or the length of the run."""
        if self.warmup_nimg >= total_nimg:
            problem, remedy = f"must be less than total_nimg ({total_nimg})", "shorten the warm-up or raise total_nimg"
            raise UserError(f"{field}.warmup_nimg", self.warmup_nimg, problem, remedy)
        if self.momentum and self.has_adam:
            own = "muon.momentum" if self.kind == "muon" else "betas"
            remedy = f"set {field}.{own}, or {field}.kind to sgd or rmsprop"
            raise UserError(f"{field}.momentum", self.momentum, f"must be 0 with kind={self.kind}", remedy)
        if self.muon and self.kind != "muon":
            problem, remedy = f"must be unset with kind={self.kind}", f"remove it, or set {field}.kind=muon"
            raise UserError(f"{field}.muon", f"momentum={self.muon.momentum}", problem, remedy)
        if self.final_beta2 is not None and not self.has_adam:
            problem = f"must be unset with kind={self.kind}"
            raise UserError(f"{field}.final_beta2", self.final_beta2, problem, f"remove it, or set {field}.kind=adam")
        if not self.weight_decay:
            self.refuse_changed(
                field, ("weight_decay_on",), "weight_decay=0", f"set {field}.weight_decay, or remove it"
            )
        if self.decay == "constant":
            remedy = f"set {field}.decay to linear or cosine, or remove it"
            self.refuse_changed(
                field, ("final_lr", "final_beta2", "decay_from_nimg", "decay_nimg"), "decay=constant", remedy
            )
        key = "warmup_nimg" if self.decay_from_nimg is None else "decay_from_nimg"
        if self.decays_from < self.warmup_nimg:
            problem = f"must be at least warmup_nimg ({self.warmup_nimg})"
            raise UserError(f"{field}.{key}", self.decays_from, problem, "raise it, or shorten the warm-up")
        if self.decay_nimg is not None and self.decay_nimg <= self.decays_from:
            problem = f"must be greater than {key} ({self.decays_from})"
            raise UserError(f"{field}.decay_nimg", self.decay_nimg, problem, f"raise it, or lower {field}.{key}")
        for number, group in enumerate(self.groups):
            if group.lr_multiplier == 1 and group.frozen_from_nimg is None:
                own, problem = f"{field}.groups.{number}", "must set lr_multiplier or frozen_from_nimg"
                raise UserError(f"{own}.parameters", group.parameters, problem, "set one, or remove the group")
        if self.decays_from >= total_nimg:
            problem, remedy = f"must be less than total_nimg ({total_nimg})", "lower it, or raise total_nimg"
            raise UserError(f"{field}.{key}", self.decays_from, problem, remedy)


class Optimizers(Section):
    """The two optimizers."""

    generator: Optimizer
    discriminator: Optimizer = Optimizer(lr=1.0)
    """Must be given if there is a discriminator."""


Sigma = Annotated[float, Field(ge=SMALLEST_WIDTH, le=LARGEST_WIDTH)]


class PowerEMA(Section):
    """Power function averages of the generator's weights (Karras et al. 2024, arXiv 2312.02696, section 3)."""

    widths: list[Sigma] = Field(default=[0.05, 0.1], min_length=1, max_length=8)
    """sigma_rel of each average, [defined here](../how-to/sample.md#choose-the-width-of-the-ema-after-training). Each
    takes the EMA's memory."""
    snapshot_nimg: PositiveInt
    """Images between two snapshots; the run's end has one too."""
    snapshot_precision: Literal["fp32", "fp16"] = "fp32"
    """4 or 2 bytes a parameter and width."""

    @model_validator(mode="after")
    def _check(self) -> PowerEMA:
        if len(set(self.widths)) < len(self.widths):
            raise UserError("ema.power.widths", self.widths, "must differ from each other", "give each width once")
        return self


class EMA(Section):
    """Exponential moving average (EMA) of the generator's weights, which samples and exports use."""

    half_life_nimg: PositiveInt
    """Images after which the share of old weights in the EMA has halved."""
    start_nimg: NaturalInt = 0
    """Images during which the EMA is a copy of the weights."""
    ramp: PositiveFloat | None = None
    """Largest half-life, as a share of the images seen so far."""
    warmup_nimg: NaturalInt = 0
    """Images over which the half-life rises from 0 to ``half_life_nimg``, along a cosine."""
    reset_nimg: PositiveInt | None = None
    """Images between two restarts of G from the EMA; its optimizer goes on (Lin et al. 2025, arXiv 2511.22475)."""
    reset_from_nimg: NaturalInt = 0
    """Images before which G is not restarted."""
    power: PowerEMA | None = None
    """Keep further averages, from which an EMA of any width can be made after training. Off unless given."""

    @model_validator(mode="after")
    def _check(self) -> EMA:
        if self.reset_from_nimg and self.reset_nimg is None:
            problem, remedy = "must be unset without ema.reset_nimg", "give ema.reset_nimg, or remove it"
            raise UserError("ema.reset_from_nimg", self.reset_from_nimg, problem, remedy)
        return self

    @property
    def widths(self) -> list[float]:
        """The widths of the power function averages."""
        return list(self.power.widths) if self.power else []


class KeepBest(Section):
    """Also keep the best checkpoint by a reported metric."""

    metric: str
    """Name in metrics.jsonl, such as loss/generator; its last value before a checkpoint counts."""
    goal: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""


class Checkpoints(Section):
    """Which checkpoints stay, and how they are written."""

    keep: PositiveInt = 3
    """Newest checkpoints that stay."""
    keep_every_nimg: PositiveInt | None = None
    """Also keep the first checkpoint at or after each multiple."""
    keep_best: KeepBest | None = None
    """Also keep the best checkpoint by a reported metric."""
    background: bool = True
    """Write checkpoints while training continues, from a copy in host memory."""


class InitFrom(Section):
    """Weights that this run begins with, for fine-tuning: another run's, or exports of one network or both."""

    run: PathText | None = None
    """The other run's directory, or one of ``bigsgan import``."""
    generator: PathText | None = None
    """Instead of ``run``, a generator of ``bigsgan export``: a safetensors file or folder for the Hub."""
    discriminator: PathText | None = None
    """The same for a discriminator."""
    nimg: NaturalInt | None = None
    """Images of the checkpoint; by default the newest."""
    weights: Literal["ema", "live"] = "ema"
    """The generator's EMA, or its live weights."""
    backbone: bool = False
    """D begins with the generator's weights in the layers that both have."""
    freeze_discriminator: NaturalInt = 0
    """D's first layers that keep their weights (Mo, Cho and Shin 2020, arXiv 2002.10964)."""

    @model_validator(mode="after")
    def _check(self) -> InitFrom:
        exports = [key for key in ("generator", "discriminator") if getattr(self, key) is not None]
        if self.run is None and not exports:
            remedy = "or give init_from.generator, init_from.discriminator or both, which are exports"
            raise UserError("init_from.run", None, "must be given", f"name a run directory, {remedy}")
        if self.run is not None and exports:
            remedy = "remove one of the two"
            raise UserError(f"init_from.{exports[0]}", None, "cannot be combined with init_from.run", remedy)
        others = (("nimg", self.nimg is not None), ("weights", self.weights == "live"), ("backbone", self.backbone))
        for key, given in others:
            if given and exports:
                detail = "an export has one network of one checkpoint"
                value = getattr(self, key)
                raise UserError(f"init_from.{key}", value, "must be unset without init_from.run", "remove it", detail)
        return self
