"""Refuses keys that do not fit a recipe whose generator learns alone, or one that has a discriminator."""

from __future__ import annotations

from typing import Any

from bigsgan.config.sections import Optimizers
from bigsgan.errors import UserError

_OF_BOTH = (
    *("loss", "d_steps", "schedule", "reuse_fakes", "pool", "feature_matching", "r1", "r2", "gradient_penalty"),
    *("lecam", "centering", "path_length", "teacher", "adversarial", "discriminator_from_nimg"),
    "distribution_matching",
)
"""Keys of ``objective`` that need a discriminator, or its phases."""


def check_networks(recipe: Any) -> None:
    """Check the keys that depend on which networks learn. ``recipe`` is a ``Recipe``.

    Raises:
        UserError: A key has no effect, or one is missing.
    """
    if recipe.has_discriminator:
        if recipe.optimizer.discriminator == Optimizers.model_fields["discriminator"].default:
            remedy = "set optimizer.discriminator.lr=2e-4, or discriminator.family=none"
            raise UserError("optimizer.discriminator", None, "must be given", remedy)
        if recipe.objective.flow:
            problem, remedy = "needs discriminator.family=none", "set it so, or remove objective.flow"
            raise UserError("objective.flow", f"weight={recipe.objective.flow.weight}", problem, remedy)
    else:
        _check_without_discriminator(recipe)
    generator = recipe.generator
    if recipe.translates and (generator.reads_times or generator.num_steps > 1):
        field = "generator.times" if generator.reads_times else "generator.steps"
        raise UserError(field, None, "needs a generator from latents", "remove it")
    if not recipe.has_discriminator and not recipe.objective.flow and generator.num_steps > 1:
        problem, remedy = "must be 1 without objective.flow and a discriminator", "remove it, or give objective.flow"
        raise UserError("generator.steps", generator.num_steps, problem, remedy)
    if generator.num_steps > 1 and not generator.reads_times:
        raise _needs_times("generator.steps")
    if not generator.reads_times or not recipe.reads_noise:
        what = "a generator that makes images in one step"
        keys = [key for key in ("sampler", "time_shift", "noised") if key in type(generator).model_fields]
        generator.refuse_changed("generator", keys, what)
    if recipe.objective.flow and getattr(generator, "noised", "reals") != "reals":
        raise UserError("generator.noised", generator.noised, "must be reals with objective.flow", "remove it")
    if recipe.adds_noise or generator.simulates_steps:
        given = f"generator.steps={generator.num_steps}" if recipe.has_discriminator else "objective.flow"
        _check_noise(recipe, given)
    guidance = getattr(generator, "guidance", 1)
    if guidance != 1 and not (recipe.objective.flow and recipe.data.condition_dropout):
        problem, remedy = "must be 1 without objective.flow and data.condition_dropout", "remove it, or give these"
        raise UserError("generator.guidance", guidance, problem, remedy)
    needed = recipe.data.channels * recipe.data.network_size.num_pixels
    if generator.reads_times and recipe.latent_size != needed:
        problem = f"must be {needed}, the numbers of an image as networks see it, with generator.times"
        raise UserError("generator.latent_size", recipe.latent_size, problem, f"set generator.latent_size={needed}")


def _check_without_discriminator(recipe: Any) -> None:
    objective, init = recipe.objective, recipe.init_from
    found = objective.changed("objective", _OF_BOTH)
    found += objective.orthogonal.changed("objective.orthogonal", ["discriminator"])
    found += recipe.changed("", ["augmentation"]) + recipe.optimizer.changed("optimizer", ["discriminator"])
    found += recipe.pipeline.changed("pipeline", ["generator_phase", "schedule"])
    found += init.changed("init_from", ["discriminator", "backbone", "freeze_discriminator"]) if init else []
    found += [f"objective.terms.{n}" for n, term in enumerate(objective.terms) if term.network == "discriminator"]
    engines, keys = recipe.engines, type(recipe.engines.discriminator).model_fields.keys()
    found += engines.generator.changed("engines.generator", ["ranks"])
    found += ["engines.stock_deepspeed"] if engines.stock_deepspeed == "discriminator" else []
    # Of DeepSpeed files a run keeps one for each engine, and `--deepspeed_config` gives both the same.
    found += engines.discriminator.changed("engines.discriminator", keys - {"ds_config"})
    for field in found:
        raise UserError(field, None, "must be unset with discriminator.family=none", "remove it")
    terms = [objective.l1, objective.l2, objective.huber, objective.perceptual, objective.kl, objective.codebook]
    terms += [objective.cycle, objective.identity, objective.consistency, objective.transport, objective.flow]
    if not any([*terms, *(term.every == 1 for term in objective.terms)]):
        problem = "must have a part of the generator's loss in each update with discriminator.family=none"
        raise UserError("objective", None, problem, "give one, such as objective.flow={} or objective.l1=1")


def overlaps_data(what: str) -> UserError:
    """Return the error that updates may not overlap with something."""
    detail = "images are made an update before D reads the data that they would depend on"
    problem, remedy = f"must be exact with {what}", "set objective.schedule=exact"
    return UserError("objective.schedule", "overlapped", problem, remedy, detail)


def _needs_times(field: str) -> UserError:
    remedy = "set generator.times=true, of family dit or of a network of your own"
    return UserError(field, None, "needs a generator that reads times", remedy)


def _check_noise(recipe: Any, given: str) -> None:
    """Refuse what does not fit a generator that learns from images with noise."""
    if not recipe.generator.reads_times:
        raise _needs_times(given)
    if recipe.generator.simulates_steps and recipe.objective.schedule == "overlapped":
        problem, remedy = "must be exact or generator_first with generator.noised=samples", "set it to one of these"
        raise UserError("objective.schedule", "overlapped", problem, remedy)
    if recipe.adds_noise and recipe.has_discriminator and not recipe.objective.reuse_fakes:
        problem, detail = f"must be true with {given}", "both networks' updates read the same images"
        raise UserError("objective.reuse_fakes", False, problem, "set objective.reuse_fakes=true", detail)
    if recipe.objective.schedule == "overlapped":
        raise overlaps_data(given)
    if recipe.adds_noise and recipe.objective.fake_labels == "frequencies":
        problem, detail = f"must be uniform or data with {given}", "labels are those of the images"
        raise UserError("objective.fake_labels", recipe.objective.fake_labels, problem, "remove it", detail)
    others = {"transport": recipe.objective.transport, "consistency": recipe.objective.consistency}
    for name, section in others.items():
        if section:
            detail = "G sees images with noise"
            raise UserError(
                f"objective.{name}", f"weight={section.weight}", f"must be null with {given}", "remove it", detail
            )
