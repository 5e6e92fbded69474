"""The variants of `bigsgan bench train`: one recipe with one change, or several. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsgan.config import NETWORKS, Recipe, RunPlan, plan_run
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.config.yaml_file import apply_overrides, parse_override
from bigsgan.errors import UserError

ACCUMULATION, CLIP_NORM, NUM_STAGES = 4, 2, 2
_BASE = "ZeRO 0"

_PLAIN_RECIPE = ["metrics=null", "hang_timeout_seconds=86400"]
"""Overrides that remove parts of a recipe that are not in an update."""


@dataclass(frozen=True)
class Variant:
    """One way to train the recipe."""

    name: str  # what the user gives; the names of a combination are joined by `+`
    title: str  # description in tables
    # Overrides of the recipe after its reset to ZeRO 0 in float32 without stages, accumulation, compiler.
    overrides: Callable[[Recipe], list[str]]
    change: str = ""  # change that works with any ZeRO stage and precision; empty if the variant chooses these
    is_plain: bool = False  # whether it is a loop in plain PyTorch, without engines
    single: bool = False  # whether one rank does all the work
    tf32: bool | None = None  # whether it computes float32 in TF32; None for torch's defaults


@dataclass(frozen=True)
class Planned:
    """A variant of a recipe on the ranks that were started."""

    variant: Variant
    plan: RunPlan | None  # None if it cannot run
    reason: str = ""  # why it cannot run


def _of_both(section: str, **values: object) -> list[str]:
    """Overrides of a section of both networks."""
    return [f"{section}.{network}.{key}={value}" for network in NETWORKS for key, value in values.items()]


def _engines(file: str) -> list[str]:
    return _of_both("engines", ds_config=f"ds_configs/{file}.json")


def _accumulated(recipe: Recipe) -> list[str]:
    """Overrides for a larger batch and accumulation, with the recipe's micro-batch."""
    return [f"batch={ACCUMULATION * recipe.batch}", f"accumulation={ACCUMULATION * recipe.accumulation}"]


def _methods(recipe: Recipe, method: str) -> list[str]:
    """Overrides with the method of all exact penalties."""
    names = [name for network in NETWORKS for name in recipe.objective.methods(network)]
    return [f"objective.{name}.method={method}" for name in names if "." not in name]  # terms from outside follow


def _penalized(method: str) -> Callable[[Recipe], list[str]]:
    def overrides(recipe: Recipe) -> list[str]:
        found = _methods(recipe, method)
        if not found:
            remedy = "add objective.r1, or leave the variant out"
            raise UserError("objective", None, "has no exact R1, R2 or gradient penalty", remedy)
        return found

    return overrides


def _on_a_quarter(recipe: Recipe) -> list[str]:
    """Overrides with penalties on a quarter of D's batch."""
    if not recipe.objective.penalties:
        remedy = "add objective.r1, or leave the variant out"
        raise UserError("objective", None, "has no R1, R2 or gradient penalty", remedy)
    return [f"objective.{name}.batch_shrink=4" for name in recipe.objective.penalties]


def _on_own_ranks(recipe: Recipe) -> list[str]:
    """Overrides with the recipe's own numbers of ranks, else with half of all ranks for each network."""
    own = {network: recipe.engine(network).ranks for network in NETWORKS}
    given = {network: ranks for network, ranks in own.items() if ranks not in (None, "auto")} or {"generator": 0.5}
    return [f"engines.{network}.ranks={ranks}" for network, ranks in given.items()]


def _plain(name: str, title: str, single: bool = True, tf32: bool | None = None) -> Variant:
    def overrides(recipe: Recipe) -> list[str]:
        return _methods(recipe, "double_backward")  # for counting operations: the loop knows no other

    return Variant(name, f"plain PyTorch, {title}", overrides, is_plain=True, single=single, tf32=tf32)


def _layout(name: str, title: str, file: str) -> Variant:
    return Variant(name, title, lambda recipe: _engines(file))


def _changed(name: str, change: str, overrides: list[str] | Callable[[Recipe], list[str]]) -> Variant:
    made = overrides if callable(overrides) else lambda recipe: overrides
    return Variant(name, f"{_BASE}, {change}", made, change)


VARIANTS = {
    variant.name: variant
    for variant in (
        _plain("baseline", "one process"),
        _plain("baseline_fp32", "one process, without TF32", tf32=False),
        _plain("baseline_tf32", "one process, all float32 in TF32", tf32=True),
        _plain("data_parallel", "DistributedDataParallel", single=False),
        _layout("zero0", f"two engines, {_BASE}", "zero0"),
        _layout("mixed_precision", "ZeRO 0 in bf16", "zero0_bf16"),
        _changed("accumulation", f"{ACCUMULATION} times the micro-batches and the batch", _accumulated),
        _changed("clipping", f"gradients clipped at norm {CLIP_NORM}", _of_both("optimizer", clip_norm=CLIP_NORM)),
        _changed("reused_fakes", "D's last step and G's update on the same images", ["objective.reuse_fakes=true"]),
        _changed("compiled", "networks through torch.compile", _of_both("engines", compile="whole")),
        _changed("compiled_layers", "layers through torch.compile, one by one", _of_both("engines", compile="layers")),
        _changed(
            "cuda_graphs",
            "compiled networks replayed as CUDA graphs",
            _of_both("engines", compile="whole", cuda_graphs="true"),
        ),
        _changed("double_backward", "exact penalties by a double backward", _penalized("double_backward")),
        _changed("forward_mode", "exact penalties in forward mode", _penalized("forward_mode")),
        _changed("penalized_quarter", "penalties on a quarter of the batch", _on_a_quarter),
        _changed("deterministic", "kernels of which each run has the same sums", ["deterministic=true"]),
        _layout("zero1", "ZeRO 1", "zero1"),
        _layout("zero2", "ZeRO 2", "zero2"),
        _layout("zero3", "ZeRO 3", "zero3"),
        _layout("offload", "ZeRO 2 in bf16, optimizer on the host", "zero2_offload"),
        _changed("separate_ranks", "each network on ranks of its own", _on_own_ranks),
        _changed("pipeline", f"both networks in {NUM_STAGES} stages", _of_both("engines", pipeline_stages=NUM_STAGES)),
    )
}
"""Variants by name, in the order in which they are shown."""


def chosen_variants(text: str, recipe: Recipe) -> list[Variant]:
    """Read names such as ``baseline,zero1,mixed_precision+compiled``, where ``+`` combines the changes of several.

    Raises:
        UserError: A name is unknown or given twice, or joined names cannot be combined.
    """
    found: dict[frozenset[str], Variant] = {}
    for word in text.split(","):
        names = [name.strip() for name in word.split("+")]
        for name in names:
            if name not in VARIANTS:
                raise UserError("--variants", name, f"must be one of {', '.join(VARIANTS)}", "choose one of these")
        if frozenset(names) in found:
            raise UserError("--variants", word.strip(), "must be named once", "remove the second")
        parts = [VARIANTS[name] for name in names]
        found[frozenset(names)] = parts[0] if len(parts) == 1 else _combined(parts, recipe)
    return list(found.values())


def _combined(parts: Sequence[Variant], recipe: Recipe) -> Variant:
    """One variant with the changes of several."""
    name = "+".join(part.name for part in parts)
    values: dict[str, tuple[str, Any]] = {}
    for i, part in enumerate(parts):
        if part.is_plain:
            problem = f"joins {part.name}, which has no engines, to others"
            raise UserError("--variants", name, problem, "join only variants of engines")
        if part in parts[:i]:
            raise UserError("--variants", name, f"must name {part.name} once", "name each part once")
        for keys, value in map(parse_override, part.overrides(recipe)):
            dotted = ".".join(keys)
            earlier, set_before = values.setdefault(dotted, (part.name, value))
            if set_before != value:
                problem = f"sets {dotted} to {set_before} for {earlier} and to {value} for {part.name}"
                raise UserError("--variants", name, problem, f"remove {earlier} or {part.name}")
    layouts = [part.title for part in parts if not part.change]
    title = ", ".join([*(layouts or [_BASE]), *(part.change for part in parts if part.change)])
    return Variant(
        name,
        title,
        lambda recipe: list(dict.fromkeys(o for part in parts for o in part.overrides(recipe))),
    )


def plan_variants(
    recipe: Recipe, variants: Sequence[Variant], world_size: int, recipe_dir: Path | None = None
) -> list[Planned]:
    """Plan each variant for the ranks that were started; one that cannot run has a reason instead of a plan.

    Raises:
        UserError: No variant can run.
    """
    planned = [_plan(recipe, variant, world_size, recipe_dir) for variant in variants]
    if all(each.plan is None for each in planned):
        names, reason = ",".join(v.name for v in variants), planned[0].reason
        raise UserError("--variants", names, f"cannot run here: {reason}", "choose others")
    return planned


def _plan(recipe: Recipe, variant: Variant, world_size: int, recipe_dir: Path | None) -> Planned:
    tree = recipe.model_dump()
    base = _of_both(
        "engines", pipeline_stages=1, accumulation="null", compile="none", cuda_graphs="false", ranks="null"
    )
    try:
        if not (recipe.generator.freezes or recipe.discriminator.freezes):
            tree["init_from"] = None  # no variant reads its weights
        for overrides in (_PLAIN_RECIPE, base, _engines("zero0"), variant.overrides(recipe)):
            apply_overrides(tree, overrides)
        return Planned(variant, plan_run(parse_saved_recipe(tree), 1 if variant.single else world_size, recipe_dir))
    except UserError as error:
        return Planned(variant, None, str(error))
