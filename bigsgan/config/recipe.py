"""A recipe: the complete description of a run, read from YAML, checked, and printed back fully resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from bigsgan.config.augmentation import Augmentation
from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from bigsgan.config.engine_plan import EnginePlan
from bigsgan.config.families import AnyDiscriminator, AnyGenerator
from bigsgan.config.messages import explain
from bigsgan.config.metrics import Metrics
from bigsgan.config.sections import (
    EMA,
    BatchSize,
    Checkpoints,
    Data,
    Engine,
    Engines,
    InitFrom,
    NaturalInt,
    Objective,
    Optimizer,
    Optimizers,
    PathText,
    Pipeline,
    PositiveInt,
    Section,
)
from bigsgan.config.yaml_file import apply_override, apply_overrides, dump_yaml, read_yaml
from bigsgan.errors import UserError
from bigsgan.placement import Placement

NETWORKS = ("generator", "discriminator")


class Recipe(Section):
    """The top of a recipe. Every number about length is in images (``nimg``)."""

    out: PathText
    """Run directory."""
    seed: NaturalInt = 0
    total_nimg: PositiveInt
    """Images after which the run is complete; ``batch`` images a generator update."""
    batch: BatchSize
    """Images in a batch, over all ranks and micro-batches."""
    accumulation: PositiveInt = 1
    """Micro-batches that a batch is computed in, one after the other."""
    report_nimg: PositiveInt
    sample_nimg: PositiveInt
    sample_statistics: Literal["running", "batch"] = "running"
    """Batch norm in samples: running statistics (for the EMA: standing ones), or each batch's, as in training."""
    checkpoint_nimg: PositiveInt
    checkpoints: Checkpoints = Checkpoints()
    max_rollbacks: NaturalInt = 10
    """How often a run returns to a checkpoint after a non-finite update, before it ends instead."""
    hang_timeout_seconds: Annotated[int, Field(gt=0, le=10**8)] = 480
    """The run is ended if one update, report or grid of samples takes longer."""
    deterministic: bool = False
    """Use deterministic kernels, which may be slower."""
    data: Data
    generator: AnyGenerator
    discriminator: AnyDiscriminator
    objective: Objective = Objective()
    augmentation: Augmentation | None = None
    optimizer: Optimizers
    ema: EMA
    metrics: Metrics | None = None
    init_from: InitFrom | None = None
    engines: Engines = Engines()
    pipeline: Pipeline = Pipeline()

    def engine(self, network: str) -> Engine:
        """Return the engine section of ``generator`` or ``discriminator``."""
        return getattr(self.engines, network)

    def accumulation_of(self, network: str) -> int:
        """Micro-batches of one network: its engine's own number, or the recipe's."""
        return self.engine(network).accumulation or self.accumulation

    @property
    def latent_size(self) -> int:
        """Numbers in a latent; 0 where the generator translates images."""
        return getattr(self.generator, "latent_size", 0)

    def to_yaml(self) -> str:
        """Write the recipe with every default filled in."""
        return dump_yaml(self.model_dump())


@dataclass(frozen=True)
class RunPlan:
    """A recipe that has been checked against its DeepSpeed files and the number of ranks."""

    recipe: Recipe
    world_size: int
    engines: Mapping[str, EnginePlan]

    def placement(self, network: str) -> Placement:
        """Return the ranks of the network's stages and replicas."""
        return self.engines[network].placement

    @property
    def images_travel(self) -> bool:
        """Whether D's inputs are read on other ranks than those that hold G's outputs."""
        generator, discriminator = (self.placement(network) for network in NETWORKS)
        return generator.output_ranks() != discriminator.input_ranks()

    @property
    def keeps_generator_graphs(self) -> bool:
        """Whether G's activations are kept from its forward passes to its backward passes, or recomputed."""
        if self.placement("generator").num_stages > 1:
            return self.recipe.pipeline.generator_phase == "keep"
        # A ZeRO engine alternates forward and backward; here D needs all micro-batches before the first gradient.
        needs_all = self.images_travel or self.recipe.objective.reuse_fakes
        return not needs_all or self.recipe.accumulation_of("generator") == 1


def load_recipe(path: Path, overrides: list[str], data_root: str | None = None) -> Recipe:
    """Read a recipe and apply command-line overrides, and ``data_root`` in the place of its ``data.root``.

    Raises:
        UserError: The recipe or an override is invalid.
    """
    tree = read_yaml(path)
    apply_overrides(tree, overrides)
    if data_root:
        apply_override(tree, ["data", "root"], data_root)
    return parse_recipe(tree)


def parse_recipe(tree: dict[str, Any]) -> Recipe:
    """Build and check a recipe from nested dictionaries.

    Raises:
        UserError: A key or a value is invalid.
    """
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise explain(error, Recipe) from None
    _check_recipe(recipe)
    return recipe


def plan_run(recipe: Recipe, world_size: int, recipe_dir: Path | None = None) -> RunPlan:
    """Derive each network's micro-batches for ``world_size`` ranks and read its DeepSpeed file.

    Raises:
        UserError: The batch does not divide, or a DeepSpeed file does not fit the recipe.
    """
    placements = {network: _place(recipe, network, world_size) for network in NETWORKS}
    for network, phase in zip(2 * NETWORKS, NETWORKS + NETWORKS[::-1], strict=True):
        # Each network's own micro-batches, and the other's: G computes D's as well, and D judges G's.
        _check_division(recipe, network, recipe.accumulation_of(phase), placements[network].num_replicas)
    engines: dict[str, EnginePlan] = {}
    for network, placement in placements.items():
        section, optimizer = recipe.engine(network), getattr(recipe.optimizer, network)
        size = recipe.batch // (recipe.accumulation_of(network) * placement.num_replicas)
        derived = _derived_keys(recipe, network, size)
        file = read_deepspeed_file(network, section.ds_config, recipe_dir, derived)
        _check_pipeline(recipe, network, file)
        _check_compile(recipe, network, file)
        _check_cuda_graphs(recipe, network, file)
        engines[network] = EnginePlan(network, section, optimizer, file, placement, size, derived)
    _check_slope(recipe, engines["discriminator"].file)
    return RunPlan(recipe, world_size, engines)


def _derived_keys(recipe: Recipe, network: str, micro_batch_size: int) -> dict[str, Any]:
    """DeepSpeed's keys whose values the recipe determines; its file may only repeat them."""
    return {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_of(network),
        "gradient_clipping": getattr(recipe.optimizer, network).clip_norm or 0.0,  # DeepSpeed's default is 1.0
    }


def _place(recipe: Recipe, network: str, world_size: int) -> Placement:
    """The ranks of a network's stages and replicas.

    Raises:
        UserError: The stages do not divide the ranks.
    """
    stages = recipe.engine(network).pipeline_stages
    if world_size % stages:
        problem = f"must divide the number of ranks ({world_size})"
        remedy = f"start a multiple of {stages} ranks, or set a number of stages that divides {world_size}"
        raise UserError(f"engines.{network}.pipeline_stages", stages, problem, remedy)
    return Placement(stages, world_size // stages, reversed=network == "discriminator")


def _check_division(recipe: Recipe, network: str, accumulation: int, replicas: int) -> None:
    batch = recipe.batch
    parts = accumulation * replicas
    if batch % parts:
        problem = f"must be a multiple of {parts}"
        detail = f"{accumulation} micro-batches on {replicas} ranks for the {network}"
        raise UserError("batch", batch, problem, f"set batch={-(-batch // parts) * parts}", detail)
    getattr(recipe, network).check_micro_batch(batch // parts, parts)
    if network == "generator" and recipe.objective.path_length:
        recipe.objective.path_length.check_micro_batch(batch // parts)


def _check_pipeline(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse what a network with pipeline stages does not support."""
    stages = recipe.engine(network).pipeline_stages
    if stages == 1:
        return
    field = f"engines.{network}.pipeline_stages"
    if file.stage > 1:
        problem, detail = (
            f"must be 1 with ZeRO stage {file.stage}",
            f"in {file.path}; a pipeline does not shard gradients",
        )
        remedy = "use stage 1, such as ds_configs/zero1.json, or remove pipeline_stages"
        raise UserError(field, stages, problem, remedy, detail)
    if file.offload_optimizer != "none":
        remedy = "use a file without offload, such as ds_configs/zero1.json"
        raise UserError(field, stages, "must be 1 with offload", remedy, f"in {file.path}")
    if file.content.get("wall_clock_breakdown"):
        remedy = "remove it; a run of two pipelines writes pipeline_trace.json"
        raise UserError(f"{file.path}: wall_clock_breakdown", True, "must be false with pipeline_stages", remedy)
    if recipe.objective.path_length:
        problem, detail = f"must be null with engines.{network}.pipeline_stages", "it needs a double backward through G"
        remedy = f"set objective.path_length=null, or engines.{network}.pipeline_stages=1"
        weight = recipe.objective.path_length.weight
        raise UserError("objective.path_length", f"weight={weight}", problem, remedy, detail)
    if network == "generator":
        return
    one_stage, needs_two = "engines.discriminator.pipeline_stages=1", "it needs a double backward through D"
    if recipe.objective.feature_matching:
        problem, detail = (
            "must be 0 with engines.discriminator.pipeline_stages",
            "no stage has the features of all layers",
        )
        remedy = f"remove it, or set {one_stage}"
        raise UserError("objective.feature_matching", recipe.objective.feature_matching, problem, remedy, detail)
    if recipe.objective.gradient_penalty:
        problem = "must be null with engines.discriminator.pipeline_stages"
        remedy = f"use objective.r1 with form=finite_difference, or set {one_stage}"
        given = f"weight={recipe.objective.gradient_penalty.weight}"
        raise UserError("objective.gradient_penalty", given, problem, remedy, needs_two)
    for name in ("r1", "r2"):
        penalty = getattr(recipe.objective, name)
        if penalty and penalty.form == "exact":
            field, problem = f"objective.{name}.form", "must be finite_difference with discriminator stages"
            raise UserError(field, "exact", problem, f"set {field}=finite_difference, or {one_stage}", needs_two)


def _check_compile(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse what torch.compile does not support."""
    engine = recipe.engine(network)
    if engine.compile == "none":
        return
    field = f"engines.{network}.compile"
    if file.stage == 3:
        problem, detail = "must be none with ZeRO stage 3", f"in {file.path}; it gathers weights between operations"
        remedy = f"use stage 2, such as ds_configs/zero2.json, or set {field}=none"
        raise UserError(field, engine.compile, problem, remedy, detail)
    if engine.pipeline_stages > 1:
        remedy = f"set {field}=none, or engines.{network}.pipeline_stages=1"
        raise UserError(field, engine.compile, "must be none with pipeline_stages", remedy)
    if engine.compile == "whole" and engine.activation_checkpointing:
        problem, detail = "must be layers with activation_checkpointing", "it recomputes one layer at a time"
        raise UserError(field, engine.compile, problem, f"set {field}=layers", detail)


def _check_cuda_graphs(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse CUDA graphs without compilation, and where a graph's outputs may outlive its next replay."""
    engine = recipe.engine(network)
    if not engine.cuda_graphs:
        return
    field = f"engines.{network}.cuda_graphs"
    if engine.compile == "none":
        problem, remedy = f"must be false with engines.{network}.compile=none", f"set engines.{network}.compile=whole"
        raise UserError(field, True, problem, f"{remedy}, or {field}=false", "only compiled code is replayed")
    if engine.activation_checkpointing:
        problem, detail = "must be false with activation_checkpointing", "it would replay within a backward pass"
        remedy = f"set {field}=false, or engines.{network}.activation_checkpointing=false"
        raise UserError(field, True, problem, remedy, detail)
    if file.offload_optimizer != "none":
        problem, detail = "must be false with offload", f"in {file.path}, which copies gradients in its own way"
        raise UserError(field, True, problem, f"set {field}=false, or use a file without offload", detail)
    if file.content.get("data_types"):
        problem, detail = "must be false with data_types", f"in {file.path}; such gradients may outlive an update"
        raise UserError(field, True, problem, f"set {field}=false, or remove data_types from the file", detail)


def _check_slope(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse a finite difference below bf16's resolution: at sigma 0.01 it measured rounding, seven times R1."""
    is_bf16 = file.precision == "bf16" or recipe.discriminator.computes_in_bf16
    for name in ("r1", "r2"):
        penalty = getattr(recipe.objective, name)
        if penalty and penalty.form == "finite_difference" and is_bf16 and penalty.sigma < 0.1:
            field, detail = f"objective.{name}.sigma", "a smaller step is lost in rounding"
            remedy = f"set {field}=0.1, or use an fp16 or fp32 file for the discriminator"
            raise UserError(field, penalty.sigma, "must be at least 0.1 with a bf16 discriminator", remedy, detail)


def _check_recipe(recipe: Recipe) -> None:
    """Check what involves several sections."""
    if not recipe.out.strip() or "\0" in recipe.out:
        raise UserError("out", recipe.out, "must be a directory", "give the run directory, such as out=runs/digits")
    recipe.generator.check(recipe.data)
    recipe.discriminator.check(recipe.data)
    if recipe.augmentation:
        recipe.augmentation.check(recipe.data)
    if recipe.deterministic and recipe.augmentation and recipe.augmentation.kind == "ada":
        problem, detail = "must be diffaugment with deterministic=true", "torch's grid_sample is not deterministic"
        remedy = "set deterministic=false, or augmentation.kind=diffaugment"
        raise UserError("augmentation.kind", "ada", problem, remedy, detail)
    _check_init(recipe)
    _check_pairs(recipe)
    _check_objective(recipe)
    _check_penalties(recipe.objective)
    for network in NETWORKS:
        _check_optimizer(f"optimizer.{network}", getattr(recipe.optimizer, network), recipe.total_nimg)


def _check_init(recipe: Recipe) -> None:
    init = recipe.init_from
    decay = recipe.optimizer.discriminator.weight_decay
    if init and init.freeze_discriminator and decay:
        field, detail = "optimizer.discriminator.weight_decay", "it would change the frozen layers"
        problem = "must be 0 with init_from.freeze_discriminator"
        raise UserError(field, decay, problem, f"set {field}=0", detail)


def _check_pairs(recipe: Recipe) -> None:
    """Refuse pairs of images for networks that do not read pairs, and the other way round."""
    paired = recipe.data.paired
    for network in NETWORKS:
        section = getattr(recipe, network)
        if section.paired != paired:
            problem = "must be a family for latents" if section.paired else "must be a family for pairs of images"
            remedy = "set data.kind=side_by_side" if section.paired else f"set {network}.family=pix2pix"
            raise UserError(f"{network}.family", section.family, problem, remedy, f"data.kind is {recipe.data.kind}")
    if paired and not recipe.objective.reuse_fakes:
        problem, detail = "must be true with pairs of images", "both networks' updates read the same inputs"
        raise UserError("objective.reuse_fakes", False, problem, "set objective.reuse_fakes=true", detail)
    if paired and recipe.augmentation:
        problem, detail = "must be null with pairs of images", "it would move targets away from their inputs"
        raise UserError("augmentation", recipe.augmentation.kind, problem, "set augmentation=null", detail)
    for name in ("l1", "feature_matching"):
        weight = getattr(recipe.objective, name)
        if weight and not paired:
            problem, detail = f"must be 0 with data.kind={recipe.data.kind}", "only pairs of images have targets"
            raise UserError(f"objective.{name}", weight, problem, "remove it, or set data.kind=side_by_side", detail)


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
    r1, r2 = objective.r1, objective.r2
    if r1 and r2 and (r1.form, r1.every) != (r2.form, r2.every):
        problem = f"must have the form and every of objective.r1 ({r1.form}, every {r1.every})"
        remedy = "give both the same form and every; their weights may differ"
        raise UserError("objective.r2", f"{r2.form}, every {r2.every}", problem, remedy)


def _check_penalties(objective: Objective) -> None:
    for name, penalty in (("r1", objective.r1), ("r2", objective.r2)):
        if penalty and penalty.decay_nimg is not None and penalty.final_weight is None:
            field, remedy = f"objective.{name}.decay_nimg", f"give objective.{name}.final_weight, or remove it"
            raise UserError(field, penalty.decay_nimg, "must be unset without final_weight", remedy)


def _check_optimizer(field: str, optimizer: Optimizer, total_nimg: int) -> None:
    if optimizer.warmup_nimg >= total_nimg:
        problem, remedy = f"must be less than total_nimg ({total_nimg})", "shorten the warm-up or raise total_nimg"
        raise UserError(f"{field}.warmup_nimg", optimizer.warmup_nimg, problem, remedy)
    if optimizer.momentum and optimizer.kind == "adam":
        remedy = f"set {field}.betas, or {field}.kind to sgd or rmsprop"
        raise UserError(f"{field}.momentum", optimizer.momentum, "must be 0 with kind=adam", remedy)
    if optimizer.final_beta2 is not None and optimizer.kind != "adam":
        problem = f"must be unset with kind={optimizer.kind}"
        raise UserError(f"{field}.final_beta2", optimizer.final_beta2, problem, f"remove it, or set {field}.kind=adam")
    for key in ("final_lr", "final_beta2", "decay_nimg"):
        value = getattr(optimizer, key)
        if value != Optimizer.model_fields[key].default and optimizer.decay == "constant":
            remedy = f"set {field}.decay to linear or cosine, or remove it"
            raise UserError(f"{field}.{key}", value, "must be unset with decay=constant", remedy)
    if optimizer.decay_nimg is not None and optimizer.decay_nimg <= optimizer.warmup_nimg:
        problem = f"must be greater than warmup_nimg ({optimizer.warmup_nimg})"
        raise UserError(f"{field}.decay_nimg", optimizer.decay_nimg, problem, f"raise it, or lower {field}.warmup_nimg")
