"""Families, objectives and augmentations that do not go together: refused with field, problem and remedy."""

import pytest

from bigsgan.config import load_recipe, plan_run
from bigsgan.errors import UserError
from tests.tiny import FAMILIES, TINY

STAGES = [f"engines.{network}.pipeline_stages=2" for network in ("generator", "discriminator")]
PAIRS = [override for override in FAMILIES["pix2pix"] if not override.startswith("data.crop_from")]
STYLES = FAMILIES["stylegan2"]

CASES = {
    "no family": (["generator.family=null"], "generator.family", "is no family", "choose from biggan, biggan_deep"),
    "another family's keys": (
        ["generator.family=r3gan"], "generator.channels", "a key that does not exist", "family r3gan has the keys",
    ),
    "pairs for latents": (
        [PAIRS[0].replace("64, num_i", "16, num_i")],
        "generator.family", "'biggan' does not read the inputs of pairs", "generator.family=pix2pix",
    ),
    "latents for pairs": (PAIRS[1:3], "generator.family", "'pix2pix' reads pairs of images", "data.kind=side_by_side"),
    "fresh inputs of pairs": (PAIRS[:3], "objective.reuse_fakes", "would need other inputs", "reuse_fakes=true"),
    "classes of pairs": (["data.kind=synthetic_pairs"], "data.num_classes", "10 but pairs", "set 0"),
    "targets of one folder": (
        ["data={kind: paired_folders, root: x, num_classes: 0}"], "data.input_root", "is missing", "give the directory",
    ),
    "input channels": (["data.input_channels=2"], "data.input_channels", "2 is neither grey nor colour", "set 1"),
    "l1 without targets": (["objective.l1=1"], "objective.l1", "only pairs have", "remove it"),
    "features without targets": (
        ["objective.feature_matching=1"], "objective.feature_matching", "only pairs", "remove it",
    ),
    "augmented pairs": (
        [*PAIRS, "augmentation={p: 0.5}"], "augmentation.kind", "would move targets", "augmentation=null",
    ),
    "features in stages": (
        [*PAIRS[:3], "objective={reuse_fakes: true, feature_matching: 1}", *STAGES],
        "objective.feature_matching", "reads the features of all layers", "engines.discriminator.pipeline_stages=1",
    ),
    "gradient penalty in stages": (
        ["objective.gradient_penalty={}", *STAGES],
        "objective.gradient_penalty", "needs a double backward", "objective.r1 with form=finite_difference",
    ),
    "compiling at stage 3": (
        ["engines.generator={compile: layers, ds_config: ds_configs/zero3.json}"],
        "engines.generator.compile", "'layers' does not go with ZeRO stage 3", "engines.generator.compile=none",
    ),
    "compiling stages": (
        ["engines.discriminator.compile=whole", *STAGES],
        "engines.discriminator.compile", "'whole' does not go with pipeline_stages", "pipeline_stages=1",
    ),
    "compiling what is recomputed": (
        ["engines.discriminator={compile: whole, activation_checkpointing: true}"],
        "engines.discriminator.compile", "'whole' does not go with activation_checkpointing", "compile=layers",
    ),
    "replaying what is not compiled": (
        ["engines.generator.cuda_graphs=true"],
        "engines.generator.cuda_graphs", "engines.generator.compile is none", "engines.generator.compile=whole",
    ),
    "replaying what is recomputed": (
        ["engines.discriminator={compile: layers, cuda_graphs: true, activation_checkpointing: true}"],
        "engines.discriminator.cuda_graphs", "does not go with activation_checkpointing", "cuda_graphs=false",
    ),
    "replaying what is offloaded": (
        ["engines.generator={compile: whole, cuda_graphs: true, ds_config: ds_configs/zero2_offload.json}"],
        "engines.generator.cuda_graphs", "does not go with offloading", "use a file without offload",
    ),
    "paths without styles": (
        ["objective.path_length={}"], "objective.path_length", "needs styles", "generator.family=stylegan2",
    ),
    "paths of a part that does not divide": (
        [*STYLES, "objective.path_length.batch_shrink=3"],
        "objective.path_length.batch_shrink", "does not divide the ", "set objective.path_length.batch_shrink=1",
    ),
    "paths in stages": (
        [*STYLES, "objective.path_length={}", STAGES[1]],
        "objective.path_length", "needs a double backward through the generator", "objective.path_length=null",
    ),
    "a bf16 slope": (
        [*STYLES[:1], STYLES[1].replace("mbstd_group: 2", "mbstd_group: 2, half_resolutions: 1"),
         "objective.r1={weight: 1, form: finite_difference}"],
        "objective.r1.sigma", "0.01 is a smaller step than a bf16 discriminator resolves", "sigma=0.1",
    ),
    "decay of frozen layers": (
        ["init_from={run: x, freeze_discriminator: 1}", "optimizer.discriminator.weight_decay=0.1"],
        "optimizer.discriminator.weight_decay", "would move the layers", "set it to 0",
    ),
    "augmentation of nothing": (["augmentation={}"], "augmentation.p", "would change no image", "target=0.6"),
    "ada that is to be deterministic": (
        ["deterministic=true", "augmentation={target: 0.6}"],
        "augmentation.kind", "has no deterministic backward pass", "deterministic=false",
    ),
    "a deep slip": (["generator={family: mlp, depth: 1000000}"], "generator.depth", "is too large", "give at most 64"),
    "dcgan's resolution": (
        ["generator={family: dcgan}", "data={resolution: 24}"], "data.resolution", "24 is no power of two", "=16",
    ),
    "a u-net's resolution": (
        ["data={kind: synthetic_pairs, num_classes: 0, resolution: 12}", *PAIRS[1:]],
        "data.resolution", "12 cannot be halved often enough", "data.resolution=8",
    ),
    "no patch": (
        [*PAIRS[:2], "discriminator={family: pix2pix, depth: 6}", *PAIRS[3:]],
        "discriminator.depth", "6 leaves no patch", "discriminator.depth=4 or less",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_go_together(name, tmp_path):
    overrides, field, problem, remedy = CASES[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY)
    with pytest.raises(UserError) as caught:
        plan_run(load_recipe(path, overrides), 2)
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert problem in message
    assert remedy in message.partition("; ")[2]


def test_every_family_is_accepted(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY)
    for overrides in FAMILIES.values():
        plan_run(load_recipe(path, list(overrides)), 2)
