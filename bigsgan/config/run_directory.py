"""The recipe that a run directory keeps, and what a resumed run may change about it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bigsgan.atomic import write_text
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.recipe import Recipe, load_recipe
from bigsgan.config.yaml_file import dump_yaml
from bigsgan.errors import UserError

RECIPE_FILE = "config.yaml"

# What does not change the meaning of the images already trained on.
FREE_KEYS = {
    "out", "total_nimg", "report_nimg", "sample_nimg", "checkpoint_nimg", "sample_statistics",
    "checkpoints.keep", "checkpoints.keep_every_nimg", "checkpoints.keep_best", "checkpoints.keep_best.metric",
    "checkpoints.keep_best.goal", "checkpoints.background", "hang_timeout_seconds", "max_rollbacks", "deterministic",
    "metrics", "metrics.names", "metrics.every_nimg", "metrics.features", "metrics.features.network",
    "metrics.features.weights", "metrics.features.resizer",
    "init_from.run", "init_from.nimg", "init_from.weights",
    "data.root", "data.input_root", "data.num_workers", "data.prefetch", "data.max_corrupt",
    "engines.generator.ds_config", "engines.discriminator.ds_config",
    "engines.generator.activation_checkpointing", "engines.discriminator.activation_checkpointing",
    "engines.generator.compile", "engines.discriminator.compile",
    "engines.generator.cuda_graphs", "engines.discriminator.cuda_graphs",
    "engines.generator.partition", "engines.discriminator.partition",  # the checkpoint's division stays
    "engines.generator.pipeline_stages", "engines.discriminator.pipeline_stages",
    "pipeline.generator_phase", "pipeline.schedule",
}  # fmt: skip

# What a run writes in its directory.
_OWN_NAMES = {
    RECIPE_FILE, "ds_generator.json", "ds_discriminator.json", ".lock", "metrics.jsonl", "evaluations.jsonl",
    "pipeline_trace.json", "checkpoints", "logs", "samples", "tensorboard",
}  # fmt: skip

# What the weights themselves depend on: no resumed run can change it.
_FIXED = (
    "generator.", "discriminator.", "data.image_channels", "data.input_channels", "data.resolution", "data.num_classes",
    "optimizer.generator.kind", "optimizer.discriminator.kind",
)  # fmt: skip


def write_recipe(recipe: Recipe, out: Path, files: Mapping[str, DeepSpeedFile]) -> None:
    """Keep the resolved recipe in the run directory, with copies of its DeepSpeed files, so that it stands alone.

    Args:
        recipe: What the run was given.
        out: The run directory.
        files: The DeepSpeed file of each network; the kept recipe names the copies.

    Raises:
        UserError: The directory cannot be written.
    """
    tree = recipe.model_dump()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for network, file in files.items():
            tree["engines"][network]["ds_config"] = f"ds_{network}.json"
            write_text(out / f"ds_{network}.json", json.dumps(file.content, indent=2) + "\n")
        write_text(out / RECIPE_FILE, dump_yaml(tree))
    except OSError as error:
        raise UserError("out", str(out), f"cannot be written ({error})", "give a directory of your own") from None


def read_saved_recipe(run: Path, field: str = "--run") -> Recipe:
    """Return the recipe of a run directory.

    Args:
        run: The directory.
        field: Where the user named it, for messages.

    Raises:
        UserError: It is not a run directory, or its recipe is damaged.
    """
    path = run / RECIPE_FILE
    if not os.path.isfile(path):
        raise UserError(field, str(run), f"is no run directory: it holds no {RECIPE_FILE}", "give the `out` of a run")
    try:
        return load_recipe(path, [])
    except UserError as error:
        remedy = "mend or remove that file, or choose another directory"
        raise UserError(str(path), None, f"is not the recipe of a run ({error})", remedy) from None


def refuse_output(out: Path, option: str = "--out") -> None:
    """Refuse the option of a command whose file could not be written in the end, before there is work to lose.

    Raises:
        UserError: It is a directory, a device or a pipe, lies in no directory, or belongs to a run.
    """
    if os.path.isdir(out):
        raise UserError(option, str(out), "is a directory", "give the path of a file in it")
    if not os.path.isdir(out.absolute().parent):
        raise UserError(option, str(out), "lies in a directory that does not exist", "make that directory first")
    if os.path.exists(out) and not os.path.isfile(out):
        raise UserError(option, str(out), "is not a file", "give the path of a new file, or of one to replace")
    refuse_parts_of_runs(out, option)


def refuse_directory(out: Path, option: str) -> None:
    """Refuse a directory that could not be made, or not be written to without harm.

    Raises:
        UserError: It is something else, lies in no directory, or belongs to a run.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        raise UserError(option, str(out), "is no directory", "give the path of one, or of one to make")
    for parent in out.parents:
        if os.path.lexists(parent) and not os.path.isdir(parent):
            problem = f"lies in {parent}, which is no directory"
            raise UserError(option, str(out), problem, "give the path of a directory to make")
    refuse_parts_of_runs(out, option)


def refuse_foreign_metrics(out: Path) -> None:
    """Refuse a directory of another program: a run drops the lines of metrics.jsonl that are none of its own.

    Raises:
        UserError: It holds metrics, and is no run directory.
    """
    metrics = out / "metrics.jsonl"
    if os.path.isfile(metrics) and os.path.getsize(metrics) and not os.path.lexists(out / RECIPE_FILE):
        problem = f"holds a {metrics.name} and is no run directory"
        raise UserError("out", str(out), problem, "move that file away, or give another `out`")


def refuse_parts_of_runs(out: Path, option: str) -> None:
    """Refuse what a run keeps for itself; other files may lie in its directory.

    Raises:
        UserError: The path is a run's own.
    """
    for path in (Path(os.path.realpath(out.parent), out.name), Path(os.path.realpath(out))):
        for run in path.parents:
            if path.relative_to(run).parts[0] in _OWN_NAMES and _is_run(run):
                shown = os.path.relpath(run) if run.is_relative_to(Path.cwd()) else run
                raise UserError(option, str(out), f"belongs to the run {shown}", "give a path outside of it")


def _is_run(directory: Path) -> bool:
    """Whether a run has begun there; config.yaml alone is what other programs have too."""
    begun = os.path.isdir(directory / "checkpoints") or os.path.lexists(directory / ".lock")
    return begun and os.path.isfile(directory / RECIPE_FILE)


def compare_recipes(
    saved: Mapping[str, Any], given: Mapping[str, Any], out: str, allowed: Collection[str]
) -> list[str]:
    """Refuse to resume under a recipe that means something else.

    Args:
        saved: Recipe of the checkpoint, by dotted key; see ``flat``.
        given: Recipe to go on with.
        out: The run directory.
        allowed: Keys that may change the meaning, as the user has said.

    Returns:
        One line for each difference.

    Raises:
        UserError: With the first key that differs and may not, or the first of ``allowed`` that is no key.
    """
    for key in allowed:
        if key not in saved.keys() | given.keys():
            raise UserError("--allow-change", key, "is no key of the recipe", "write a dotted key such as batch")
    found = []
    for key in sorted(saved.keys() | given.keys()):
        old, new = saved.get(key), given.get(key)
        if old == new:
            continue
        fixed = key.startswith(_FIXED)
        if fixed or not (key in FREE_KEYS or key in allowed):
            problem = f"was {'unset' if old is None else repr(old)} in the run that {out} holds"
            remedy = "set it back to go on, or give another `out` to start anew"
            remedy += " (with init_from to keep the weights)" if fixed else f"; or accept it by --allow-change {key}"
            raise UserError(key, new, problem if new is not None else f"is unset and {problem}", remedy)
        found.append(f"{key}: {old!r} -> {new!r}")
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found
