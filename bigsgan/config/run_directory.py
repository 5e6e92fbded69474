"""The recipe in a run directory, and which of its keys a resumed run may change."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bigsgan.config.data import WALKED, Data
from bigsgan.config.engine_plan import EnginePlan
from bigsgan.config.recipe import Recipe, load_recipe
from bigsgan.config.run_plan import RunPlan
from bigsgan.config.saved_recipe import RECIPE_FILE, copy_name, is_lost, recipe_of_checkpoints
from bigsgan.config.sections import NETWORKS
from bigsgan.config.yaml_file import dump_yaml
from bigsgan.errors import UserError, reason, shown
from bigsgan.runtime import launched
from bigsgan.runtime.atomic import write_text
from bigsgan.runtime.paths import read_text

RECORDS_FILE = "evaluations.jsonl"
TRACE_FILE = "trace.json"
"""The timeline of `bigsgan bench profile`."""

CSV_HEADER = b"nimg,name,value\n"
"""The first line of a run's metrics.csv."""

# Keys with files of networks that are never trained; a resumed run needs the same contents.
FROZEN = (
    "objective.teacher.path", "objective.perceptual.path", "objective.perceptual.heads", "generator.path",
    "discriminator.path",
)  # fmt: skip

STEPS = {"generator.steps", "generator.time_shift", "generator.noised"}
"""Keys that are free without a discriminator; beside one they change what the generator learns."""
_NOISED, _SAMPLER = "generator.noised", "generator.sampler"

# Keys that may change when a run resumes: they do not affect what it has learnt so far.
FREE_KEYS = {
    "out", "total_nimg", "report_nimg", "monitor", "sample_nimg", "callbacks", "checkpoint_nimg", "sample_statistics",
    "checkpoints.keep", "checkpoints.keep_every_nimg", "checkpoints.keep_best", "checkpoints.keep_best.metric",
    "checkpoints.keep_best.goal", "checkpoints.background", "hang_timeout_seconds", "max_rollbacks", "deterministic",
    "ema.power.snapshot_nimg", "ema.power.snapshot_precision",
    "metrics", "metrics.names", "metrics.every_nimg", "metrics.reference", "metrics.features",
    "metrics.num", "metrics.features.network", "metrics.features.weights", "metrics.features.resizer",
    "metrics.lpips", "metrics.lpips.path", "metrics.lpips.heads",
    "init_from.run", "init_from.nimg", "init_from.weights", "init_from.generator", "init_from.discriminator",
    "init_from.backbone", "generator.guidance", "generator.sampler", *STEPS,
    "data.root", "data.input_root", "data.codec.path", "data.num_workers", "data.prefetch", "data.max_corrupt",
    "data.max_ignored", "data.truncated", "data.class_names", "data.labels_file", *FROZEN,
    "engines.stock_deepspeed", *(f"engines.{network}.{key}" for network in NETWORKS for key in (
        "ds_config", "activation_checkpointing", "compile", "cuda_graphs", "pipeline_stages", "ranks",
        "frozen.sharded", "frozen.offload", "frozen.persistence_threshold",
        "partition",  # the checkpoint's partition stays
    )),
    "pipeline.generator_phase", "pipeline.schedule",
}  # fmt: skip

# Keys that may differ between the hosts of a run; DeepSpeed files are compared by their contents.
KEYS_OF_A_HOST = {
    "data.root", "data.input_root", "data.labels_file", "data.codec.path", "data.num_workers", "data.prefetch",
    *FROZEN,
}  # fmt: skip

SOME_LABELS = "labels.npy"
"""The labels of some images of a run's data, where labels are vectors."""

EVENT_FILES = "events.out.tfevents."
"""How the names of TensorBoard's files in a run directory begin."""

_OWN_NAMES = {
    RECIPE_FILE, SOME_LABELS, "ds_generator.json", "ds_discriminator.json", ".lock", "metrics.jsonl", "metrics.csv",
    RECORDS_FILE, "pipeline_trace.json", "restarts", "checkpoints", "logs", "samples", "tensorboard", "wandb",
    "ema_snapshots", "flops_generator.txt", "flops_discriminator.txt",
}  # fmt: skip

# Beginnings of keys that determine which weights and optimizer states there are, and their shapes. No resumed run can
# change them.
_FIXED = (
    "objective.schedule",
    "generator.", "discriminator.", "data.image_channels", "data.input_channels", "data.resolution", "data.num_classes",
    "data.condition_size",
    "data.codec.kind", "data.codec.block", "data.codec.factor", "data.codec.channels",
    "optimizer.generator.kind", "optimizer.discriminator.kind", "objective.teacher.width", "objective.teacher.hidden",
)  # fmt: skip


def is_own_name(name: str) -> bool:
    """Return whether a run writes a file or directory of this name in its directory."""
    return name in _OWN_NAMES or name.startswith(EVENT_FILES)


def check_hosts(plan: RunPlan) -> None:
    """Refuse a plan that depends on the number of ranks on a host, which the launcher does not tell.

    Raises:
        UserError: It does.
    """
    is_told = any(map(os.environ.get, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")))
    if plan.recipe.batch_statistics == "host" and plan.world_size > 1 and not is_told:
        problem, remedy = "must be set with batch_statistics=host", "set it to the number of ranks on each host"
        raise UserError("LOCAL_WORLD_SIZE", None, problem, remedy, "an environment variable")


def same_on_hosts(plan: RunPlan) -> dict[str, Any]:
    """Return, by key, the recipe's values and contents of DeepSpeed files that must be equal on all hosts of a run."""
    recipe = flat(plan.recipe.model_dump(mode="json"))
    found = {key: value for key, value in recipe.items() if key not in KEYS_OF_A_HOST}
    if plan.recipe.batch_statistics == "host":
        found["LOCAL_WORLD_SIZE"] = launched.local_size(os.environ)
    return found | {f"engines.{network}.ds_config": each.file.content for network, each in plan.engines.items()}


def write_recipe(recipe: Recipe, out: Path, engines: Mapping[str, EnginePlan]) -> None:
    """Write the resolved recipe into the run directory, and copies of its DeepSpeed files, which it then names.

    Raises:
        UserError: The directory cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for network, engine in engines.items():
            write_text(out / copy_name(network), json.dumps(engine.file.content, indent=2) + "\n")
        write_text(out / RECIPE_FILE, _written(recipe, engines))
    except OSError as error:
        problem = f"cannot be written: {reason(error, out)}"
        raise UserError("out", str(out), problem, "give a directory that you can write to") from None


def holds_another_recipe(out: Path, recipe: Recipe, engines: Mapping[str, EnginePlan]) -> bool:
    """Return whether a directory has a config.yaml that ``write_recipe`` would not write."""
    try:
        return read_text(out / RECIPE_FILE) != _written(recipe, engines)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _written(recipe: Recipe, engines: Mapping[str, EnginePlan]) -> str:
    tree = recipe.model_dump()
    for network in engines:
        tree["engines"][network]["ds_config"] = copy_name(network)
    return dump_yaml(tree)


def check_run_directory(run: Path, field: str = "--run") -> None:
    """Refuse what is not a run directory; ``field`` is the option or key that named it."""
    if not _has_recipe(run):
        detail = f"it has no {RECIPE_FILE}"
        raise UserError(field, str(run), "must be a run directory", "give the `out` of a run", detail)


def read_saved_recipe(run: Path, field: str = "--run") -> Recipe:
    """Return the recipe of a run directory; ``field`` is the option or key that named the directory.

    Raises:
        UserError: It is not a run directory, or its recipe is invalid.
    """
    check_run_directory(run, field)
    path = run / RECIPE_FILE
    try:
        return load_recipe(path, [], trusted=field == "--run")  # else the user's own recipe counts
    except UserError as error:
        remedy = "fix or remove that file, or choose another directory"
        raise UserError(str(path), None, "must be a valid recipe", remedy, str(error)) from None


def refuse_output(out: Path, option: str = "--out", kind: str | None = None) -> None:
    """Refuse an output file that cannot be written, before any work is done; ``kind`` is what its format is called.

    Raises:
        UserError: The path is a directory, a device or a pipe, its directory does not exist, a run owns it, or it is a
            file of another kind.
    """
    if os.path.isdir(out):
        raise UserError(option, str(out), "must be a file", "give the path of a file in it", "it is a directory")
    if not os.path.isdir(out.absolute().parent):
        detail = "that directory does not exist"
        raise UserError(option, str(out), "must lie in a directory", "make the directory first", detail)
    if os.path.exists(out) and not os.path.isfile(out):
        raise UserError(option, str(out), "must be a regular file", "give the path of a file to write or replace")
    refuse_parts_of_runs(out, option)
    if kind is not None and os.path.isfile(out) and not _is_of_kind(out, kind):
        problem = f"must be a new file, or one that is a {kind} file already"
        raise UserError(option, str(out), problem, "give another path, or move that file away")


_BEGINNINGS = {
    ".png": rb"\x89PNG", ".npy": rb"\x93NUMPY", ".gif": rb"GIF8", ".npz": rb"PK", ".pt2": rb"PK", ".onnx": rb"\x08",
    ".pth": rb"PK", ".safetensors": rb"(?s:.{8})\{", TRACE_FILE: rb'\s*\{\s*"schemaVersion"',
}  # fmt: skip
"""How files begin that commands write."""


def _is_of_kind(path: Path, kind: str) -> bool:
    """Return whether a file begins as one of this format, or is empty."""
    try:
        with path.open("rb") as file:
            content = file.read(64)
    except OSError:  # it may still be replaced
        return True
    return not content or re.match(_BEGINNINGS[kind], content) is not None


def refuse_existing(out: Path, option: str) -> None:
    """Refuse an output directory that cannot be made, or that is there.

    Raises:
        UserError: It is so.
    """
    refuse_directory(out, option)
    if os.path.lexists(out):
        raise UserError(option, str(out), "exists already", "give a new directory")


def refuse_directory(out: Path, option: str) -> None:
    """Refuse an output directory that cannot be made, or that a run owns.

    Raises:
        UserError: The path or one of its parents is not a directory, or a run owns it.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        raise UserError(option, str(out), "must be a directory", "give a directory that exists or can be made")
    for parent in out.parents:
        if os.path.lexists(parent) and not os.path.isdir(parent):
            detail = f"{parent} is not a directory"
            raise UserError(option, str(out), "must be a directory", "give a directory that can be made", detail)
    refuse_parts_of_runs(out, option)


def refuse_foreign_metrics(out: Path, monitor: Collection[str] = ()) -> None:
    """Refuse a directory with another program's metrics.jsonl or metrics.csv, from which a run would remove lines.

    Raises:
        UserError: The directory has metrics and is not a run directory, or its metrics.csv is not a run's.
    """
    remedy = "move that file away, or give another `out`"
    for metrics in (out / "metrics.jsonl", *([out / "metrics.csv"] if "csv" in monitor else [])):
        if not os.path.isfile(metrics) or not os.path.getsize(metrics):
            continue
        if is_lost(out / RECIPE_FILE) and not _has_recipe(out):
            detail = f"it has a {metrics.name} and no {RECIPE_FILE}"
            raise UserError("out", str(out), "must be a run directory or a new one", remedy, detail)
        if metrics.suffix == ".csv" and not is_own_table(metrics):
            raise UserError("out", str(out), f"has a {metrics.name} that no run wrote", remedy)


def refuse_among_images(out: Path, data: Data) -> None:
    """Refuse a directory below that of the images, whose next listing would have the run's sample grids.

    Raises:
        UserError: It lies there.
    """
    place = Path(os.path.realpath(out))
    for key in ("root", "input_root") if data.kind in WALKED else ():
        if not (root := getattr(data, key)) or not place.is_relative_to(images := os.path.realpath(root)):
            continue
        if not any(part[0] == "." for part in place.relative_to(images).parts):
            problem, remedy = f"must lie outside data.{key} ({root})", "give another `out`, or move the run there"
            raise UserError("out", str(out), problem, remedy, "the run's sample grids would count as images")


def is_own_table(table: Path) -> bool:
    """Return whether a metrics.csv has a run's first line, or the part that a kill left; True if it cannot be read."""
    try:
        with table.open("rb") as file:
            begins = file.read(len(CSV_HEADER))
    except OSError:
        return True
    return CSV_HEADER.startswith(begins)


def refuse_parts_of_runs(out: Path, option: str) -> None:
    """Refuse to write a run's own files; other files may lie in its directory.

    Raises:
        UserError: The path is one of a run's own files.
    """
    for path in (Path(os.path.realpath(out.parent), out.name), Path(os.path.realpath(out))):
        for run in path.parents:
            if is_own_name(path.relative_to(run).parts[0]) and _is_run(run):
                name = os.path.relpath(run) if run.is_relative_to(Path.cwd()) else run
                raise UserError(option, str(out), f"belongs to the run {name}", "give a path outside the run")


def _is_run(directory: Path) -> bool:
    """Return whether a run has started there; a config.yaml is not enough, as other programs write one too."""
    begun = os.path.isdir(directory / "checkpoints") or os.path.lexists(directory / ".lock")
    return begun and _has_recipe(directory)


def _has_recipe(directory: Path) -> bool:
    """Return whether a directory has a run's recipe, in its file or without one in a checkpoint."""
    path = directory / RECIPE_FILE
    return os.path.isfile(path) or (is_lost(path) and recipe_of_checkpoints(directory) is not None)


def refuse_unknown(allowed: Collection[str], recipe: Recipe) -> None:
    """Refuse keys of ``--allow-change`` that a recipe has not, for a run that has saved none.

    Raises:
        UserError: A key is unknown.
    """
    _refuse_others(allowed, {*flat(recipe.model_dump()), *(f"engines.{network}.precision" for network in NETWORKS)})


def _refuse_others(allowed: Collection[str], known: Collection[str]) -> None:
    for key in allowed:
        if not any(_is_within(each, key) for each in known):
            close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.75)
            remedy = f"write a dotted key such as {close[0] if close else 'batch'}"
            raise UserError("--allow-change", key, "must be a key of the recipe", remedy)


def _is_within(key: str, section: str) -> bool:
    """Whether a key is the section, or one of its keys."""
    return key == section or key.startswith(f"{section}.")


def compare_recipes(
    saved: Mapping[str, Any], given: Mapping[str, Any], out: str, allowed: Collection[str]
) -> list[str]:
    """Refuse to resume with a recipe whose differences change what the run learns.

    Args:
        saved: Recipe of the checkpoint, by dotted key; see ``flat``.
        given: Recipe to resume with.
        out: The run directory.
        allowed: Further keys that may change, from ``--allow-change``.

    Returns:
        One line for each difference.

    Raises:
        UserError: A key differs that must not change, or a key in ``allowed`` is unknown.
    """
    _refuse_others(allowed, saved.keys() | given.keys())
    found = []
    # of another family all keys differ, and the family says why
    for key in sorted(saved.keys() | given.keys(), key=lambda key: (not key.endswith(".family"), key)):
        old, new = saved.get(key), given.get(key)
        if old == new:
            continue
        is_free = key in FREE_KEYS or key.startswith("metrics.arguments.")
        simulates = "samples" in (saved.get(_NOISED), given.get(_NOISED))
        of_steps = key in STEPS or (key == _SAMPLER and simulates)
        is_free &= not of_steps or given.get("discriminator.family") == "none"
        fixed = _adds_state(key, saved, given)
        fixed |= key.startswith(_FIXED) and key not in FREE_KEYS
        fixed &= key != "objective.schedule" or "overlapped" in (old, new)
        if fixed or not (is_free or any(_is_within(key, each) for each in allowed)):
            problem = f"must be {'unset' if old is None else shown(old)}, as in the run {out!r}"
            problem += ", got null" if new is None else ""
            # a section that only one of both has is null in the other
            sections = [".".join(key.split(".")[:n]) for n in range(1, key.count(".") + 1)]
            if section := next((each for each in sections if each in saved or each in given), None):
                key, new = section, None
                problem = f"must be {'unset' if section in saved else 'set'}, as in the run {out!r}"
            remedy = "set it back to resume, or give another `out` to start a new run"
            remedy += " (with init_from to keep the weights)" if fixed else f"; or accept it by --allow-change {key}"
            raise UserError(key, new, problem, remedy)
        found.append(f"{key}: {old!r} -> {new!r}")
    return found


def _adds_state(key: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a key is of a section that keeps state, and the run that saved had no such section."""
    if key in ("augmentation.target", "objective.pool"):
        return not saved.get(key)
    if key.startswith("augmentation."):
        return given.get("augmentation.kind") == "ada" and (key not in saved or key == "augmentation.kind")
    return key not in saved and key.startswith(("objective.lecam.", "objective.path_length."))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested sections by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found
