"""Families, objectives and augmentations that do not go together: refused with field, problem and remedy."""

import pytest

from bigsgan.cli import main
from bigsgan.config import NETWORKS, Recipe, both_engines, plan_run
from bigsgan.config.unused import unused_keys
from tests.bad_input import check_refused
from tests.tiny import TINY_GAMES, tiny_recipe

STAGES = both_engines("pipeline_stages=2")
PAIRS = [override for override in TINY_GAMES["pix2pix"] if not override.startswith("data.crop_from")]
DOMAINS = TINY_GAMES["cyclegan"]
STYLES = TINY_GAMES["stylegan2"]
SMALL_SLOPE = "objective.r1={weight: 1, form: finite_difference, sigma: 0.01}"

CASES = {
    "samples in training mode": ([*STYLES, "sample_statistics=batch"], "sample_statistics",
        "must be running with generator.family=stylegan2, got 'batch' (it has no batch norm", "remove it"),
    "statistics without batch norm": ([*STYLES, "batch_statistics=host"], "batch_statistics",
        "'host' needs a network with batch norm", "remove it"),
    "a host's statistics in every pass": (["batch_statistics=host", "statistics=every_pass"], "statistics",
        "must be every_update with batch_statistics=host, got 'every_pass' (hosts", "remove it, or batch_statistics"),
    "no family": (["generator.family=null"], "generator.family", "must be 'autoencoder', 'biggan', ", "choose one of"),
    "another family's keys": (["generator.family=r3gan"], "generator.channels", "unknown key", "family r3gan has the"),
    "pairs for latents": ([PAIRS[0].replace("64, num_i", "16, num_i")], "generator.family",
        "must be a family for pairs of images, got 'biggan' (data.kind is", "generator.family=pix2pix"),
    "latents for pairs": (PAIRS[1:3], "generator.family", "must be a family for latents,", "data.kind=side_by_side"),
    "two generators for one domain": ([DOMAINS[1]], "generator.family",
        "must be a family for images of one domain, got 'cyclegan' (data.kind is digits)", "kind=unpaired_folders"),
    "two discriminators for one domain": ([DOMAINS[2]], "discriminator.family",
        "must be a family for images of one domain, got 'cyclegan'", "set data.kind=unpaired_folders"),
    "one generator for two domains": ([DOMAINS[0]], "generator.family",
        "must be a family for images of two domains, got 'biggan' (data.kind is unpaired_digits)", "family=cyclegan"),
    "a circle without two generators": (["objective.cycle=1"], "objective.cycle",
        "must be unset with a generator without an output again, got 1.0", "remove it, or set generator.family=cycl"),
    "batch norm of two generators": ([*DOMAINS, "generator.norm=batch"], "generator.norm",
        "must be 'instance' or 'none', got 'batch'", "choose one of"),
    "two generators in stages": ([*DOMAINS, "engines.generator.pipeline_stages=2"], "engines.generator.pipeline_stages",
        "must be 1 with generator.family=cyclegan, got 2 (its layers are used once more)", "remove it"),
    "fresh inputs of pairs": (PAIRS[:3], "objective.reuse_fakes", "must be true with a generator", "reuse_fakes=true"),
    "classes of pairs": (["data.kind=synthetic_pairs"], "data.num_classes", "must be 0 with", "set data.num_classes=0"),
    "targets of one folder": (["data={kind: paired_folders, root: x, num_classes: 0}"], "data.input_root",
        "must be given with data.kind=paired_folders", "give the directory"),
    "input channels": (["data={kind: synthetic_pairs, input_channels: 2, num_classes: 0}"], "data.input_channels",
        "must be 1 or 3, got 2", "set data.input_channels=1 for greyscale or 3 for"),
    "l1 without targets": (["objective.l1=1"], "objective.l1", "must be 0 with data.kind=digits, got 1.0", "remove it"),
    "labels of images that are not reused": (["objective.fake_labels=data"], "objective.fake_labels",
        "must be uniform or frequencies without objective.reuse_fakes, got 'data'", "set objective.reuse_fakes=true"),
    "labels of no classes": (["objective={fake_labels: data, reuse_fakes: true}", "data.num_classes=0"],
        "objective.fake_labels", "must be uniform with data.num_classes=0, got 'data' (the", "set data.num_classes"),
    "labels of data that is read an update later": (
        ["objective={fake_labels: data, reuse_fakes: true, schedule: overlapped}"], "objective.schedule",
        "must be exact with objective.fake_labels=data, got 'overlapped' (images are", "set objective.schedule=exact"),
    "several images for a D of one": ([TINY_GAMES["gat"][0], "objective.loss=relativistic"], "discriminator.family",
        "must judge as many images of a sample as generator.family=gat makes", "give both networks the same family"),
    "ADA of several images": ([*TINY_GAMES["gat"][:2], "augmentation={kind: ada, p: 0.5}"], "augmentation.kind",
        "must be diffaugment with generator.family=gat, got 'ada'", "set augmentation.kind=diffaugment"),
    "consistency of one image": (["objective.consistency={weight: 0.2}"], "objective.consistency",
        "must be null with generator.family=biggan, got 'weight=0.2' (it compares", "remove it, or give both networks"),
    "ADA of latents": (["data.codec.kind=dct", "augmentation={kind: ada, p: 0.5}", "data.resolution=32"],
        "augmentation.kind", "must be diffaugment with data.codec.kind=dct, got", "set augmentation.kind=diffaugment"),
    "a rate for one width": (["optimizer.generator.reference_width=768"], "optimizer.generator.reference_width",
        "must be unset with generator.family=biggan, got 768 (its layers have", "remove it, and give lr itself"),
    "augmented pairs": ([*PAIRS, "augmentation={p: 0.5}"], "augmentation", "must be null with", "augmentation=null"),
    "features in stages": ([*PAIRS[:3], "objective={reuse_fakes: true, feature_matching: 1}", *STAGES],
        "objective.feature_matching", "must be 0 with", "engines.discriminator.pipeline_stages=1"),
    "gradient penalty in stages": (["objective.gradient_penalty.method=double_backward", *STAGES],
        "objective.gradient_penalty.method", "must be auto or forward_mode", "remove it, or set"),
    "penalties by two methods": (
        ["objective={r1: {weight: 1, method: forward_mode}, r2: {weight: 1, method: double_backward}}"],
        "objective.r2.method", "must be that of objective.r1 (forward_mode), got 'double_back", "give all the same"),
    "a method of a finite difference": (["objective.r1={weight: 1, form: finite_difference, method: forward_mode}"],
        "objective.r1.method", "must be auto with form=finite_difference, got", "objective.r1.form=exact"),
    "compiling a whole at ZeRO 3": (["engines.generator={compile: whole, ds_config: ds_configs/zero3.json}"],
        "engines.generator.compile", "must be layers with ZeRO 3, got 'whole' (in", "engines.generator.compile=layers"),
    "replaying stages": (["engines.discriminator={compile: whole, cuda_graphs: true}", *STAGES],
        "engines.discriminator.cuda_graphs", "must be false with pipeline_stages, got true", "cuda_graphs=false"),
    "replaying at ZeRO 3": (
        ["engines.generator={compile: layers, cuda_graphs: true, ds_config: ds_configs/zero3.json}"],
        "engines.generator.cuda_graphs",
        "must be false with ZeRO 3, got true",
        "cuda_graphs=false",
    ),
    "compiling what is recomputed": (["engines.discriminator={compile: whole, activation_checkpointing: true}"],
        "engines.discriminator.compile", "must be layers with activation_checkpointing, got 'whole'", "compile=layers"),
    "replaying what is not compiled": (["engines.generator.cuda_graphs=true"], "engines.generator.cuda_graphs",
        "must be false with engines.generator.compile=none, got true (only", "engines.generator.compile=whole"),
    "replaying what is recomputed": (
        ["engines.discriminator={compile: layers, cuda_graphs: true, activation_checkpointing: true}"],
        "engines.discriminator.cuda_graphs", "must be false with activation_checkpointing, got", "cuda_graphs=false"),
    "replaying what is offloaded": (
        ["engines.generator={compile: whole, cuda_graphs: true, ds_config: ds_configs/zero2_offload.json}"],
        "engines.generator.cuda_graphs", "must be false with offload, got true (in", "use a file without offload"),
    "paths without styles": (["objective.path_length={}"], "objective.path_length",
        "must be null with generator.family=biggan, got 'weight=2.0' (it needs style", "generator.family=stylegan2"),
    "paths of a part that does not divide": ([*STYLES, "objective.path_length.batch_shrink=3"],
        "objective.path_length.batch_shrink", "must divide the 4 images", "set objective.path_length.batch_shrink=1"),
    "paths in stages": ([*STYLES, "objective.path_length={method: double_backward}", STAGES[0]],
        "objective.path_length.method", "must be auto or forward_mode", "remove it, or set"),
    "a bf16 slope": ([*STYLES[:2], "discriminator.half_resolutions=1", SMALL_SLOPE],
        "objective.r1.sigma", "must be at least 0.1 with a bf16 discriminator, got 0.01 (a smaller step is",
        "remove it, or set discriminator.half_resolutions=0"),
    "a slope of a bf16 engine": (
        [*TINY_GAMES["gat"], "engines.discriminator.ds_config=ds_configs/zero3_bf16.json", SMALL_SLOPE],
        "objective.r1.sigma", "must be at least 0.1 with a bf16 discriminator, got 0.01 (a smaller step is",
        "remove it, or use an fp16 or fp32 file for the discriminator"),
    "a slope that is 0 in float32": (["objective.r1={weight: 1, form: finite_difference, sigma: 1e-300}"],
        "objective.r1.sigma", "must be 0 or of a size from 1.2e-38 to 3.4e+38, as float32 is,", "give a larger number"),
    "decay of frozen layers": (
        ["init_from={run: x, freeze_discriminator: 1}", "optimizer.discriminator.weight_decay=0.1"],
        "optimizer.discriminator.weight_decay", "must be 0 with init_from.freeze_discriminator, got 0.1 (it would",
        "set optimizer.discriminator.weight_decay=0"),
    "samples of statistics that a family has not": ([*TINY_GAMES["r3gan"], "sample_statistics=batch"],
        "sample_statistics", "must be unset with generator.family=r3gan, got 'batch'", "remove it"),
    "passes of statistics that no family has": ([*TINY_GAMES["mlp"], "statistics=every_pass"], "statistics",
        "must be unset with these families, which keep none, got 'every_pass'", "remove it"),
    "augmentation of nothing": (["augmentation={}"], "augmentation.p", "must be greater than 0 without", "target=0.6"),
    "ada that is to be deterministic": (["deterministic=true", "augmentation={target: 0.6}"], "augmentation.kind",
        "must be diffaugment with deterministic=true, got 'ada' (torch's grid_sample", "deterministic=false"),
    "a deep slip": (["generator={family: mlp, depth: 1000000}"], "generator.depth", "must be at most 64,", "give a"),
    "dcgan's resolution": (["generator={family: dcgan}", "data={resolution: [4, 24]}"], "data.resolution",
        "must be at least 8 with DCGAN, got [4, 24]", "=[8,24]"),
    "a resolution that does not double": (["generator={family: dcgan}", "data={resolution: [40, 60]}"],
        "data.resolution", "must be a multiple of 8 with DCGAN, got [40, 60] (feature maps", "=[40,64]"),
    "stylegan2's resolution, of cosines": (
        ["generator={family: stylegan2}", "data={resolution: 8, codec: {kind: dct}}"], "data.resolution",
        "must be at least 16 with StyleGAN2, got 8 (a pixel is 2 of the data's, as data", "data.resolution=16"),
    "biggan's resolution, of cosines": (["data={resolution: 24, codec: {kind: dct}}"], "data.resolution",
        "must be at least 32 with BigGAN, got 24", "data.resolution=32"),
    "a u-net's resolution": (["data={kind: synthetic_pairs, num_classes: 0, resolution: 12}", *PAIRS[1:]],
        "data.resolution", "must be 1 to 8 times one power of two from 8 to 256, got 12 (the U-Net", "=16"),
    "a u-net's sides": (["data={kind: synthetic_pairs, num_classes: 0, resolution: [256, 100]}", *PAIRS[1:]],
        "data.resolution", "must be 1 to 8 times one power of two from 8 to 256, got [256, 100]", "=[256,96]"),
    "no patch": ([*PAIRS[:2], "discriminator={family: pix2pix, depth: 6}", *PAIRS[3:]], "discriminator.depth",
        "must be at most 4 with images of 64x64, got 6", "discriminator.depth=4 or less"),
    "pairs against a reference": ([*PAIRS, "metrics={names: [fid100], every_nimg: 64, reference: x.npz}"],
        "metrics.reference", "'x.npz' needs a generator from latents", "remove it"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_go_together(name, tmp_path):
    check_refused(tmp_path, *CASES[name])


SLOPE = "objective.r1={weight: 1}"
UNMAPPED = ["data.num_classes=0", "generator={family: stylegan2, w_size: 8, latent_size: 8, mapping_layers: 0}"]

# A good recipe, an override that has no effect beside it, when that is, and the key's name if it says more.
WITHOUT_EFFECT = [
    ([], "generator.groups=4", "with block='standard'"),
    (["discriminator.block=grouped", "discriminator.groups=2"], "discriminator.expansion=2", "with block='grouped'"),
    (TINY_GAMES["dcgan_light"], "discriminator.groups=2", "with block='inverted_residual'"),
    (TINY_GAMES["biggan_unshared"], "generator.embedding_size=7", "with shared_embedding=false"),
    (TINY_GAMES["pix2pix"], "generator.num_blocks=3", "with architecture='unet'"),
    (TINY_GAMES["pix2pix_resnet"], "discriminator.depth=2", "with architecture='pixels'"),
    (["discriminator={family: stylegan2, mbstd_channels: 0}"], "discriminator.mbstd_group=2", "with mbstd_channels=0"),
    (STYLES, "generator.half_type=fp16", "with half_resolutions=0"),
    (UNMAPPED, "generator.mapping_lr_multiplier=1", "with mapping_layers=0"),
    (UNMAPPED, "generator.relu=[mapping]", "with mapping_layers=0", "generator.relu=[mapping]"),
    ([], "optimizer.generator.betas=[0.5,0.999]", "with kind='sgd'"),
    ([], "optimizer.generator={kind: rmsprop, lr: 1, betas: [0.5, 0.9]}", "with kind=rmsprop",
        "optimizer.generator.betas.0=0.5"),
    ([SLOPE], "objective.r1.sigma=0.1", "with form='exact'"),
    (["objective.adversarial.weight=0"], "objective.adversarial.from_nimg=9", "with weight=0.0"),
    (["augmentation={p: 0.1}"], "augmentation.ramp_nimg=9", "with target=null and final_p=null"),
    (["augmentation={p: 0.1, final_p: 0.2}"], "augmentation.interval=9", "with target=null"),
    (both_engines("accumulation=2"), "accumulation=4", "with accumulation of both engines"),
    (["metrics={names: [fid10k], every_nimg: 8}"], "metrics.num=100", "without metrics of your own code"),
    (["metrics={names: [a.b:c], every_nimg: 8}"], "metrics.features.resizer=antialiased",
        "without metrics that compare features"),
    (["metrics={names: [fid10k], every_nimg: 8}"], "metrics.features.weights=x", "with features digits"),
    (["metrics={names: [fid10k], every_nimg: 8, features: {network: 'torchvision:alexnet', weights: x}}"],
        "metrics.features.resizer=antialiased", "with features torchvision:alexnet"),
]  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_EFFECT, ids=lambda case: case[1])
def test_a_key_that_another_leaves_without_effect_is_named(case, tmp_path):
    overrides, last, when, *named = case
    assert unused_keys(plan_run(tiny_recipe(tmp_path, *overrides), 2)) == ""
    found = unused_keys(plan_run(tiny_recipe(tmp_path, *overrides, last), 2))
    assert found == f"no effect {when}: {named[0] if named else last.partition('=')[0]}"


# What ships, an override of one thing in it, and what that leaves without effect.
OF_SHIPPED = [
    ("stylegan2_256", ["discriminator.mbstd_channels=0"], "with mbstd_channels=0: discriminator.mbstd_group"),
    ("r3gan_ffhq64", ["augmentation.p=0.3", "augmentation.final_p=null"],
        "with target=null and final_p=null: augmentation.ramp_nimg"),
    ("sdvae_f8_imagenet256", ["objective.adversarial.weight=0"], "with weight=0.0: objective.adversarial.from_nimg"),
    ("cat_h_imagenet256", [f"optimizer.{network}.kind=sgd" for network in NETWORKS],
        "with kind='sgd': optimizer.generator.betas, optimizer.discriminator.betas"),
]  # fmt: skip


@pytest.mark.parametrize("name, overrides, named", OF_SHIPPED)
def test_an_override_of_what_ships_may_leave_keys_without_effect(name, overrides, named):
    assert unused_keys(plan_run(Recipe.read(name, *overrides), 1)) == f"no effect {named}"


OF_PIPELINES = ["pipeline={schedule: phases, generator_phase: recompute}", "engines.generator.partition=uniform"]
NAMED = [
    (OF_PIPELINES, "no effect without pipeline stages: pipeline.generator_phase, pipeline.schedule, "
        "engines.generator.partition"),
    ([*OF_PIPELINES, STAGES[1]], "no effect without generator stages: pipeline.generator_phase; "
        "no effect without pipeline stages: engines.generator.partition"),
    ([*OF_PIPELINES, *STAGES], ""),
    ([*TINY_GAMES["r3gan"], "data.num_classes=0", "engines.generator.ds_config=zero1_bf16", "generator.bf16_stages=1"],
        "no effect without classes: generator.embedding_size, discriminator.embedding_size; "
        "no effect without a float32 engine: generator.bf16_stages"),
    ([*STYLES, "data.num_classes=0"], "no effect without classes: discriminator.mapping_layers, "
        "discriminator.mapping_lr_multiplier"),
    (TINY_GAMES["dcgan"], ""),
]  # fmt: skip


@pytest.mark.parametrize("overrides, named", NAMED)
def test_a_key_without_effect_in_a_layout_or_without_classes_is_named(overrides, named, tmp_path, capsys):
    assert unused_keys(plan_run(tiny_recipe(tmp_path, *overrides), 2)) == named
    assert main(["train", "--config", str(tmp_path / "tiny.yaml"), "--print", "seed", *OF_PIPELINES]) == 0
    assert NAMED[0][1] in capsys.readouterr().err
