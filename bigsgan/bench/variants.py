"""What `bigsgan bench train` compares: one recipe, with one thing changed at a time. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsgan.config import NETWORKS, Recipe, RunPlan, parse_recipe, plan_run
from bigsgan.config.yaml_file import apply_overrides
from bigsgan.errors import UserError

ACCUMULATION, CLIP_NORM, NUM_STAGES = 4, 2, 2

_PLAIN_RECIPE = ["metrics=null", "init_from=null", "hang_timeout_seconds=86400"]
"""What of a recipe is no part of an update, or depends on other runs."""


@dataclass(frozen=True)
class Variant:
    """One way to train the recipe.

    Attributes:
        name: As the user gives it.
        title: What it is.
        overrides: Of the recipe, which has ZeRO stage 0 in float32 before, no stages, one accumulation, no compiler.
        is_plain: Whether it is a loop in plain PyTorch, without engines.
        single: Whether one rank alone does all the work.
    """

    name: str
    title: str
    overrides: Callable[[Recipe], list[str]]
    is_plain: bool = False
    single: bool = False


@dataclass(frozen=True)
class Planned:
    """A variant of a recipe on the ranks that were started.

    Attributes:
        variant: Which.
        plan: None where it cannot run.
        reason: Why it cannot.
    """

    variant: Variant
    plan: RunPlan | None
    reason: str = ""


def _engines(file: str) -> list[str]:
    return [f"engines.{network}.ds_config=ds_configs/{file}.json" for network in NETWORKS]


def _accumulated(recipe: Recipe) -> list[str]:
    """As many images at a time as the recipe has, and an update every few of them."""
    return [f"batch={ACCUMULATION * recipe.batch}", f"accumulation={ACCUMULATION * recipe.accumulation}"]


def _clipped(recipe: Recipe) -> list[str]:
    return [f"optimizer.{network}.clip_norm={CLIP_NORM}" for network in NETWORKS]


def _compiled(unit: str) -> list[str]:
    return [f"engines.{network}.compile={unit}" for network in NETWORKS]


def _staged(recipe: Recipe) -> list[str]:
    return [f"engines.{network}.pipeline_stages={NUM_STAGES}" for network in NETWORKS]


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("baseline", "plain PyTorch, one process", lambda recipe: [], is_plain=True, single=True),
        Variant("data_parallel", "plain PyTorch, DistributedDataParallel", lambda recipe: [], is_plain=True),
        Variant("zero0", "two engines, ZeRO 0", lambda recipe: []),
        Variant("mixed_precision", "ZeRO 0 in bf16", lambda recipe: _engines("zero0_bf16")),
        Variant("accumulation", f"ZeRO 0, {ACCUMULATION} times the micro-batches and the batch", _accumulated),
        Variant("clipping", f"ZeRO 0, gradients clipped at norm {CLIP_NORM}", _clipped),
        Variant(
            "reused_fakes",
            "ZeRO 0, D's last step and G's update on the same images",
            lambda recipe: ["objective.reuse_fakes=true"],
        ),
        Variant("compiled", "ZeRO 0, networks through torch.compile", lambda recipe: _compiled("whole")),
        Variant(
            "compiled_layers", "ZeRO 0, layers through torch.compile, one by one", lambda recipe: _compiled("layers")
        ),
        Variant("zero1", "ZeRO 1", lambda recipe: _engines("zero1")),
        Variant("zero2", "ZeRO 2", lambda recipe: _engines("zero2")),
        Variant("zero3", "ZeRO 3", lambda recipe: _engines("zero3")),
        Variant("offload", "ZeRO 2 in bf16, optimizer on the host", lambda recipe: _engines("zero2_offload")),
        Variant("pipeline", f"both networks in {NUM_STAGES} stages", _staged),
    )
}
"""By name, in the order in which they are shown."""


def chosen_variants(text: str) -> list[Variant]:
    """Read ``baseline,zero1,zero2``.

    Raises:
        UserError: A name is unknown, or stands there twice.
    """
    names = [name.strip() for name in text.split(",")]
    for i, name in enumerate(names):
        if name not in VARIANTS:
            raise UserError("--variants", name, "is no variant", f"choose from {', '.join(VARIANTS)}")
        if name in names[:i]:
            raise UserError("--variants", name, "stands there twice", "name each variant once")
    return [VARIANTS[name] for name in names]


def plan_variants(
    recipe: Recipe, variants: Sequence[Variant], world_size: int, recipe_dir: Path | None = None
) -> list[Planned]:
    """Check each variant against the ranks that were started; what cannot run keeps the reason.

    Raises:
        UserError: None of them can run.
    """
    planned = [_plan(recipe, variant, world_size, recipe_dir) for variant in variants]
    if all(each.plan is None for each in planned):
        names, reason = ",".join(v.name for v in variants), planned[0].reason
        raise UserError("--variants", names, f"cannot run here: {reason}", "choose others")
    return planned


def _plan(recipe: Recipe, variant: Variant, world_size: int, recipe_dir: Path | None) -> Planned:
    tree = recipe.model_dump()
    plain = ("pipeline_stages=1", "accumulation=null", "compile=none")
    base = [f"engines.{network}.{key}" for network in NETWORKS for key in plain]
    try:
        for overrides in (_PLAIN_RECIPE, base, _engines("zero0"), variant.overrides(recipe)):
            apply_overrides(tree, overrides)
        return Planned(variant, plan_run(parse_recipe(tree), 1 if variant.single else world_size, recipe_dir))
    except UserError as error:
        return Planned(variant, None, str(error))
