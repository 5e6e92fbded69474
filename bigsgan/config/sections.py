"""The sections of a recipe that are independent of the model family: data, objective, optimizers, EMA, engines.

All classes are frozen, refuse unknown keys and do not convert types (``true`` is not 1). Durations end in ``_nimg`` and
count images, as everything in a run does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from bigsgan.errors import UserError
from bigsgan.runtime.paths import expanded

LARGEST_INT = 2**63 - 1
"""The largest 64-bit integer, the type of tensors and random generators."""

SMALLEST_WIDTH, LARGEST_WIDTH = 0.001, 0.288
"""Of a power function average, sigma_rel: at 12 ** -0.5 its exponent is 0, and all weights count alike."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NaturalInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
Pixels = Annotated[int, Field(gt=0, le=2**14)]
"""A side of an image."""
Width = Annotated[int, Field(gt=0, le=2**16)]
"""Features of a layer; above the limit, sizes of tensors would not fit in 64 bits."""


def _expand(text: str) -> str:
    try:
        return expanded(text)
    except ValueError as error:
        raise PydanticCustomError("no_home", "{problem}", {"problem": str(error)}) from None


PathText = Annotated[str, AfterValidator(_expand)]
"""A path, in which ``~`` stands for a home directory."""

PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Ranks = PositiveInt | Annotated[float, Field(gt=0, lt=1)] | Literal["auto"]
"""How many ranks a network has, their share of all, or as many as make updates shortest."""


class Section(BaseModel):
    """Base class of all sections of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Optimizer(Section):
    """One network's optimizer, with the learning rate as a function of images seen."""

    kind: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    """``adamw`` takes weight decay off the weights themselves (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    lr: PositiveFloat
    reference_width: Width | None = None
    """Width of the network that ``lr`` and ``final_lr`` are for: they are multiplied by it and divided by this
    network's own, as GAT does (arXiv 2509.24935). They count as they are unless it is given."""
    betas: list[Fraction] = Field(default=[0.0, 0.999], min_length=2, max_length=2)
    """Adam's decay rates. rmsprop takes the second as its ``alpha``."""
    eps: PositiveFloat = 1e-8
    momentum: Fraction = 0.0
    weight_decay: NaturalFloat = 0.0
    clip_norm: PositiveFloat | None = None
    """Scale gradients down to this norm where theirs is larger. Off unless given."""
    warmup_nimg: NaturalInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From ``lr`` at the end of the warm-up to ``final_lr`` at ``decay_nimg``."""
    final_lr: NaturalFloat = 0.0
    final_beta2: Fraction | None = None
    """What Adam's second decay rate becomes, along the same curve; constant unless given."""
    decay_nimg: PositiveInt | None = None
    """``total_nimg`` unless given."""

    @property
    def is_adam(self) -> bool:
        """Whether it is Adam, with either kind of weight decay."""
        return self.kind in ("adam", "adamw")


class Optimizers(Section):
    """The two optimizers."""

    generator: Optimizer
    discriminator: Optimizer


Sigma = Annotated[float, Field(ge=SMALLEST_WIDTH, le=LARGEST_WIDTH)]


class PowerEMA(Section):
    """Power function averages of the generator's weights (Karras et al. 2024, arXiv 2312.02696, section 3)."""

    widths: list[Sigma] = Field(default=[0.05, 0.1], min_length=1, max_length=8)
    """Of each average: sigma_rel, the standard deviation of its profile divided by the images averaged over. Each
    takes as much memory as the EMA."""
    snapshot_nimg: PositiveInt
    """Images between two snapshots of the averages; one more is taken when the run is complete."""
    snapshot_precision: Literal["fp32", "fp16"] = "fp32"
    """Of snapshots, which take 4 or 2 bytes a parameter and width."""

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
    """Until then the EMA is a copy of the weights."""
    ramp: PositiveFloat | None = None
    """Half-life at most this share of the images seen so far, which shortens the memory early in a run."""
    warmup_nimg: NaturalInt = 0
    """Images over which the half-life rises from 0 to ``half_life_nimg``, along a cosine."""
    power: PowerEMA | None = None
    """Keep further averages, from which an EMA of any width can be had after training. Off unless given."""


class KeepBest(Section):
    """Which checkpoint is the best so far."""

    metric: str
    """A name in metrics.jsonl, such as loss/generator; the value last reported before a checkpoint counts."""
    goal: Literal["min", "max"] = "min"


class Checkpoints(Section):
    """Which checkpoints stay, and how they are written."""

    keep: PositiveInt = 3
    """How many of the newest stay."""
    keep_every_nimg: PositiveInt | None = None
    """Beside those, the first at or after each multiple of so many images."""
    keep_best: KeepBest | None = None
    """Beside those, the best by a reported metric."""
    background: bool = True
    """Copy the state and write it while training continues; costs the size of the state in host memory."""


class InitFrom(Section):
    """Another run whose weights this one begins with: fine-tuning."""

    run: PathText
    """Its directory, or one that `bigsgan import` made."""
    nimg: NaturalInt | None = None
    """Which checkpoint; the newest unless given."""
    weights: Literal["ema", "live"] = "ema"
    """Begin with the generator's EMA, or with the weights that were being trained."""
    freeze_discriminator: NaturalInt = 0
    """Keep the first so many layers of D as they are (Mo, Cho and Shin 2020, arXiv 2002.10964)."""


class Engine(Section):
    """How one network is laid out over the ranks."""

    ds_config: PathText = "ds_configs/zero0.json"
    """DeepSpeed's own file: ZeRO stage, offload, buckets, precision, communication."""
    accumulation: PositiveInt | None = None
    """Micro-batches in a batch, if it differs from the recipe's ``accumulation``."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory for a third more time."""
    compile: Literal["none", "layers", "whole"] = "none"
    """What torch.compile compiles at a time for training: minutes at the start, for faster updates."""
    cuda_graphs: bool = False
    """Replay what is compiled as CUDA graphs: memory of their own, for less work of the host."""
    pipeline_stages: PositiveInt = 1
    """Stages that the layers are divided into, each on its own ranks; ranks / stages replicas share the batch."""
    ranks: Ranks | None = None
    """Give this network ranks of its own: how many, or their share of all; the other network gets the rest. ``auto``
    divides them so that updates are shortest. By default each rank holds a part of both."""
    partition: Literal["parameters", "uniform", "profile"] = "parameters"
    """What the stages share equally: parameters, the number of layers, or time, measured once on this machine."""


class Engines(Section):
    """The two engines."""

    generator: Engine = Engine()
    discriminator: Engine = Engine()
    stock_deepspeed: Literal["neither", "generator", "discriminator", "both"] = "neither"
    """Whose engine keeps DeepSpeed's own reductions, updates and prefetching, to compare; they cost time and memory."""


class Pipeline(Section):
    """How updates run through pipelines; without effect where no network has stages."""

    generator_phase: Literal["keep", "recompute"] = "keep"
    """G's activations while D judges its images: keep those of all micro-batches, or compute them a second time."""
    schedule: Literal["joint", "phases"] = "joint"
    """Let the phases of an update overlap, or fill and drain the pipelines once for each."""
