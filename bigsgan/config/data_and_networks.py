"""Refuses networks that do not fit each other, or the form of the data."""

from __future__ import annotations

from typing import Any

from bigsgan.config.families.base import judged_outputs
from bigsgan.config.families.dmd2 import DMD2Discriminator
from bigsgan.config.families.outside import OutsideGenerator, is_outside
from bigsgan.config.sections import NETWORKS
from bigsgan.errors import UserError

READ_BY_TERMS = (
    *("images", "real_images", "labels", "latents", "input_images", "fake_logits", "real_logits"),
    *("fake_gradients", "real_gradients", "features"),
)
"""Names of what terms may read besides outputs that have names (adversarial/terms/term.py)."""


def check_data_and_networks(recipe: Any) -> None:
    """Check what of the data the networks read, and what they make and judge. ``recipe`` is a ``Recipe``.

    Raises:
        UserError: Something does not fit.
    """
    _check_images_per_sample(recipe)
    _check_families(recipe)
    _check_what_generator_reads(recipe)
    _check_images_from_images(recipe)
    _check_transport(recipe)
    _check_names_of_outputs(recipe)
    _check_terms_of_outputs(recipe)
    _check_frozen_parts(recipe)
    _check_matching(recipe)
    _check_frozen_programs(recipe)
    _check_tokens(recipe)


def _check_tokens(recipe: Any) -> None:
    """Refuse networks that do not read tokens, and fakes that would draw theirs from all images' in memory."""
    if not recipe.data.conditions_are_tokens:
        return
    what = f"with data.condition_size={recipe.data.condition_size}"
    for network in recipe.networks:
        family = getattr(recipe, network).family
        if not is_outside(family):
            problem, remedy = f"must be a network of your own {what}", "name its code, as in docs/how-to/own-network.md"
            raise UserError(f"{network}.family", family, problem, remedy)
    if recipe.objective.fake_labels != "data" and not (recipe.adds_noise or recipe.translates):
        remedy = "set objective.fake_labels=data" + " objective.reuse_fakes=true" * recipe.has_discriminator
        problem = f"must be data {what}"
        detail = "fakes take the tokens of the images beside them, as those of all images may not fit into memory"
        raise UserError("objective.fake_labels", recipe.objective.fake_labels, problem, remedy, detail)


def check_batch_statistics(recipe: Any) -> None:
    """Refuse keys of statistics that the networks of a ``Recipe`` do not have.

    Raises:
        UserError: One is given.
    """
    generator = f"generator.family={recipe.generator.family}"
    if not recipe.generator.has_statistics:
        recipe.refuse_changed("", ["sample_statistics"], generator)
        if not recipe.discriminator.has_statistics:
            recipe.refuse_changed("", ["statistics"], "these families, which keep none")
    if recipe.sample_statistics == "batch" and recipe.generator.has_styles:
        problem = f"must be running with {generator}"
        detail = "it has no batch norm, and as in training would mix styles and not truncate them"
        raise UserError("sample_statistics", recipe.sample_statistics, problem, "remove it", detail)
    if recipe.batch_statistics == "host":
        if not any(getattr(recipe, network).has_batch_norm for network in recipe.networks):
            raise UserError("batch_statistics", "host", "needs a network with batch norm", "remove it")
        if recipe.statistics == "every_pass":
            problem, detail = "must be every_update with batch_statistics=host", "hosts average them once an update"
            raise UserError("statistics", "every_pass", problem, "remove it, or batch_statistics", detail)


def _check_frozen_programs(recipe: Any) -> None:
    """Refuse tangents through a program, some of whose operations torch cannot differentiate so, and CUDA graphs."""
    for network in NETWORKS:
        family, engine = getattr(recipe, network).family, recipe.engine(network)
        if family != "features":
            continue
        if engine.cuda_graphs:
            field, problem = f"engines.{network}.cuda_graphs", f"must be false with {network}.family={family}"
            raise UserError(field, True, problem, "remove it", "its program is not compiled")
        for name, method in recipe.objective.methods(network).items():
            if method == "forward_mode" or engine.pipeline_stages > 1:
                problem = f"must be null with {network}.family={family}"
                problem += "" if method == "forward_mode" else f" in {engine.pipeline_stages} stages"
                remedy = "remove it, or give r1 or r2 with form: finite_difference"
                detail = "its program has no tangents, which forward mode needs"
                raise UserError(f"objective.{name}", f"method={method}", problem, remedy, detail)


def _check_images_per_sample(recipe: Any) -> None:
    made, judged = recipe.generator.images_per_sample, recipe.discriminator.images_per_sample
    if made != judged and recipe.has_discriminator:
        problem = f"must judge as many images of a sample as generator.family={recipe.generator.family} makes ({made})"
        remedy = "give both networks the same family and the same levels"
        field, detail = "discriminator.family", f"it judges {judged}"
        raise UserError(field, recipe.discriminator.family, problem, remedy, detail)
    if made > 1 and recipe.augmentation and recipe.augmentation.kind == "ada":
        problem = f"must be diffaugment with generator.family={recipe.generator.family}"
        remedy, detail = "set augmentation.kind=diffaugment, or augmentation=null", "ADA's colours are of one image"
        raise UserError("augmentation.kind", "ada", problem, remedy, detail)
    if made == 1 and recipe.objective.consistency:
        problem = f"must be null with generator.family={recipe.generator.family}"
        remedy, detail = "remove it, or give both networks family cat or gat", "it compares the images of one sample"
        weight = f"weight={recipe.objective.consistency.weight}"
        raise UserError("objective.consistency", weight, problem, remedy, detail)


def _check_transport(recipe: Any) -> None:
    """Refuse the distance between images and latents of other shapes."""
    if recipe.objective.transport is None:
        return
    given, data = f"weight={recipe.objective.transport.weight}", recipe.data
    if recipe.translates or recipe.generator.images_per_sample > 1:
        problem = f"must be null with generator.family={recipe.generator.family}"
        raise UserError("objective.transport", given, problem, "remove it", "G's images and latents have other shapes")
    if recipe.latent_size != (needed := data.channels * data.network_size.num_pixels):
        problem, remedy = f"needs latents of {needed} numbers", f"set generator.latent_size={needed}, or remove it"
        raise UserError("objective.transport", given, problem, remedy, f"generator.latent_size is {recipe.latent_size}")


def _check_families(recipe: Any) -> None:
    """Refuse families for data of another form: pairs of images, images of two domains, or one image."""
    data = recipe.data
    for network in recipe.networks:
        section = getattr(recipe, network)
        wants_domains = data.joins_domains and network == "generator"  # D may judge both images together
        if is_outside(section.family):
            continue
        if section.joins_domains and not data.joins_domains:
            problem, remedy = "must be a family for images of one domain", "set data.kind=unpaired_folders"
        elif wants_domains and not section.joins_domains:
            problem, remedy = "must be a family for images of two domains", "set generator.family=cyclegan"
        elif section.paired != data.paired:
            problem = "must be a family for latents" if section.paired else "must be a family for pairs of images"
            remedy = "set data.kind=side_by_side" if section.paired else f"set {network}.family=pix2pix"
        else:
            continue
        raise UserError(f"{network}.family", section.family, problem, remedy, f"data.kind is {data.kind}")


def _check_images_from_images(recipe: Any) -> None:
    """Refuse keys that do not fit a generator from images, or only fit one."""
    has_others = recipe.data.paired or recipe.data.condition_width or recipe.discriminator_reads_latents
    if recipe.objective.pool and has_others:
        problem, detail = "must be 0 with pairs, classes or discriminator.latents", "older images have others"
        raise UserError("objective.pool", recipe.objective.pool, problem, "remove it", detail)
    if recipe.translates and not recipe.objective.reuse_fakes and recipe.has_discriminator:
        problem, detail = "must be true with a generator from images", "both networks' updates read the same inputs"
        raise UserError("objective.reuse_fakes", False, problem, "set objective.reuse_fakes=true", detail)
    if recipe.data.has_inputs and recipe.augmentation:
        problem, detail = "must be null with pairs of images", "it would move targets away from their inputs"
        raise UserError("augmentation", recipe.augmentation.kind, problem, "set augmentation=null", detail)
    for name in (*recipe.objective.of_targets, "feature_matching"):
        value = getattr(recipe.objective, name)
        if not value or (recipe.translates and not recipe.data.joins_domains):
            continue
        nothing, given = (0, value) if isinstance(value, float) else ("null", f"weight={value.weight}")
        what, detail = f"data.kind={recipe.data.kind}", "only pairs of images have targets"
        remedy = "remove it, or set data.kind=side_by_side"
        if recipe.objective.flow:
            what, detail, remedy = "objective.flow", "it compares G's images with the real ones", "remove it"
        elif recipe.generator.num_steps > 1 and recipe.has_discriminator:
            compares = name in recipe.objective.of_targets and not _compares_latents(recipe, name)
            if recipe.adds_noise and compares:
                continue  # the images that noise was added to
            what, detail, remedy = f"generator.steps={recipe.generator.num_steps}", "", "remove it"
            if compares:
                remedy = "remove it, or set generator.noised=reals"
            elif name in recipe.objective.of_targets:
                what, detail = f"data.codec.kind={recipe.data.codec.kind}", "G's images are not pixels"
        raise UserError(f"objective.{name}", given, f"must be {nothing} with {what}", remedy, detail)


def _compares_latents(recipe: Any, name: str) -> bool:
    return name == "perceptual" and recipe.data.codec.kind != "pixels"


def _check_what_generator_reads(recipe: Any) -> None:
    generator, data = recipe.generator, recipe.data
    if data.joins_domains and not recipe.translates:
        problem, detail = f"must be images with data.kind={data.kind}", "it translates the images of both domains"
        raise UserError("generator.reads", "latents", problem, "set generator.reads=images", detail)
    if generator.joins_domains and (stages := recipe.engine("generator").pipeline_stages) > 1:
        problem, detail = f"must be 1 with generator.family={generator.family}", "its layers are used once more"
        raise UserError("engines.generator.pipeline_stages", stages, problem, "remove it", detail)
    reads_images = getattr(generator, "reads", "latents") == "images"
    what = "generator.reads=images" if is_outside(generator.family) else f"generator.family={generator.family}"
    if reads_images and data.codec.kind != "pixels":
        raise UserError("data.codec.kind", data.codec.kind, f"must be pixels with {what}", "remove it")
    if reads_images and data.range is not None:
        raise UserError("data.range", data.range, f"must be null with {what}", "remove it, and scale the images before")
    if reads_images and data.condition_width and (data.joins_domains or not is_outside(generator.family)):
        key = "num_classes" if data.num_classes else "condition_size"
        problem, detail = f"must be 0 with {what}", "the generator reads no labels"
        raise UserError(f"data.{key}", getattr(data, key), problem, f"set data.{key}=0", detail)
    if recipe.discriminator_reads_latents and (recipe.translates or recipe.reads_noise):
        problem, detail = "must be false with this generator", "it makes images from images, or from noise on them"
        raise UserError("discriminator.latents", True, problem, "remove it", detail)
    if not isinstance(generator, OutsideGenerator):
        return
    if reads_images and data.paired:
        problem, detail = f"must be unset with data.kind={data.kind}", "it reads the inputs of pairs"
        raise UserError("generator.reads", "images", problem, "remove it", detail)
    if recipe.translates and generator.latent_size:
        field = f"data.kind={data.kind}" if data.paired else "generator.reads=images"
        raise UserError("generator.latent_size", generator.latent_size, f"must be unset with {field}", "remove it")
    if not recipe.translates and not generator.latent_size:
        remedy = "give the numbers of a latent, or set reads=images for a generator from images"
        raise UserError("generator.latent_size", None, "must be given", remedy)


def _check_names_of_outputs(recipe: Any) -> None:
    """Refuse outputs of networks that terms could not tell from something else."""
    taken = set(READ_BY_TERMS)
    for network, forms in (("generator", ("{}",)), ("discriminator", ("fake_{}", "real_{}"))):
        for number, name in enumerate(getattr(getattr(recipe, network), "outputs", [])):
            names = {form.format(name) for form in forms}
            # What terms read of images that a penalty adds is called so.
            is_added = network == "discriminator" and name.endswith(("_logits", "_gradients"))
            if taken & names or is_added:
                problem, remedy = "is the name of something else that terms read", "give it a name of its own"
                raise UserError(f"{network}.outputs.{number}", name, problem, remedy)
            taken |= names


def _check_terms_of_outputs(recipe: Any) -> None:
    """Refuse terms of outputs that G does not have, and codes that no term moves."""
    keeps_latents = getattr(recipe.generator, "frozen", None) == "encoder"
    reads = {"kl": ("moments",), "codebook": ("encoded", "quantized"), "cycle": ("again",), "identity": ("same",)}
    remedies = {"kl": "generator.bottleneck.kind=kl", "codebook": "generator.bottleneck.kind=vq"}
    for name, outputs in reads.items():
        asked, missing = getattr(recipe.objective, name), [each for each in outputs if each not in recipe.outputs]
        value = f"weight={asked.weight}" if hasattr(asked, "weight") else asked
        if asked and missing:
            problem = f"must be unset with a generator without an output {missing[0]}"
            remedy = f"remove it, or set {remedies.get(name, 'generator.family=cyclegan')}"
            raise UserError(f"objective.{name}", value, problem, remedy)
        if asked and name not in remedies and not recipe.data.joins_domains:
            problem, detail = f"must be 0 with data.kind={recipe.data.kind}", "it compares images of two domains"
            raise UserError(f"objective.{name}", value, problem, "remove it", detail)
        if asked and keeps_latents:
            raise UserError(f"objective.{name}", value, "must be unset with generator.frozen=encoder", "remove it")
    if recipe.objective.identity and recipe.data.input_channels != recipe.data.image_channels:
        problem, detail = "must be 0 where domains differ in channels", "each G also reads images of its target domain"
        raise UserError("objective.identity", recipe.objective.identity, problem, "remove it", detail)
    has_codebook = recipe.generator.num_codes > 0 and "quantized" in recipe.outputs
    if has_codebook and not keeps_latents and recipe.objective.codebook is None:
        raise UserError("objective.codebook", None, "must be given with a codebook", "set objective.codebook={}")
    if recipe.objective.codebook:
        _check_codes(recipe)


def _check_frozen_parts(recipe: Any) -> None:
    """Refuse to freeze parts of a network that begin at random."""
    init = recipe.init_from
    if recipe.generator.freezes and not (init and (init.run or init.generator)):
        problem, remedy = "must be none without init_from", "name the run whose weights it keeps, or remove it"
        raise UserError("generator.frozen", getattr(recipe.generator, "frozen", None), problem, remedy)
    adaptive = recipe.objective.adversarial.adaptive
    if adaptive and getattr(recipe.generator, "frozen", None) == "decoder":
        problem, detail = "must be null with generator.frozen=decoder", "G's last parameters are not trained"
        value = f"parameter={adaptive.parameter}"
        raise UserError("objective.adversarial.adaptive", value, problem, "set it to null", detail)
    if recipe.discriminator.freezes and not (init and (init.run or init.discriminator)):
        problem = f"must be given with discriminator.family={recipe.discriminator.family}"
        remedy = "name the teacher's run, such as init_from.run=runs/digits_dit"
        raise UserError("init_from.run", None, problem, remedy)
    for network in recipe.networks:
        _check_held(recipe, network)


def _check_held(recipe: Any, network: str) -> None:
    """Refuse settings of frozen parameters where there are none, or code reads them as they are."""
    engine, section = recipe.engine(network), getattr(recipe, network)
    for name, value in engine.frozen.model_dump(exclude_defaults=True).items():
        reason = ""
        if not (is_outside(section.family) or section.freezes):
            kind = f"family={section.family}"
            if getattr(section, "frozen", None) == "none":
                kind = "frozen=none"
            elif getattr(section, "trains_teacher", False):
                kind = "trains_teacher=true"
            reason = f"{network}.{kind}, which has no frozen parameters"
        elif not getattr(section, "exact", True):
            reason = f"{network}.exact=false, whose code may change them"
        elif engine.compile != "none" and (name == "persistence_threshold" or value in (True, "cpu")):
            reason = f"engines.{network}.compile={engine.compile}, whose code reads them whole"
        if reason:
            raise UserError(f"engines.{network}.frozen.{name}", value, f"must be unset with {reason}", "remove it")


def _check_matching(recipe: Any) -> None:
    """Refuse distribution matching without what D has to return for it, or a fake score without it."""
    section, discriminator = recipe.objective.distribution_matching, recipe.discriminator
    field = "objective.distribution_matching"
    missing = [name for name in DMD2Discriminator.outputs if name not in judged_outputs(discriminator)]
    if section is None:
        if discriminator.copies_generator and not missing:
            problem = f"must be given with discriminator.family={discriminator.family}"
            raise UserError(field, None, problem, f"set {field}={{}}")
        return
    value = f"weight={section.weight}"
    if missing:
        problem = f"needs a discriminator with an output {missing[0]}"
        raise UserError(field, value, problem, "set discriminator.family=dmd2, or remove it")
    if key := recipe.objective.adversarial.weighs:
        problem, detail = f"must be null with objective.adversarial.{key}", "it would be weighed too"
        raise UserError(field, value, problem, "remove one of both", detail)
    if recipe.augmentation:
        problem, detail = f"must be null with {field}", "the teacher knows the data as it is"
        raise UserError("augmentation.kind", recipe.augmentation.kind, problem, "remove augmentation", detail)


def _check_codes(recipe: Any) -> None:
    """Refuse an entropy without its softmax or the other way round, and the revival of more codes than latents."""
    entropy, field = recipe.objective.codebook.entropy, "generator.bottleneck.temperature"
    asked, given = entropy is not None, "shares" in recipe.outputs
    if asked and not given:
        remedy = f"set {field}, such as 0.01"
        problem, value = "needs a generator with outputs entropies and shares", f"weight={entropy.weight}"
        raise UserError("objective.codebook.entropy", value, problem, remedy)
    bottleneck = getattr(recipe.generator, "bottleneck", None)
    if bottleneck is None:
        return
    if given and not asked:
        remedy = "remove it, or set objective.codebook.entropy={}"
        raise UserError(field, bottleneck.temperature, "must be unset without objective.codebook.entropy", remedy)
    averages, field = bottleneck.ema, "generator.bottleneck.ema"
    num = recipe.batch * recipe.data.network_size.num_pixels // recipe.generator.factor**2
    if averages and averages.revival and averages.revival.most > num:
        problem, remedy = f"must be at most {num}, the pixels of a batch's latents", "give a smaller number"
        raise UserError(f"{field}.revival.most", averages.revival.most, problem, remedy)
    if not bottleneck.kmeans_steps:
        return
    field = "generator.bottleneck.kmeans_steps"
    if bottleneck.num_codes > num:
        problem = f"needs {bottleneck.num_codes} latents, one for each code, and a batch has {num}"
        remedy = "give a larger batch, or fewer codes, or set it to 0"
        raise UserError(field, None, problem, remedy)
    if recipe.init_from and (recipe.init_from.run or recipe.init_from.generator):
        problem, detail = "must be 0 with init_from", "its codes would be lost"
        raise UserError(field, bottleneck.kmeans_steps, problem, "remove it", detail)
