"""A recipe on a number of ranks: micro-batches, placements and DeepSpeed files, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigsgan.config.batch_division import check_division
from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from bigsgan.config.engine_plan import EnginePlan
from bigsgan.config.metrics import OUTSIDE, value_names
from bigsgan.config.objective import Objective
from bigsgan.config.placement import Placement
from bigsgan.config.recipe import Recipe
from bigsgan.config.sections import NETWORKS
from bigsgan.errors import UserError


@dataclass(frozen=True)
class RunPlan:
    """A recipe that has been checked against its DeepSpeed files and the number of ranks.

    Attributes:
        on_gpus: Whether the ranks compute on GPUs, where another way through exact penalties is faster than on CPUs. A
            guess until ``on_this_machine`` (engines/build.py) asks them.
        ranks_per_host: Consecutive ranks on each host; 0 if it is not known.
    """

    recipe: Recipe
    world_size: int
    engines: Mapping[str, EnginePlan]
    on_gpus: bool = False
    ranks_per_host: int = 0

    def placement(self, network: str) -> Placement:
        """Return the ranks of the network's stages and replicas."""
        return self.engines[network].placement

    @property
    def is_split(self) -> bool:
        """Whether each rank holds one of the networks, and no rank both."""
        return self.placement("generator").ranks != self.placement("discriminator").ranks

    def held_by(self, rank: int) -> str:
        """Return the network that a rank holds if each network has its own ranks; otherwise an empty text."""
        return next(n for n in NETWORKS if rank in self.placement(n).ranks) if self.is_split else ""

    def statistics_parts(self, network: str) -> list[range]:
        """Return the ranks over which batch norm takes its statistics, if not over all replicas of a pipeline stage.

        Ranks count from the network's first, and each is in one part. There are none without ``batch_statistics: host``
        or on one host.
        """
        num, placement = self.ranks_per_host or self.world_size, self.placement(network)
        first, stages = placement.first, placement.local.replicas()
        if self.recipe.batch_statistics == "global" or not getattr(self.recipe, network).has_batch_norm:
            return []
        parts = [
            range(max(host * num - first, stage.start), min((host + 1) * num - first, stage.stop))
            for stage in stages
            for host in range((first + stage.start) // num, -(-(first + stage.stop) // num))
        ]
        return parts if parts != stages else []

    @property
    def images_travel(self) -> bool:
        """Whether G's outputs are computed on other ranks than those that read D's inputs."""
        generator, discriminator = (self.placement(network) for network in NETWORKS)
        return generator.of_stage(generator.num_stages - 1) != discriminator.of_stage(0)

    @property
    def has_messages(self) -> bool:
        """Whether ranks send each other images, activations or gradients, and so make their own kernels and waits."""
        return self.is_split or any(engine.placement.num_stages > 1 for engine in self.engines.values())

    @property
    def objective(self) -> Objective:
        """The recipe's objective, in which each penalty has a ``sigma``: its own, or that for D's coarsest type."""
        own, sigma = self.recipe.objective, SIGMAS[_coarsest(self.recipe, self.engines["discriminator"].file)]
        given = {n: p.model_copy(update={"sigma": p.sigma or sigma}) for n, p in own.gradient_norms.items()}
        return own.model_copy(update=given)

    def differentiates_forward(self, network: str) -> bool:
        """Whether a network's exact penalties are computed in forward mode (models/dual.py), or by a double backward.

        These are D's penalties on its gradient, and G's path length.
        """
        methods = self.recipe.objective.methods(network).values()
        asked, engine = set(methods) - {"auto"}, self.engines[network]
        recomputes = engine.section.activation_checkpointing  # what a double backward keeps nevertheless
        is_slow = self.on_gpus and network == "discriminator" and self.recipe.discriminator.convolves
        is_better = engine.file.stage == 3 or recomputes or is_slow
        has_tangents = getattr(self.recipe, network).has_tangents
        chosen = engine.placement.num_stages > 1 or (is_better and has_tangents)
        return bool(methods) and asked != {"double_backward"} and (chosen or bool(asked))

    @property
    def keeps_generator_graphs(self) -> bool:
        """Whether G's activations are kept from its forward passes to its backward passes, or recomputed."""
        if self.placement("generator").num_stages > 1:
            return self.recipe.pipeline.generator_phase == "keep"
        # A ZeRO engine alternates forward and backward, so it recomputes if D needs all micro-batches before the first
        # gradient. If G's update comes first, or updates overlap, it does not.
        objective, section = self.recipe.objective, self.engines["generator"].section
        weighs = bool(objective.adversarial.weighs)  # all micro-batches before the first is pulled back
        # An adaptive weight goes backward through G's last modules, once for each part of its loss. Compiled code goes
        # backward once and as a whole, a checkpointed layer is recomputed each time, and ZeRO 3 gathers for one pass.
        repeats = section.activation_checkpointing or self.engines["generator"].file.stage == 3
        if objective.adversarial.adaptive and (repeats or section.compile != "none"):
            return False
        needs_all = weighs or self.images_travel or (objective.reuse_fakes and objective.schedule == "exact")
        return not needs_all or self.recipe.accumulation_of("generator") == 1


def chooses_ranks(recipe: Recipe) -> bool:
    """Whether planner/balance.py has to find the numbers of ranks: one is ``auto``, and no other number gives it."""
    asked = [recipe.engine(network).ranks for network in NETWORKS]
    return "auto" in asked and all(value in (None, "auto") for value in asked)


def with_ranks(recipe: Recipe, numbers: Mapping[str, int | None]) -> Recipe:
    """Return the same recipe with these numbers of ranks for the networks."""
    sections = {n: recipe.engine(n).model_copy(update={"ranks": number}) for n, number in numbers.items()}
    return recipe.model_copy(update={"engines": recipe.engines.model_copy(update=sections)})


def plan_run(recipe: Recipe, world_size: int, recipe_dir: Path | None = None, on_gpus: bool = False) -> RunPlan:
    """Derive each network's micro-batches for ``world_size`` ranks and read its DeepSpeed file.

    A network's ranks may be ``auto`` only if the other network has a number; see ``chooses_ranks``.

    Raises:
        UserError: The batch does not divide, a DeepSpeed file does not fit the recipe, or the best checkpoint is to be
            kept by a metric that is not measured.
    """
    _check_keep_best(recipe)
    shares, networks = _ranks(recipe, world_size), recipe.networks
    recipe = with_ranks(recipe, {n: None for n in NETWORKS if recipe.engine(n).ranks == "auto"})
    placements = {network: _place(recipe, network, shares[network]) for network in NETWORKS}
    check_division(
        recipe,
        [  # each network computes its own micro-batches and the other's: G makes D's images, and D judges G's
            (network, recipe.accumulation_of(phase), placements[network].num_replicas)
            for network, phase in zip(2 * networks, networks + networks[::-1], strict=True)
        ],
    )
    engines: dict[str, EnginePlan] = {}
    for network, placement in placements.items():
        section, optimizer = recipe.engine(network), getattr(recipe.optimizer, network)
        size = recipe.batch // (recipe.accumulation_of(network) * placement.num_replicas)
        if network == "discriminator":
            recipe.objective.check_micro_batch(size)
        derived = {  # DeepSpeed's keys that follow from the recipe; the DeepSpeed file may only repeat them
            "train_batch_size": recipe.batch,
            "train_micro_batch_size_per_gpu": size,
            "gradient_accumulation_steps": recipe.accumulation_of(network),
            "gradient_clipping": optimizer.clip_norm or 0.0,  # DeepSpeed's default is 1.0
        }
        file = read_deepspeed_file(network, section.ds_config, recipe_dir, derived)
        _check_pipeline(recipe, network, file)
        _check_compile(recipe, network, file)
        _check_cuda_graphs(recipe, network, file)
        is_stock = recipe.engines.stock_deepspeed in (network, "both")
        engines[network] = EnginePlan(network, section, optimizer, file, placement, size, derived, is_stock)
        _check_groups(engines[network])
        _check_offload(engines[network])
    _check_slope(recipe, engines["discriminator"].file)
    _check_logger(engines)
    plan = RunPlan(recipe, world_size, engines, on_gpus)
    _check_statistics(plan)
    return plan


def _check_keep_best(recipe: Recipe) -> None:
    """Refuse to keep the best checkpoint by a metric that is not measured; without metrics the best so far stays.

    A saved recipe with this mistake can still be sampled and evaluated.
    """
    best, metrics = recipe.checkpoints.keep_best, recipe.metrics
    if best is None or metrics is None or not best.metric.startswith("metrics/"):
        return
    measured = value_names(metrics.asked, recipe.data.joins_domains)
    outside = [metric.name for metric in metrics.asked if metric.kind == OUTSIDE]  # their values may have endings
    name = best.metric.removeprefix("metrics/")
    if name not in (*measured, "seconds") and not any(name.startswith(f"{each}_") for each in outside):
        problem = f"must be a metric that metrics.names gives ({', '.join(measured)})"
        remedy = f"set metrics/{measured[0]}, or change metrics.names"
        raise UserError("checkpoints.keep_best.metric", best.metric, problem, remedy)


def _ranks(recipe: Recipe, world_size: int) -> dict[str, range]:
    """Return the ranks of each network: all ranks, or G's before D's if one network asks for its own ranks.

    Raises:
        UserError: The networks do not fit on the ranks, or do not fill them.
    """
    asked = {network: recipe.engine(network).ranks for network in NETWORKS}
    given = [network for network in NETWORKS if asked[network] is not None]
    if not given:
        return dict.fromkeys(NETWORKS, range(world_size))
    field, value = f"engines.{given[0]}.ranks", asked[given[0]]
    if world_size < len(NETWORKS):
        raise UserError(field, value, "must be null on one rank", "remove it, or start two ranks or more")
    assert not chooses_ranks(recipe), "planner/balance.py finds the numbers"
    given = [network for network in given if asked[network] != "auto"]
    numbers = {network: _number_of_ranks(recipe, network, world_size) for network in given}
    num = numbers.get("generator", world_size - numbers.get("discriminator", 0))
    if not 0 < num < world_size:
        problem = f"must be less than the number of ranks ({world_size})"
        raise UserError(field, value, problem, "leave some ranks to the other network, or start more")
    if len(given) == len(NETWORKS) and sum(numbers.values()) != world_size:
        problem = f"must be {world_size - num}, the ranks that engines.generator.ranks={asked['generator']} leaves"
        raise UserError("engines.discriminator.ranks", asked["discriminator"], problem, "set it so, or remove it")
    return {"generator": range(num), "discriminator": range(num, world_size)}


def _number_of_ranks(recipe: Recipe, network: str, world_size: int) -> int:
    """Return how many ranks a network asks for. A share gives the nearest number that its stages divide."""
    engine = recipe.engine(network)
    if isinstance(engine.ranks, int):
        return engine.ranks
    assert isinstance(engine.ranks, float)
    stages = engine.pipeline_stages
    return max(1, round(engine.ranks * world_size / stages)) * stages


def _place(recipe: Recipe, network: str, ranks: range) -> Placement:
    """Return the placement of a network's stages and replicas on its ranks.

    Raises:
        UserError: The stages do not divide the ranks.
    """
    stages, num = recipe.engine(network if network in recipe.networks else "generator").pipeline_stages, len(ranks)
    if num % stages:
        problem = f"must divide the number of ranks ({num})"
        remedy = f"start a multiple of {stages} ranks, or set a number of stages that divides {num}"
        raise UserError(f"engines.{network}.pipeline_stages", stages, problem, remedy)
    return Placement(stages, num // stages, network == "discriminator", ranks.start)


def _check_pipeline(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse settings that a network with pipeline stages does not support."""
    stages = recipe.engine(network).pipeline_stages
    if stages == 1:
        return
    field = f"engines.{network}.pipeline_stages"
    key = recipe.objective.adversarial.weighs
    if network == "generator" and key and recipe.pipeline.generator_phase == "keep":
        problem, remedy = f"must be recompute with objective.adversarial.{key}", "set it so"
        detail = "gradients of all micro-batches are weighed before the first is pulled back"
        raise UserError("pipeline.generator_phase", "keep", problem, remedy, detail)
    if file.stage > 1:
        problem = f"must be 1 with ZeRO {file.stage}"
        detail = f"in {file.path}; a pipeline does not shard gradients"
        remedy = "use ZeRO 1, such as ds_configs/zero1.json, or remove pipeline_stages"
        raise UserError(field, stages, problem, remedy, detail)
    if file.offload_optimizer != "none":
        remedy = "use a file without offload, such as ds_configs/zero1.json"
        raise UserError(field, stages, "must be 1 with offload", remedy, f"in {file.path}")
    for key, is_on in {
        "wall_clock_breakdown": file.content.get("wall_clock_breakdown"),
        "flops_profiler.enabled": file.profiles,
    }.items():
        if is_on:
            remedy = "remove it; a run of two pipelines writes pipeline_trace.json"
            raise UserError(f"{file.path}: {key}", True, "must be false with pipeline_stages", remedy)
    one_stage = f"engines.{network}.pipeline_stages=1"
    for name, method in recipe.objective.methods(network).items():
        if method == "double_backward":
            field, problem = f"objective.{name}.method", f"must be auto or forward_mode with {network} stages"
            raise UserError(field, method, problem, f"remove it, or set {one_stage}")
    if network == "discriminator" and recipe.objective.feature_matching:
        problem, remedy = "must be 0 with engines.discriminator.pipeline_stages", f"remove it, or set {one_stage}"
        detail = "no stage has the features of all layers"
        raise UserError("objective.feature_matching", recipe.objective.feature_matching, problem, remedy, detail)


def _check_groups(engine: EnginePlan) -> None:
    """Refuse two groups of parameters where DeepSpeed adds up norms over stages, group by group.

    A stage may have matrices alone, or none, and so fewer groups than another: the ranks would wait for each other.
    """
    adds_at_once = engine.reduces_by_group or (engine.file.stage == 0 and not engine.is_stock)
    if engine.placement.num_stages == 1 or adds_at_once:
        return
    field, detail = f"optimizer.{engine.network}", f"{engine.file.path}: DeepSpeed reduces their gradients"
    given = vars(engine.optimizer) | {"groups": [group.parameters for group in engine.optimizer.groups]}
    for key, other in (("weight_decay_on", "all"), ("kind", "adamw"), ("groups", [])):
        if (value := given[key]) != other and (key != "kind" or value == "muon"):
            problem, remedy = f"must be {other} with these pipeline stages", "or use ds_configs/zero1.json"
            raise UserError(f"{field}.{key}", value, problem, f"set it to {other}, {remedy}", detail)


def _check_offload(engine: EnginePlan) -> None:
    """Refuse DeepSpeed's Adam on the host for another optimizer, as DeepSpeed would later, and Muon on a drive."""
    kind, file = engine.optimizer.kind, engine.file
    if kind == "muon" and file.uses_nvme:
        field, problem = "zero_optimization.offload_optimizer.device", "must be cpu with optimizer"
        remedy, detail = f"set it to cpu, or optimizer.{engine.network}.kind=adamw", "no test covers Muon on a drive"
        raise UserError(f"{file.path}: {field}", "nvme", f"{problem}.{engine.network}.kind=muon", remedy, detail)
    asks = file.offload_optimizer != "none" and file.content.get("zero_force_ds_cpu_optimizer")
    if asks and not engine.optimizer.is_adam:
        problem = f"must be false with optimizer.{engine.network}.kind={kind}"
        remedy, detail = "remove it; torch's optimizers work on the host too", "it asks for DeepSpeed's own Adam"
        raise UserError(f"{file.path}: zero_force_ds_cpu_optimizer", True, problem, remedy, detail)


def _check_compile(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse settings that torch.compile does not support."""
    engine = recipe.engine(network)
    if engine.compile == "none":
        return
    field = f"engines.{network}.compile"
    if file.stage == 3 and engine.compile == "whole":
        problem, detail = "must be layers with ZeRO 3", f"in {file.path}; it gathers weights between layers"
        raise UserError(field, engine.compile, problem, f"set {field}=layers", detail)
    if file.profiles:
        problem, detail = (
            f"must be false with {field}={engine.compile}",
            "it counts calls of torch's functions",
        )
        raise UserError(f"{file.path}: flops_profiler.enabled", True, problem, f"set {field}=none to profile", detail)
    if engine.compile == "whole" and engine.activation_checkpointing:
        problem, detail = "must be layers with activation_checkpointing", "it recomputes one layer at a time"
        raise UserError(field, engine.compile, problem, f"set {field}=layers", detail)


def _check_cuda_graphs(recipe: Recipe, network: str, file: DeepSpeedFile) -> None:
    """Refuse CUDA graphs without compilation, and settings by which a graph's outputs may outlive its next replay."""
    engine = recipe.engine(network)
    if not engine.cuda_graphs:
        return
    field = f"engines.{network}.cuda_graphs"
    for layout, asked in {"pipeline_stages": engine.pipeline_stages > 1, "ZeRO 3": file.stage == 3}.items():
        if asked:
            detail = "messages and gathers are not replayed"
            raise UserError(field, True, f"must be false with {layout}", f"set {field}=false", detail)
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


def _check_logger(engines: Mapping[str, EnginePlan]) -> None:
    """Refuse two logs of collectives: DeepSpeed has one in a process, with the settings of the engine built last."""
    files = [engine.file for engine in engines.values() if "comms_logger" in engine.file.content]
    if len(files) > 1 and files[0].content["comms_logger"] != files[1].content["comms_logger"]:
        problem, detail = f"must be that of {files[0].path}", "both networks have one log"
        raise UserError(f"{files[1].path}: comms_logger", None, problem, "give both files the same", detail)


def _check_statistics(plan: RunPlan) -> None:
    """Refuse that statistics move in every pass where passes wait for each other, or are repeated."""
    if plan.recipe.statistics == "every_pass" and (plan.has_messages or plan.images_travel):
        problem, detail = "must be every_update with pipeline stages or ranks of their own", "passes overlap there"
        raise UserError("statistics", "every_pass", problem, "remove it, or give both networks all ranks", detail)


_LEAST_SIGMAS = {"bf16": 0.1, "fp16": 1e-2, "fp32": 1e-5}
"""Least steps: some ten times the relative distance of two numbers of the type near 1, except those of bf16."""

SIGMAS = {"bf16": 0.1, "fp16": 0.03, "fp32": 0.01}
"""Steps of finite differences, by the coarsest type in D. In half types they are long enough to hide rounding."""


def _coarsest(recipe: Recipe, file: DeepSpeedFile) -> str:
    """Return the type in D with the fewest digits."""
    own = {file.precision, recipe.discriminator.computes_in}
    return next(precision for precision in SIGMAS if precision in own)


def _check_slope(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse a finite difference below D's resolution: in bf16, at sigma 0.01, rounding made it seven times R1."""
    precision = _coarsest(recipe, file)
    least = _LEAST_SIGMAS[precision]
    for name, penalty in recipe.objective.gradient_norms.items():
        if penalty.form == "finite_difference" and penalty.sigma and penalty.sigma < least:
            field, detail = f"objective.{name}.sigma", "a smaller step is lost in rounding"
            other = "give a larger number"
            if precision == "bf16":
                other = "use an fp16 or fp32 file for the discriminator"
            if precision == "bf16" == recipe.discriminator.computes_in:
                without = f"set discriminator.{recipe.discriminator.without_half}"
                other = f"{without} and {other}" if file.precision == "bf16" else without
            remedy = f"remove it, or {other}"
            article = "a" if precision == "bf16" else "an"
            problem = f"must be at least {least:g} with {article} {precision} discriminator"
            raise UserError(field, penalty.sigma, problem, remedy, detail)
