"""A recipe: the complete description of a run, read from YAML, checked, and printed back fully resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from bigsgan import plugins, shipped
from bigsgan.config.augmentation import Augmentation
from bigsgan.config.data import Data
from bigsgan.config.data_and_networks import check_batch_statistics, check_data_and_networks
from bigsgan.config.engines import Engine, Engines, Pipeline
from bigsgan.config.families import FAMILIES, AnyDiscriminator, AnyGenerator
from bigsgan.config.messages import explain
from bigsgan.config.metrics import MaybeMetrics, check_targets, perceptual_network
from bigsgan.config.objective import Objective
from bigsgan.config.outside import Callback
from bigsgan.config.penalties import check_penalties
from bigsgan.config.saved_recipe import is_lost, recipe_of_checkpoints
from bigsgan.config.sections import (
    EMA,
    NETWORKS,
    BatchSize,
    Checkpoints,
    InitFrom,
    NaturalInt,
    Optimizers,
    PathText,
    PositiveInt,
    Section,
)
from bigsgan.config.signature import typed
from bigsgan.config.without_discriminator import check_networks, overlaps_data
from bigsgan.config.yaml_file import (
    apply_override,
    apply_overrides,
    dump_yaml,
    parse_override,
    read_yaml,
)
from bigsgan.errors import UserError


class Recipe(Section):
    """The top of a recipe. Every number about length is in images (``nimg``)."""

    out: PathText
    """Run directory."""
    seed: NaturalInt = 0
    """Seed of initialization, data order, latents, labels and noise."""
    total_nimg: PositiveInt
    """Images after which the run is complete."""
    batch: BatchSize
    """Images in a batch, over all ranks and micro-batches."""
    accumulation: PositiveInt = 1
    """Micro-batches in a batch."""
    report_nimg: PositiveInt
    """Images between two reports."""
    monitor: list[Literal["tensorboard", "wandb", "csv"]] = Field(default=["tensorboard"])
    """Where reports go besides ``metrics.jsonl``; ``csv`` is ``metrics.csv``."""
    sample_nimg: PositiveInt
    """Images between two sample grids."""
    sample_statistics: Literal["running", "batch"] = "running"
    """Batch norm's statistics in samples: running ones (for the EMA: standing), or each batch's."""
    checkpoint_nimg: PositiveInt
    """Images between two checkpoints."""
    checkpoints: Checkpoints = Checkpoints()
    statistics: Literal["every_update", "every_pass"] = "every_update"
    """When batch norm's running statistics, spectral norm's vectors and ``w_avg`` move: in the first micro-batch of a
    network's update, or in each of its passes, as in public trainers."""
    batch_statistics: Literal["global", "host"] = "global"
    """Ranks that share batch norm's statistics: all of a micro-batch, or those on one host, whose number then changes
    the model."""
    max_rollbacks: NaturalInt = 10
    """Returns to a checkpoint after non-finite updates before the run ends."""
    hang_timeout_seconds: Annotated[int, Field(gt=0, le=10**8)] = 300
    """Seconds without a new task on any rank before [the run ends](../how-to/diagnose.md#a-run-hangs)."""
    deterministic: bool = False
    """Use deterministic kernels, maybe slower: a resumed run on a GPU equals an uninterrupted one bit for bit."""
    data: Data
    generator: AnyGenerator
    discriminator: AnyDiscriminator
    objective: Objective = Objective()
    augmentation: Augmentation | None = None
    optimizer: Optimizers
    ema: EMA
    metrics: MaybeMetrics = None
    callbacks: list[Callback] = Field(default=[])
    """Code of yours that is told of reports and checkpoints, on rank 0; an exception in it ends the run."""
    init_from: InitFrom | None = None
    engines: Engines = Engines()
    pipeline: Pipeline = Pipeline()

    @classmethod
    @typed
    def read(cls, name: str | os.PathLike[str], *overrides: str) -> Recipe:
        """Return a recipe, of a YAML file or a built-in one by its name, with overrides such as ``total_nimg=20000``.

        Raises:
            UserError: The recipe or an override is invalid.
        """
        return load_recipe(shipped.found_recipe(os.fspath(name)), list(overrides))

    @classmethod
    @typed
    def of(cls, tree: Mapping[str, Any]) -> Recipe:
        """Return the recipe in nested dictionaries, as YAML would have them.

        Raises:
            UserError: A key or a value is invalid.
        """
        return parse_recipe(dict(tree))

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        _check_recipe(self)  # pydantic passes a UserError on unchanged, because it is not a ValueError
        return self

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that learn: both, or the generator alone."""
        return NETWORKS if self.has_discriminator else NETWORKS[:1]

    @property
    def has_discriminator(self) -> bool:
        """Whether there is a discriminator; without one the generator learns alone."""
        return self.discriminator.family != "none"

    def engine(self, network: str) -> Engine:
        """Return the engine section of ``generator`` or ``discriminator``."""
        return getattr(self.engines, network)

    @property
    def compiles(self) -> bool:
        """Whether a network goes through torch.compile."""
        return any(self.engine(network).compile != "none" for network in self.networks)

    def updates_of(self, network: str) -> int:
        """Return how often a network is updated in an update: D in each of its steps."""
        return self.objective.d_steps if network == "discriminator" else 1

    def accumulation_of(self, network: str) -> int:
        """Return a network's number of micro-batches: its engine's own, or the recipe's."""
        return self.engine(network).accumulation or self.accumulation

    @property
    def inputs_from_data(self) -> bool:
        """Whether G's inputs depend on the real images that D sees: the inputs of pairs, images, or labels."""
        return self.translates or self.adds_noise or self.objective.fake_labels == "data"

    @property
    def reads_noise(self) -> bool:
        """Whether G reads images with noise: by flow matching, or in several steps."""
        return self.objective.flow is not None or self.generator.num_steps > 1

    @property
    def adds_noise(self) -> bool:
        """Whether G learns from real images with noise."""
        return self.reads_noise and not self.generator.simulates_steps

    @property
    def translates(self) -> bool:
        """Whether G makes images from images: from the inputs of pairs, or from the real ones."""
        return self.data.paired or getattr(self.generator, "reads", "latents") == "images"

    @property
    def input_channels(self) -> int:
        """Channels, the first of a sample of the data, that a generator from images reads."""
        return self.data.input_channels if self.data.paired else self.data.channels

    @property
    def shown_channels(self) -> int:
        """Channels, the last of what G makes of a sample, of the image that people see."""
        return self.data.image_channels if self.data.joins_domains else self.data.channels

    @property
    def outputs(self) -> list[str]:
        """Names of what G returns after the images, of a family's two generators as far as a term reads it."""
        found = getattr(self.generator, "outputs", [])
        return found[:-1] if self.generator.joins_domains and not self.objective.identity else found

    @property
    def generator_reads(self) -> list[str]:
        """Names of G's inputs."""
        times, seeds = ["times"] * self.generator.reads_times, ["seeds"] * self.generator.draws
        return ["input_images" if self.translates else "latents", "labels", *times, *seeds]

    @property
    def judged_channels(self) -> int:
        """Channels of a sample that travels from G to D, over all its images."""
        return self.data.channels * self.generator.images_per_sample

    @property
    def discriminator_reads_seeds(self) -> bool:
        """Whether D's inputs carry a seed for each sample: D augments its images, or draws noise."""
        return self.augmentation is not None or self.discriminator.draws

    @property
    def discriminator_reads_latents(self) -> bool:
        """Whether D's inputs carry the latents of G's images."""
        return getattr(self.discriminator, "latents", False)

    @property
    def latent_size(self) -> int:
        """Numbers in a latent; 0 if the generator makes images from images."""
        return getattr(self.generator, "latent_size", 0) or 0

    def to_yaml(self) -> str:
        """Return the recipe as YAML, with every default filled in."""
        return dump_yaml(self.model_dump())


def load_recipe(path: Path, overrides: list[str], data_root: str | None = None, trusted: bool = True) -> Recipe:
    """Read a recipe, apply command-line overrides, and replace ``data.root`` by ``data_root`` if it is given.

    A run directory that lacks its recipe has it in its checkpoints. Code from outside that a ``trusted`` recipe names
    may be imported: the user has given it, and it is not out of a checkpoint; of another, what an override names.

    Raises:
        UserError: The recipe or an override is invalid.
    """
    tree = recipe_of_checkpoints(path.parent) if is_lost(path) else None
    is_given, tree = tree is None and trusted, read_yaml(path) if tree is None else tree
    apply_overrides(tree, overrides)
    if data_root is not None:
        apply_override(tree, ["data", "root"], data_root)
    plugins.give(tree if is_given else [parse_override(text)[1] for text in overrides])
    return parse_saved_recipe(tree)


def parse_saved_recipe(tree: dict[str, Any]) -> Recipe:
    """Return the recipe that a run has saved. Code that it names may not be imported for that alone.

    Raises:
        UserError: A key or a value is invalid.
    """
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise explain(error, Recipe) from None


def parse_recipe(tree: dict[str, Any]) -> Recipe:
    """Build and check a recipe from nested dictionaries that the user gave: code that it names may be imported.

    Raises:
        UserError: A key or a value is invalid.
    """
    plugins.give(tree)
    return parse_saved_recipe(tree)


def _check_recipe(recipe: Recipe) -> None:
    """Refuse sections that do not fit each other."""
    if not recipe.out.strip() or "\0" in recipe.out:
        raise UserError("out", recipe.out, "must be a directory", "give the run directory, such as out=runs/digits")
    if len(set(recipe.monitor)) < len(recipe.monitor):
        raise UserError("monitor", recipe.monitor, "must name each once", "remove the second")
    recipe.generator.check(recipe.data)
    recipe.discriminator.check(recipe.data)
    if recipe.augmentation:
        recipe.augmentation.check(recipe.data)
    if recipe.deterministic and recipe.augmentation and recipe.augmentation.kind == "ada":
        problem, detail = "must be diffaugment with deterministic=true", "torch's grid_sample is not deterministic"
        remedy = "set deterministic=false, or augmentation.kind=diffaugment"
        raise UserError("augmentation.kind", "ada", problem, remedy, detail)
    check_batch_statistics(recipe)
    _check_metrics(recipe)
    _check_init(recipe)
    check_data_and_networks(recipe)
    check_networks(recipe)
    _check_objective(recipe)
    check_penalties(recipe.objective, recipe.discriminator)
    for network in recipe.networks:
        optimizer, section = getattr(recipe.optimizer, network), getattr(recipe, network)
        optimizer.check(f"optimizer.{network}", recipe.total_nimg)
        if optimizer.kind == "muon" and not section.is_transformer:
            *others, last = (f for f, pair in FAMILIES.items() if pair[NETWORKS.index(network)].is_transformer)
            choices = f"{', '.join(others)} or {last}"
            field, detail = f"optimizer.{network}.kind", "Muon is for the matrices of a transformer's blocks"
            problem = f"must be adam, adamw, sgd or rmsprop with {network}.family={section.family}"
            other = f"{network}.family to {choices}"
            if getattr(section, "trains_teacher", None) is False:
                problem, other = f"needs {network}.trains_teacher=true", f"{network}.trains_teacher=true"
            raise UserError(field, "muon", problem, f"set {field}=adamw, or {other}", detail)
        if optimizer.reference_width and section.own_width is None:
            field, detail = f"optimizer.{network}.reference_width", "its layers have several widths"
            problem = f"must be unset with {network}.family={section.family}"
            raise UserError(field, optimizer.reference_width, problem, "remove it, and give lr itself", detail)


def _check_metrics(recipe: Recipe) -> None:
    if recipe.metrics is None:
        return
    field, reference = "metrics.reference", recipe.metrics.reference
    if reference is None and recipe.data.kind == "latents":
        remedy, detail = "give an .npz file of images or of statistics, or metrics=null", "the data has no images"
        raise UserError(field, None, "must be given with data.kind=latents", remedy, detail)
    if reference is not None and recipe.translates:
        raise UserError(field, reference, "needs a generator from latents", "remove it")
    check_targets(recipe.metrics.asked, "metrics.names", recipe, perceptual_network(recipe))


def _check_init(recipe: Recipe) -> None:
    init = recipe.init_from
    decay = recipe.optimizer.discriminator.weight_decay
    if init and init.freeze_discriminator and decay:
        field, detail = "optimizer.discriminator.weight_decay", "it would change the frozen layers"
        problem = "must be 0 with init_from.freeze_discriminator"
        raise UserError(field, decay, problem, f"set {field}=0", detail)


def _check_objective(recipe: Recipe) -> None:
    objective = recipe.objective
    if objective.path_length and not recipe.generator.has_styles:
        problem, detail = f"must be null with generator.family={recipe.generator.family}", "it needs style vectors"
        remedy = "remove it, or set generator.family=stylegan2"
        raise UserError("objective.path_length", f"weight={objective.path_length.weight}", problem, remedy, detail)
    if recipe.accumulation_of("generator") != recipe.accumulation_of("discriminator"):
        remedy = "remove accumulation from engines.generator and engines.discriminator"
        if objective.loss == "relativistic":
            problem = "needs equal accumulation in both networks: it pairs each fake with a real"
            raise UserError("objective.loss", objective.loss, problem, remedy)
        if objective.reuse_fakes:
            raise UserError("objective.reuse_fakes", None, "needs equal accumulation in both networks", remedy)
    labels = objective.fake_labels
    if labels == "data" and not objective.reuse_fakes and recipe.has_discriminator:
        problem = "must be uniform or frequencies without objective.reuse_fakes"
        raise UserError("objective.fake_labels", labels, problem, "set objective.reuse_fakes=true, or remove it")
    if labels != "uniform" and recipe.translates:
        problem = "must be unset with a generator from images, whose labels are those of the images"
        raise UserError("objective.fake_labels", labels, problem, "remove it")
    if labels != "uniform" and not recipe.data.may_have_conditions:
        problem, detail = "must be uniform with data.num_classes=0", "the data has no labels"
        raise UserError("objective.fake_labels", labels, problem, "remove it, or set data.num_classes", detail)
    if objective.teacher and not recipe.discriminator.has_tokens:
        problem, detail = f"must be null with discriminator.family={recipe.discriminator.family}", "it has no tokens"
        remedy = "remove it, or set discriminator.family to gat or cat"
        raise UserError("objective.teacher", objective.teacher.path, problem, remedy, detail)
    if objective.teacher and recipe.data.image_channels not in (1, 3):
        problem, detail = "must be 1 or 3 with objective.teacher", "it looks at colours"
        raise UserError(
            "data.image_channels", recipe.data.image_channels, problem, "set objective.teacher=null", detail
        )
    if objective.teacher and not recipe.data.resolution.is_square:
        problem, detail = "must be square with objective.teacher", "its patches are a square grid"
        remedy = "set objective.teacher=null, or give one number"
        raise UserError("data.resolution", recipe.data.resolution.value, problem, remedy, detail)
    if recipe.statistics == "every_pass" and (objective.schedule == "overlapped" or objective.reuse_fakes):
        key = "reuse_fakes=true" if objective.reuse_fakes else "schedule=overlapped"
        problem, detail = f"must be every_update with objective.{key}", "passes come in another order then"
        raise UserError("statistics", "every_pass", problem, "remove it, or change that key", detail)
    if recipe.statistics == "every_pass" and (key := objective.adversarial.weighs):
        problem, detail = f"must be every_update with objective.adversarial.{key}", "G's passes are repeated then"
        raise UserError("statistics", "every_pass", problem, "remove it, or that key", detail)
    if objective.feature_matching and objective.adversarial.adaptive:
        problem, detail = "must be 0 with objective.adversarial.adaptive", "it would be weighed with the loss on logits"
        remedy = "remove it, or give a fixed weight"
        raise UserError("objective.feature_matching", objective.feature_matching, problem, remedy, detail)
    if objective.schedule == "overlapped" and recipe.inputs_from_data:
        raise overlaps_data("a generator from images" if recipe.translates else "objective.fake_labels=data")
    r1, r2 = objective.r1, objective.r2
    if r1 and r2 and (r1.form, r1.every) != (r2.form, r2.every):
        problem = f"must have the form and every of objective.r1 ({r1.form}, every {r1.every})"
        remedy = "give both the same form and every; their weights may differ"
        raise UserError("objective.r2", f"{r2.form}, every {r2.every}", problem, remedy)
