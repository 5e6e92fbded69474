"""A recipe: the complete description of a run, read from YAML, checked, and printed back fully resolved."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from bigsgan.config.families import BigGANDiscriminator, BigGANGenerator
from bigsgan.config.sections import (
    Average,
    Data,
    Engine,
    Engines,
    NaturalInt,
    Objective,
    Optimizers,
    PositiveInt,
    Section,
)
from bigsgan.config.yaml_file import apply_override, dump_yaml, parse_override, read_yaml
from bigsgan.errors import UserError

NETWORKS = ("generator", "discriminator")


class Recipe(Section):
    """The top of a recipe. Every number about length is in images (``nimg``)."""

    out: str
    """Run directory."""
    seed: NaturalInt = 0
    total_nimg: PositiveInt
    """Images after which the run is complete; ``batch`` images a generator update."""
    batch: PositiveInt
    """Images in a batch, over all ranks and micro-batches."""
    accumulation: PositiveInt = 1
    """Micro-batches that a batch is computed in, one after the other."""
    report_nimg: PositiveInt
    sample_nimg: PositiveInt
    checkpoint_nimg: PositiveInt
    keep_checkpoints: PositiveInt = 3
    data: Data
    generator: BigGANGenerator
    discriminator: BigGANDiscriminator
    objective: Objective = Objective()
    optimizer: Optimizers
    ema: Average
    engines: Engines = Engines()

    def engine(self, network: str) -> Engine:
        """Return the engine section of ``generator`` or ``discriminator``."""
        return getattr(self.engines, network)

    def accumulation_of(self, network: str) -> int:
        """Micro-batches of one network: its engine's own number, or the recipe's."""
        return self.engine(network).accumulation or self.accumulation

    def to_yaml(self) -> str:
        """Write the recipe with every default filled in."""
        return dump_yaml(self.model_dump())


@dataclass(frozen=True)
class RunPlan:
    """A recipe that was checked against its DeepSpeed files and the number of ranks."""

    recipe: Recipe
    world_size: int
    deepspeed_files: dict[str, DeepSpeedFile]

    def micro_batch_size(self, network: str) -> int:
        """Images of one micro-batch on one rank."""
        return self.recipe.batch // (self.recipe.accumulation_of(network) * self.world_size)


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read a recipe and lay command-line overrides over it.

    Raises:
        UserError: With the field, its value and the remedy.
    """
    tree = read_yaml(path)
    for text in overrides:
        apply_override(tree, *parse_override(text))
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, tree) from None
    _check_recipe(recipe)
    return recipe


def plan_run(recipe: Recipe, world_size: int, recipe_dir: Path | None = None) -> RunPlan:
    """Derive each network's micro-batches for ``world_size`` ranks and read its DeepSpeed file.

    Raises:
        UserError: The batch does not divide, or a DeepSpeed file does not fit.
    """
    files = {}
    for network in NETWORKS:
        accumulation = recipe.accumulation_of(network)
        parts = accumulation * world_size
        if recipe.batch % parts:
            raise UserError(
                "batch", recipe.batch,
                f"does not divide into {accumulation} micro-batches on {world_size} ranks for the {network}",
                f"set batch to a multiple of {parts}, such as batch={-(-recipe.batch // parts) * parts}",
            )
        clip = getattr(recipe.optimizer, network).clip_norm
        derived = {
            "train_batch_size": recipe.batch,
            "train_micro_batch_size_per_gpu": recipe.batch // parts,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip or 0.0,
        }
        files[network] = read_deepspeed_file(network, recipe.engine(network).ds_config, recipe_dir, derived)
    return RunPlan(recipe, world_size, files)


def _check_recipe(recipe: Recipe) -> None:
    """Check what no single section can see."""
    recipe.generator.check(recipe.data.resolution)
    recipe.discriminator.check(recipe.data.resolution)
    objective = recipe.objective
    if objective.loss == "relativistic" and recipe.accumulation_of("generator") != recipe.accumulation_of("discriminator"):
        raise UserError(
            "objective.loss", "relativistic", "pairs each fake with a real, so both networks need the same micro-batches",
            "remove accumulation from engines.generator and engines.discriminator",
        )
    if objective.reuse_fakes and recipe.accumulation_of("generator") != recipe.accumulation_of("discriminator"):
        raise UserError(
            "objective.reuse_fakes", True, "needs the same micro-batches in both networks",
            "remove accumulation from engines.generator and engines.discriminator",
        )
    for network in NETWORKS:
        optimizer = getattr(recipe.optimizer, network)
        if optimizer.warmup_nimg >= recipe.total_nimg:
            raise UserError(
                f"optimizer.{network}.warmup_nimg", optimizer.warmup_nimg, f"reaches total_nimg ({recipe.total_nimg})",
                "shorten the warm-up or raise total_nimg",
            )
    if objective.r1 and objective.r2 and (objective.r1.form, objective.r1.every) != (objective.r2.form, objective.r2.every):
        raise UserError(
            "objective.r2", objective.r2.model_dump(), "differs from objective.r1 in form or every",
            "give both the same form and every; their weights may differ",
        )


def _explain(error: ValidationError, tree: dict[str, Any]) -> UserError:
    """Turn the first of pydantic's findings into our message."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    field = ".".join(path) or "recipe"
    kind, found = first["type"], first.get("input")
    if kind == "extra_forbidden":
        section = _section_at(path[:-1])
        known = list(section.model_fields) if section else []
        close = difflib.get_close_matches(path[-1], known, n=1)
        remedy = f"did you mean {'.'.join([*path[:-1], close[0]])}?" if close else f"known keys here: {', '.join(known)}"
        return UserError(field, found, "is given for a key that does not exist", remedy)
    if kind == "missing":
        return UserError(field, None, "is missing", "add it to the recipe")
    if kind == "value_error":
        text = str(first["ctx"]["error"])
        name, _, rest = text.partition(" ")
        problem, _, remedy = rest.partition("; ")
        return UserError(name, None, problem, remedy)
    if isinstance(found, dict):
        return UserError(field, None, "is a section where a value belongs", "write the value alone")
    return UserError(field, found, _PROBLEMS.get(kind, "is not allowed"), _remedy(kind, first))


_PROBLEMS = {
    "int_type": "is not an integer",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not a string",
    "literal_error": "is none of the choices",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "finite_number": "is not finite",
    "list_type": "is not a list",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "model_type": "is not a section",
    "model_attributes_type": "is not a section",
}


def _remedy(kind: str, first: Any) -> str:
    context = first.get("ctx", {})
    if kind == "literal_error":
        return f"choose from {context['expected']}"
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "too_short": "min_length", "too_long": "max_length"}
    if kind in bounds:
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "min_length": "at least", "max_length": "at most"}
        unit = " entries" if "length" in bounds[kind] else ""
        return f"give {words[bounds[kind]]} {context[bounds[kind]]}{unit}"
    examples = {
        "int_type": "write an integer such as 64", "float_type": "write a number such as 1e-4",
        "bool_type": "write true or false", "string_type": "write text", "finite_number": "write a finite number",
        "list_type": "write a list such as [0.0, 0.999]", "model_type": "write its keys below it",
        "model_attributes_type": "write its keys below it",
    }
    return examples.get(kind, str(first["msg"]))


def _section_at(path: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = Recipe
    for key in path:
        field = section.model_fields.get(key)
        if field is None:
            return None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        below = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not below:
            return None
        section = below[0]
    return section
