"""`bigsgan bench`: measures the time, memory and communication of a recipe."""

from __future__ import annotations

import argparse
import os

from bigsgan.bench.lazy import whole_cycles
from bigsgan.bench.variants import VARIANTS, Planned, Variant, chosen_variants, plan_variants
from bigsgan.commands.parsing import Commands, add_form, add_recipe, import_quietly, path_type
from bigsgan.commands.planning import plan_on_ranks, with_data
from bigsgan.config import NETWORKS, RunPlan, load_recipe
from bigsgan.config.run_directory import TRACE_FILE, refuse_directory, refuse_output
from bigsgan.config.run_plan import chooses_ranks
from bigsgan.errors import UserError
from bigsgan.runtime import launched

LARGEST_COUNT = 10**6


def add(group: Commands) -> None:
    """Add the commands of ``bench``."""
    parser = group.add_parser("bench", help="measure the time, memory and communication of a recipe")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "variants of a recipe (engines, precision, ZeRO, ...) against plain PyTorch, in one run"
    command = commands.add_parser("train", help=text)
    add_recipe(command)
    text = f"which, the one to compare with first (default: all); + joins changes: {', '.join(VARIANTS)}"
    command.add_argument("--variants", default=",".join(VARIANTS), help=text)
    _add_count(command, "--rounds", 3, "in each of which every variant takes its turn (default 3)")
    _add_updates(command)
    add_form(command)
    command.set_defaults(run=bench_train)

    text = "one steady update by phase and operation, with a timeline, and what of the device it uses"
    command = commands.add_parser("profile", help=text)
    add_recipe(command)
    text = "directory for the timeline, trace.json"
    command.add_argument("--out", required=True, metavar="DIR", type=path_type("--out"), help=text)
    _add_updates(command)
    add_form(command)
    command.set_defaults(run=bench_profile)

    text = "collectives of one update by phase, against the least that its ZeRO stages could send"
    command = commands.add_parser("comm", help=text)
    add_recipe(command)
    text = "of `bench train` (default: the recipe as it is), such as zero1,zero2,zero3"
    command.add_argument("--variants", help=text)
    add_form(command)
    command.set_defaults(run=bench_comm)


def bench_train(options: argparse.Namespace) -> int:
    """Compare variants of a recipe."""
    launched.take_from_slurm()
    launched.check_launcher()
    recipe, _ = with_data(load_recipe(options.config, options.overrides))
    if not recipe.has_discriminator:
        remedy = "use `bigsgan bench profile`"
        raise UserError("discriminator.family", "none", "has no loop in plain PyTorch to compare with", remedy)
    if chooses_ranks(recipe) and launched.world_size() > 1:
        recipe = plan_on_ranks(recipe, launched.world_size(), options.config).recipe
    variants = chosen_variants(options.variants, recipe)
    planned = plan_variants(recipe, variants, launched.world_size(), options.config.resolve().parent)
    module = import_quietly("bigsgan.bench.train")
    settings = module.Settings(options.rounds, options.warmup, whole_cycles(recipe, options.steps))
    return int(module.main(recipe, planned, settings, options.form))


def bench_profile(options: argparse.Namespace) -> int:
    """Profile one update."""
    launched.take_from_slurm()
    launched.check_launcher()
    plan = plan_on_ranks(load_recipe(options.config, options.overrides), launched.world_size(), options.config)
    refuse_directory(options.out, "--out")
    if os.path.isdir(options.out):
        refuse_output(options.out / TRACE_FILE, "--out", TRACE_FILE)
    _check_stages(plan)
    steps = whole_cycles(plan.recipe, options.steps)
    module = import_quietly("bigsgan.bench.profile")
    return int(module.main(plan, options.out, options.warmup, steps, options.form))


def bench_comm(options: argparse.Namespace) -> int:
    """Count the collectives of one update."""
    launched.take_from_slurm()
    launched.check_launcher()
    (recipe, _), num_ranks = with_data(load_recipe(options.config, options.overrides)), launched.world_size()
    if num_ranks == 1:
        example = "torchrun --nproc_per_node 2 --no-python -- bigsgan bench comm"
        remedy = f"start with deepspeed or torchrun, such as {example}"
        raise UserError("WORLD_SIZE", 1, "must be at least 2", remedy)
    if options.variants is None:
        plan = plan_on_ranks(recipe, num_ranks, options.config)
        _check_stages(plan)
        planned = [Planned(Variant("recipe", "as it is", lambda recipe: []), plan)]
    else:
        variants = chosen_variants(options.variants, recipe)
        for variant in variants:
            if variant.is_plain or "pipeline" in variant.name.split("+"):
                raise UserError("--variants", variant.name, "has no ZeRO stage to compare with", "remove it")
        planned = plan_variants(recipe, variants, num_ranks, options.config.resolve().parent)
    module = import_quietly("bigsgan.bench.comm")
    return int(module.main(planned, options.form))


def _check_stages(plan: RunPlan) -> None:
    """Refuse pipelines, because their phases overlap."""
    for network in NETWORKS:
        stages = plan.placement(network).num_stages
        if stages > 1:
            remedy = "set it to 1; a run of pipelines writes pipeline_trace.json itself"
            problem = "must be 1 here, as phases of pipelines overlap"
            raise UserError(f"engines.{network}.pipeline_stages", stages, problem, remedy)


def _add_updates(command: argparse.ArgumentParser) -> None:
    _add_count(command, "--warmup", 2, "updates before the clock starts (default 2)")
    _add_count(command, "--steps", 5, "updates that are timed at a time (default 5)")


def _add_count(command: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    """Add an option that takes a number from 1 to ``LARGEST_COUNT``."""
    command.add_argument(flag, type=lambda word: _count(flag, word), default=default, help=text)


def _count(flag: str, word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= LARGEST_COUNT:
        raise UserError(flag, word, f"must be 1 to {LARGEST_COUNT}", "give a number in this range")
    return int(word)
