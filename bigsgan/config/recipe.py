"""A recipe: the complete description of a run, read from YAML, checked, and printed back fully resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from bigsgan.config.augmentation import Augmentation
from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from bigsgan.config.families import AnyDiscriminator, AnyGenerator
from bigsgan.config.messages import explain
from bigsgan.config.metrics import Metrics
from bigsgan.config.sections import (
    Average,
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
from bigsgan.config.yaml_file import apply_overrides, dump_yaml, read_yaml
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
    """Batch norm in samples: running statistics (of the average: standing ones), or each batch's, as in training."""
    checkpoint_nimg: PositiveInt
    checkpoints: Checkpoints = Checkpoints()
    max_rollbacks: NaturalInt = 10
    """How often a run goes back to a checkpoint because an update was not finite, before it ends instead."""
    hang_timeout_seconds: Annotated[int, Field(gt=0, le=10**8)] = 480
    """A run that spends longer in one update, report or grid of samples is ended."""
    deterministic: bool = False
    """Take kernels that compute the same numbers in every run, though others are faster."""
    data: Data
    generator: AnyGenerator
    discriminator: AnyDiscriminator
    objective: Objective = Objective()
    augmentation: Augmentation | None = None
    optimizer: Optimizers
    ema: Average
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
    """A recipe that was checked against its DeepSpeed files and the number of ranks."""

    recipe: Recipe
    world_size: int
    deepspeed_files: dict[str, DeepSpeedFile]

    def placement(self, network: str) -> Placement:
        """Return where the network's stages and replicas lie."""
        stages = self.recipe.engine(network).pipeline_stages
        return Placement(stages, self.world_size // stages, reversed=network == "discriminator")

    @property
    def images_travel(self) -> bool:
        """Whether the ranks that read the discriminator's inputs are others than those where images arise."""
        generator, discriminator = (self.placement(network) for network in NETWORKS)
        return generator.output_ranks() != discriminator.input_ranks()

    @property
    def keeps_generator_graphs(self) -> bool:
        """Whether what G's forward passes leave for its backward passes is kept meanwhile, or else computed again."""
        if self.placement("generator").num_stages > 1:
            return self.recipe.pipeline.generator_phase == "keep"
        # A ZeRO engine goes forward and backward in turn, and D is to see all micro-batches before a gradient comes.
        needs_all = self.images_travel or self.recipe.objective.reuse_fakes
        return not needs_all or self.recipe.accumulation_of("generator") == 1

    def micro_batch_size(self, network: str) -> int:
        """Images of one micro-batch on one replica."""
        return self.recipe.batch // (self.recipe.accumulation_of(network) * self.placement(network).num_replicas)


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read a recipe and lay command-line overrides over it.

    Raises:
        UserError: With the field, its value and the remedy.
    """
    tree = read_yaml(path)
    apply_overrides(tree, overrides)
    return parse_recipe(tree)


def parse_recipe(tree: dict[str, Any]) -> Recipe:
    """Check the content of a recipe.

    Raises:
        UserError: With the field, its value and the remedy.
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
        UserError: The batch does not divide, or a DeepSpeed file does not fit.
    """
    files: dict[str, DeepSpeedFile] = {}
    plan = RunPlan(recipe, world_size, files)
    for network in NETWORKS:
        _check_stages(recipe, network, world_size)
    for network, phase in zip(2 * NETWORKS, NETWORKS + NETWORKS[::-1], strict=True):
        # Each network's own micro-batches, and the other's: G computes D's as well, and D judges G's.
        _check_division(plan, network, recipe.accumulation_of(phase))
    for network in NETWORKS:
        derived = derived_keys(plan, network)
        files[network] = read_deepspeed_file(network, recipe.engine(network).ds_config, recipe_dir, derived)
        _check_pipeline(recipe, network, files[network])
        _check_compile(recipe, network, files[network])
        _check_cuda_graphs(recipe, network, files[network])
    _check_slope(recipe, files["discriminator"])
    return plan


def derived_keys(plan: RunPlan, network: str) -> dict[str, Any]:
    """DeepSpeed's keys whose values follow from the recipe; its file may only repeat them."""
    recipe = plan.recipe
    return {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size(network),
        "gradient_accumulation_steps": recipe.accumulation_of(network),
        "gradient_clipping": getattr(recipe.optimizer, network).clip_norm or 0.0,  # DeepSpeed's default is 1.0
    }


def _check_stages(recipe: Recipe, network: str, world_size: int) -> None:
    stages = recipe.engine(network).pipeline_stages
    if world_size % stages:
        raise UserError(
            f"engines.{network}.pipeline_stages",
            stages,
            f"times data-parallel ranks is to give the {world_size} ranks that were started",
            f"start a multiple of {stages} ranks, or set a number of stages that divides {world_size}",
        )


def _check_division(plan: RunPlan, network: str, accumulation: int) -> None:
    batch, replicas = plan.recipe.batch, plan.placement(network).num_replicas
    parts = accumulation * replicas
    if batch % parts:
        raise UserError(
            "batch",
            batch,
            f"does not divide into {accumulation} micro-batches on {replicas} ranks for the {network}",
            f"set batch to a multiple of {parts}, such as batch={-(-batch // parts) * parts}",
        )
    getattr(plan.recipe, network).check_micro_batch(batch // parts, parts)
    if network == "generator" and plan.recipe.objective.path_length:
        plan.recipe.objective.path_length.check_micro_batch(batch // parts)


def _check_pipeline(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse what a network in stages cannot do."""
    stages = recipe.engine(network).pipeline_stages
    if stages == 1:
        return
    field = f"engines.{network}.pipeline_stages"
    if file.stage > 1:
        problem = f"does not go with ZeRO stage {file.stage} ({file.path}): a pipeline's gradients stay whole"
        raise UserError(field, stages, problem, "use stage 1, as ds_configs/zero1.json, or remove pipeline_stages")
    if file.offload_optimizer != "none":
        remedy = "use a file without offload, such as ds_configs/zero1.json"
        raise UserError(field, stages, f"does not go with offloading ({file.path})", remedy)
    if file.content.get("wall_clock_breakdown"):
        remedy = "remove it; a run of two pipelines writes pipeline_trace.json"
        raise UserError(f"{file.path}: wall_clock_breakdown", True, "does not go with pipeline_stages", remedy)
    if recipe.objective.path_length:
        problem = "needs a double backward through the generator, beside which no network can be a pipeline"
        remedy = f"remove it (objective.path_length=null), or set engines.{network}.pipeline_stages=1"
        raise UserError("objective.path_length", recipe.objective.path_length.weight, problem, remedy)
    if network == "discriminator" and recipe.objective.feature_matching:
        problem = "reads the features of all layers, which no stage of the discriminator has"
        remedy = "remove it, or set engines.discriminator.pipeline_stages=1"
        raise UserError("objective.feature_matching", recipe.objective.feature_matching, problem, remedy)
    if network == "discriminator" and recipe.objective.gradient_penalty:
        problem = "needs a double backward, which no pipeline of the discriminator can do"
        remedy = "use objective.r1 with form=finite_difference, or engines.discriminator.pipeline_stages=1"
        raise UserError("objective.gradient_penalty", recipe.objective.gradient_penalty.weight, problem, remedy)
    for name in ("r1", "r2"):
        penalty = getattr(recipe.objective, name)
        if network == "discriminator" and penalty and penalty.form == "exact":
            raise UserError(
                f"objective.{name}.form",
                "exact",
                "needs a double backward, which no pipeline of the discriminator can do",
                f"set objective.{name}.form=finite_difference, or engines.discriminator.pipeline_stages=1",
            )


def _check_compile(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse what torch.compile cannot see through."""
    engine = recipe.engine(network)
    if engine.compile == "none":
        return
    field = f"engines.{network}.compile"
    if file.stage == 3:
        problem = f"does not go with ZeRO stage 3 ({file.path}), which gathers weights between operations"
        raise UserError(field, engine.compile, problem, f"use stage 2, as ds_configs/zero2.json, or set {field}=none")
    if engine.pipeline_stages > 1:
        remedy = f"set {field}=none, or engines.{network}.pipeline_stages=1"
        raise UserError(field, engine.compile, "does not go with pipeline_stages", remedy)
    if engine.compile == "whole" and engine.activation_checkpointing:
        problem = "does not go with activation_checkpointing, which recomputes layer by layer"
        raise UserError(field, engine.compile, problem, f"set {field}=layers")


def _check_cuda_graphs(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse graphs of nothing, and where what they compute might be used too late (engines/replays.py)."""
    engine = recipe.engine(network)
    if not engine.cuda_graphs:
        return
    field = f"engines.{network}.cuda_graphs"
    if engine.compile == "none":
        problem = f"replays what is compiled, and engines.{network}.compile is none"
        raise UserError(field, True, problem, f"set engines.{network}.compile=whole, or {field}=false")
    if engine.activation_checkpointing:
        problem = "does not go with activation_checkpointing, whose recomputation would replay within a backward pass"
        raise UserError(field, True, problem, f"set {field}=false, or engines.{network}.activation_checkpointing=false")
    if file.offload_optimizer != "none":
        problem = f"does not go with offloading ({file.path}), which copies gradients in ways of its own"
        raise UserError(field, True, problem, f"set {field}=false, or use a file without offload")
    if file.content.get("data_types"):
        problem = f"does not go with data_types in {file.path}: gradients in a type of their own may outlive an update"
        raise UserError(field, True, problem, f"set {field}=false, or remove data_types from the file")


def _check_slope(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse a finite difference that bf16's 8 bits cannot see: at sigma 0.01 it measured rounding, seven times R1."""
    is_bf16 = file.precision == "bf16" or recipe.discriminator.computes_in_bf16
    for name in ("r1", "r2"):
        penalty = getattr(recipe.objective, name)
        if penalty and penalty.form == "finite_difference" and is_bf16 and penalty.sigma < 0.1:
            raise UserError(
                f"objective.{name}.sigma",
                penalty.sigma,
                "is a smaller step than a bf16 discriminator resolves",
                f"set objective.{name}.sigma=0.1, or use an fp16 or fp32 file for the discriminator",
            )


def _check_recipe(recipe: Recipe) -> None:
    """Check what no single section can see."""
    if not recipe.out.strip() or "\0" in recipe.out:
        raise UserError("out", recipe.out, "is no directory", "give the run directory, such as out=runs/digits")
    recipe.generator.check(recipe.data)
    recipe.discriminator.check(recipe.data)
    if recipe.augmentation:
        recipe.augmentation.check(recipe.data)
    if recipe.deterministic and recipe.augmentation and recipe.augmentation.kind == "ada":
        problem = "has no deterministic backward pass on a GPU (torch's grid_sample)"
        remedy = "set deterministic=false, or augmentation.kind=diffaugment"
        raise UserError("augmentation.kind", "ada", problem, remedy)
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
        problem = "would move the layers that init_from.freeze_discriminator keeps"
        raise UserError("optimizer.discriminator.weight_decay", decay, problem, "set it to 0")


def _check_pairs(recipe: Recipe) -> None:
    """Refuse pairs of images for networks that do not read any, and the other way round."""
    paired = recipe.data.paired
    for network in NETWORKS:
        section = getattr(recipe, network)
        if section.paired != paired:
            problem = "reads pairs of images" if section.paired else "does not read the inputs of pairs"
            remedy = "set data.kind=side_by_side" if section.paired else f"set {network}.family=pix2pix"
            raise UserError(f"{network}.family", section.family, f"{problem}; data.kind is {recipe.data.kind}", remedy)
    if paired and not recipe.objective.reuse_fakes:
        problem = "would need other inputs for the generator's update than the discriminator's, which pairs do not have"
        raise UserError("objective.reuse_fakes", False, problem, "set objective.reuse_fakes=true")
    if paired and recipe.augmentation:
        problem = "would move targets away from their inputs"
        raise UserError("augmentation.kind", recipe.augmentation.kind, problem, "set augmentation=null")
    for name in ("l1", "feature_matching"):
        weight = getattr(recipe.objective, name)
        if weight and not paired:
            problem = "compares with targets, which only pairs have"
            raise UserError(f"objective.{name}", weight, problem, "remove it, or set data.kind=side_by_side")


def _check_objective(recipe: Recipe) -> None:
    objective = recipe.objective
    if objective.path_length and not recipe.generator.has_styles:
        problem = f"needs styles, which a generator of family {recipe.generator.family} does not have"
        remedy = "remove it, or set generator.family=stylegan2"
        raise UserError("objective.path_length", objective.path_length.weight, problem, remedy)
    if recipe.accumulation_of("generator") != recipe.accumulation_of("discriminator"):
        remedy = "remove accumulation from engines.generator and engines.discriminator"
        if objective.loss == "relativistic":
            problem = "pairs each fake with a real, so both networks need the same micro-batches"
            raise UserError("objective.loss", objective.loss, problem, remedy)
        if objective.reuse_fakes:
            raise UserError("objective.reuse_fakes", True, "needs the same micro-batches in both networks", remedy)
    r1, r2 = objective.r1, objective.r2
    if r1 and r2 and (r1.form, r1.every) != (r2.form, r2.every):
        problem = f"differs from objective.r1 ({r1.form}, every {r1.every}) in form or every"
        remedy = "give both the same form and every; their weights may differ"
        raise UserError("objective.r2", f"{r2.form}, every {r2.every}", problem, remedy)


def _check_penalties(objective: Objective) -> None:
    for name, penalty in (("r1", objective.r1), ("r2", objective.r2)):
        if penalty and penalty.decay_nimg is not None and penalty.final_weight is None:
            field, remedy = f"objective.{name}.decay_nimg", f"give objective.{name}.final_weight, or remove it"
            raise UserError(field, penalty.decay_nimg, "is not used by a constant weight", remedy)


def _check_optimizer(field: str, optimizer: Optimizer, total_nimg: int) -> None:
    if optimizer.warmup_nimg >= total_nimg:
        problem = f"reaches total_nimg ({total_nimg})"
        raise UserError(
            f"{field}.warmup_nimg", optimizer.warmup_nimg, problem, "shorten the warm-up or raise total_nimg"
        )
    if optimizer.momentum and optimizer.kind == "adam":
        remedy = f"set {field}.betas, or {field}.kind to sgd or rmsprop"
        raise UserError(f"{field}.momentum", optimizer.momentum, "is not used by adam", remedy)
    if optimizer.final_lr and optimizer.decay == "constant":
        remedy = f"set {field}.decay to linear or cosine, or remove it"
        raise UserError(f"{field}.final_lr", optimizer.final_lr, "is not used by a constant learning rate", remedy)
    if optimizer.final_beta2 is not None and optimizer.kind != "adam":
        problem = f"is not used by {optimizer.kind}"
        raise UserError(f"{field}.final_beta2", optimizer.final_beta2, problem, f"remove it, or set {field}.kind=adam")
    for key in ("final_beta2", "decay_nimg"):
        value = getattr(optimizer, key)
        if value is not None and optimizer.decay == "constant":
            remedy = f"set {field}.decay to linear or cosine, or remove it"
            raise UserError(f"{field}.{key}", value, "is not used where decay is constant", remedy)
    if optimizer.decay_nimg is not None and optimizer.decay_nimg <= optimizer.warmup_nimg:
        problem = f"is not after the warm-up of {optimizer.warmup_nimg} images"
        raise UserError(f"{field}.decay_nimg", optimizer.decay_nimg, problem, f"raise it, or lower {field}.warmup_nimg")
