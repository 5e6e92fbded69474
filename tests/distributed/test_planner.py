"""What the planner predicts against what ranks hold, layout by layout."""

from __future__ import annotations

from collections import Counter
from functools import partial
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator
from torch.multiprocessing.reductions import StorageWeakRef

from bigsgan import plugins
from bigsgan.config import NETWORKS, both_engines
from bigsgan.models.build import network_on_meta
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each
from bigsgan.planner.states import build_states
from bigsgan.runtime.memory import pinned_bytes
from tests.distributed import allocations, scenarios
from tests.teachers import write_teacher
from tests.tiny import tiny_plan, zero

NUM_UPDATES = 5
"""After which ZeRO 3 gathers in the same order again, and the last of which has every lazy penalty."""

COMMON = [
    *(f"optimizer.{network}={{kind: adam, lr: 2e-4}}" for network in NETWORKS),
    "data={kind: synthetic, resolution: 32, image_channels: 3, num_classes: 10, num_images: 64}",
]
BIGGAN = [*COMMON, "generator.channels=16", "discriminator.channels=16", "batch=32"]
STYLEGAN2 = [
    *COMMON,
    "generator={family: stylegan2, channel_base: 2048, channel_max: 96, w_size: 96, latent_size: 96}",
    "discriminator={family: stylegan2, channel_base: 2048, channel_max: 96, mbstd_group: 4}",
    "objective={loss: non_saturating, path_length: {weight: 2, every: 2}, r1: {weight: 1, every: 2}}",
    "batch=32",
]
PERCEPTRONS = [  # convolutions in bf16 need more for themselves on a CPU than for their results
    *COMMON,
    "generator={family: mlp, latent_size: 64, width: 512, depth: 3}",
    "discriminator={family: mlp, width: 512, depth: 3}",
    "batch=256",
]
GAT = [
    *COMMON,
    "generator={family: gat, depth: 8, width: 128, heads: 4, patch: 4, levels: 4}",
    "discriminator={family: gat, depth: 8, width: 128, heads: 4, patch: 4, levels: 4, embedding_size: 256}",
    "objective={loss: relativistic, reuse_fakes: true, fake_labels: data, r1: {weight: 1}, r2: {weight: 1}}",
    "augmentation={kind: diffaugment, policy: [latent_color, translation, cutout, flip]}",
    "batch=32",
]
FLOW = [
    *("optimizer={generator: {kind: adam, lr: 2e-4}}", COMMON[-1].replace("resolution: 32", "resolution: 16")),
    "generator={family: dit, depth: 4, width: 128, heads: 4, latent_size: 768, times: true, steps: 4}",
    "discriminator={family: none}",
    "objective={flow: {}}",
    "batch=32",
]
CODES = [
    *COMMON[:-1],
    "data={kind: synthetic, resolution: 32, image_channels: 3, num_classes: 0, num_images: 64}",
    "generator={family: autoencoder, channels: 8, multipliers: [1, 2], num_blocks: 1, norm_groups: 4, "
    "latent_channels: 64, bottleneck: {kind: vq, num_codes: 2048, kmeans_steps: 3, ema: {revival: {}}}}",
    "discriminator={family: autoencoder, channels: 8, depth: 2}",
    "objective={l1: 1, codebook: {}, reuse_fakes: true}",
    "batch=32",
]
MUON = [  # few samples, so that states are more than activations
    *(text.replace("adam", "muon") for text in COMMON),
    "generator={family: gat, depth: 4, width: 160, heads: 4, patch: 8, levels: 2}",
    "discriminator={family: gat, depth: 4, width: 160, heads: 4, patch: 8, levels: 2, embedding_size: 64}",
    "objective={loss: relativistic, reuse_fakes: true, fake_labels: data}",
    "batch=4",
]
DEEP = [  # D's weights are many times those of a layer, and what its activations hold
    *COMMON,
    "generator={family: mlp, latent_size: 64, width: 128, depth: 2}",
    "discriminator={family: mlp, width: 512, depth: 16}",
    "batch=32",
]
MANY = ["batch=2048", "accumulation=8"]
RECOMPUTING = ["accumulation=2", *both_engines("activation_checkpointing=true")]
STAGES = [
    "accumulation=4",
    *both_engines("pipeline_stages=2", "partition=parameters"),
]
HOST = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}

FINITE = ["objective.r1={weight: 1, every: 2, form: finite_difference, antithetic: true}"]

LAYOUTS = {
    "BigGAN, ZeRO 0": (BIGGAN, zero(0)),
    "BigGAN, ZeRO 1": (BIGGAN, zero(1)),
    "BigGAN, ZeRO 2": (BIGGAN, zero(2)),
    "BigGAN, ZeRO 3": (BIGGAN, zero(3)),
    "BigGAN, ZeRO 1, accumulating and recomputing": (BIGGAN + RECOMPUTING, zero(1)),
    "BigGAN, ZeRO 3, accumulating and recomputing": (BIGGAN + RECOMPUTING, zero(3)),
    "BigGAN, ZeRO 1, exact R1": ([*BIGGAN, "objective.r1={weight: 1, every: 2}"], zero(1)),
    "BigGAN, ZeRO 3, exact R1": ([*BIGGAN, "objective.r1={weight: 1, every: 2}"], zero(3)),
    "BigGAN, 2 stages, exact R1": ([*BIGGAN, *STAGES, "objective.r1={weight: 1, every: 2}"], zero(1)),
    "BigGAN, 2 stages, finite differences": ([*BIGGAN, *STAGES, *FINITE], zero(1)),
    "perceptrons, ZeRO 3, exact R1": ([*PERCEPTRONS, "objective.r1={weight: 1, every: 2}"], zero(3)),
    "perceptrons, ZeRO 3, exact R1 by a double backward": (
        [*PERCEPTRONS, "objective.r1={weight: 1, every: 2, method: double_backward}"],
        zero(3),
    ),
    "BigGAN, ZeRO 2, reused fakes": ([*BIGGAN, "objective={reuse_fakes: true, d_steps: 2}"], zero(2)),
    "BigGAN, ZeRO 3, reused fakes made again": (
        [*BIGGAN, *RECOMPUTING, "objective.reuse_fakes=true"],
        zero(3),
    ),
    "BigGAN, 2 stages, reused fakes": ([*BIGGAN, *STAGES, "objective.reuse_fakes=true"], zero(1)),
    "BigGAN, 2 stages": (BIGGAN + STAGES, zero(1)),
    "BigGAN, each network on a rank, overlapped": (
        [*BIGGAN, "engines.generator.ranks=1", "objective.schedule=overlapped"],
        zero(1),
    ),
    "perceptrons, each network on a rank, overlapped, 4 steps of D": (  # a third of what D's rank holds is kept images
        [*PERCEPTRONS, "engines.generator.ranks=1", "objective={schedule: overlapped, d_steps: 4}"],
        zero(1),
    ),
    "perceptrons, each network on a rank, reused fakes": (  # a fifth of what D's rank holds it reads again
        [*PERCEPTRONS[:-1], *MANY, "engines.generator.ranks=1", "objective.reuse_fakes=true"],
        zero(1),
    ),
    "perceptrons, each network on a rank, ZeRO 3, exact R1": (
        [*PERCEPTRONS[:-1], *MANY, "engines.generator.ranks=1", "objective.r1={weight: 1, method: forward_mode}"],
        zero(3),
    ),
    "BigGAN, each network on a rank, accumulating and recomputing": (
        [*BIGGAN, *RECOMPUTING, "engines.generator.ranks=1"],
        zero(3),
    ),
    "GAT, ZeRO 1, exact R1 and R2": (GAT, zero(1)),
    "GAT, ZeRO 3, exact R1 and R2, recomputing": ([*GAT, *RECOMPUTING], zero(3)),
    "GAT, 2 stages, exact R1 and R2": ([*GAT, *STAGES], zero(1)),
    "StyleGAN2, ZeRO 2, R1 and path length": (STYLEGAN2, zero(2)),
    "StyleGAN2, ZeRO 3, R1 and path length": (STYLEGAN2, zero(3)),
    "StyleGAN2, 2 stages, R1 and path length": ([*STYLEGAN2, *STAGES], zero(1)),
    "autoencoder with averaged codes, ZeRO 1": (CODES, zero(1)),
    "flow, ZeRO 1": (FLOW, zero(1)),
    "flow, ZeRO 3, recomputing": (
        [*FLOW, "accumulation=2", "engines.generator.activation_checkpointing=true"],
        zero(3),
    ),
    "flow, 2 stages": ([*FLOW, "engines.generator.pipeline_stages=2"], zero(1)),
    "perceptrons, ZeRO 0 in bf16": (PERCEPTRONS, zero(0, **BF16)),
    "perceptrons, ZeRO 2 in bf16": (PERCEPTRONS, zero(2, **BF16)),
    "perceptrons, ZeRO 3 in bf16": (PERCEPTRONS, zero(3, **BF16)),
    "perceptrons, ZeRO 1, optimizer on the host": (PERCEPTRONS, zero(1, zero=HOST)),
    "perceptrons, ZeRO 2 in bf16, optimizer on the host": (PERCEPTRONS, zero(2, zero=HOST, **BF16)),
    "perceptrons, ZeRO 3 in bf16, optimizer on the host": (PERCEPTRONS, zero(3, zero=HOST, **BF16)),
    "deep perceptrons, ZeRO 3, parameters and optimizer on the host, exact R1": (
        [*DEEP, "objective.r1={weight: 1, every: 2}"],
        zero(3, zero={**HOST, "offload_param": {"device": "cpu"}}),
    ),
    "perceptrons, ZeRO 2 in bf16, two more averages": (
        [*PERCEPTRONS, "ema.power={snapshot_nimg: 99}"],
        zero(2, **BF16),
    ),
    "perceptrons, ZeRO 2 in bf16, D's optimizer on the host": (
        PERCEPTRONS,
        {"generator": zero(2, **BF16), "discriminator": zero(2, zero=HOST, **BF16)},
    ),
    "BigGAN, ZeRO 3, parameters and optimizer on the host": (
        BIGGAN,
        zero(3, zero={**HOST, "offload_param": {"device": "cpu"}}),
    ),
}
IN_CI = (
    "BigGAN, ZeRO 3, exact R1",
    "BigGAN, 2 stages, exact R1",
    "StyleGAN2, ZeRO 2, R1 and path length",
    "perceptrons, ZeRO 3, exact R1",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly) for name in LAYOUTS]
)
def test_the_peak_is_predicted(ranks, tmp_path, name):
    samples, by_rank = check(ranks, tmp_path, name, *LAYOUTS[name])
    assert samples == pytest.approx(max(found["samples"] for found in by_rank), rel=0.12)


WITH_MUON = {
    "ZeRO 0": zero(0),
    "ZeRO 0 in bf16": zero(0, **BF16),
    "ZeRO 2": zero(2),
    "ZeRO 2 in bf16, optimizer on the host": zero(2, zero=HOST, **BF16),
    "ZeRO 3": zero(3),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITH_MUON)
def test_the_peak_with_muon_is_predicted(ranks, tmp_path, name):
    check(ranks, tmp_path, f"GAT with Muon, {name}", MUON, WITH_MUON[name])


def contrast(images):
    """A term of images."""
    return images.square().mean()


@pytest.mark.nightly
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_peak_with_an_adaptive_weight_is_predicted(ranks, tmp_path, accumulation):
    """With one micro-batch G keeps its graph while D trains; with two, that from the last layer until it is weighed."""
    for give in (plugins.give, partial(ranks(2).run, plugins.give)):
        give([f"{__name__}:contrast"])
    adaptive = f"terms: [{{use: '{__name__}:contrast'}}], adversarial: {{adaptive: {{parameter: 5.conv.weight}}}}"
    game = [*BIGGAN, f"objective={{reuse_fakes: true, {adaptive}}}", f"accumulation={accumulation}"]
    check(ranks, tmp_path, f"BigGAN, ZeRO 2, an adaptive weight, {accumulation} micro-batches", game, zero(2))


def taught(family):
    levels = "depth: 4, width: 64, heads: 4, patch: 4, levels: 4"
    return [
        *COMMON,
        f"generator={{family: {family}, {levels}}}",
        f"discriminator={{family: {family}, {levels}, embedding_size: 64}}",
        "batch=32",
        "objective={loss: relativistic, reuse_fakes: true, fake_labels: data}",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family, name, more",
    [
        ("gat", "ZeRO 1", []),
        ("gat", "2 stages", STAGES),
        ("gat", "ZeRO 1, recomputing", RECOMPUTING),
        ("cat", "2 stages", STAGES),
        ("cat", "ZeRO 1, recomputing", RECOMPUTING),
    ],
)
def test_the_peak_with_a_teacher_is_predicted(ranks, tmp_path, family, name, more):
    """Whose heads hold as much as the other layers of D, and whose program is as large as both networks."""
    teacher = write_teacher(tmp_path / "t.pt", 768, 112)[0].replace("hidden: 10", "hidden: 2048")
    check(ranks, tmp_path, f"{family.upper()} with a teacher, {name}", [*taught(family), *more, teacher], zero(1))


@pytest.mark.slow
def test_the_peak_of_the_first_update_is_predicted(ranks, tmp_path):
    """Its end, where codes begin with the centres of k-means."""
    overrides, ds = CODES, dict.fromkeys(NETWORKS, zero(1))
    measured = max(found["update"] for found in ranks(2).run(allocations.peaks, overrides, ds, 1))
    prediction = max(predict_each(tiny_plan(tmp_path, 2, overrides, ds), Traces()), key=lambda each: each.peak)
    print(f"| codes, ZeRO 1, the first update | {prediction.peak / 1e6:.1f} | {measured / 1e6:.1f} |")
    assert prediction.peak == prediction.stays + prediction.begins > 1.3 * prediction.updating
    assert prediction.peak == pytest.approx(measured, rel=0.05)


def check(ranks, tmp_path, name, overrides, content):
    ds = content if "generator" in content else dict.fromkeys(NETWORKS, content)
    by_rank = ranks(2).run(allocations.peaks, overrides, ds, NUM_UPDATES)
    measured = max(found["update"] for found in by_rank)
    predictions = predict_each(tiny_plan(tmp_path, 2, overrides, ds), Traces())
    # Here the device's memory is the host's.
    hosts = [sum(prediction.host.values()) for prediction in predictions]
    update = max(each.updating + host for each, host in zip(predictions, hosts, strict=True))
    scratch = max(found["scratch"] for found in by_rank)
    print(f"| {name} | {update / 1e6:.1f} | {measured / 1e6:.1f} | {update / measured:.3f} | {scratch / 1e6:.1f} |")
    assert update == pytest.approx(measured, rel=0.1)
    return max(each.stays + each.samples.total + host for each, host in zip(predictions, hosts, strict=True)), by_rank


def pins(overrides, ds):
    """Bytes of each tensor that DeepSpeed pins on this rank: of those that stay, and of those that are soon gone."""
    tensors = []

    def pin(tensor):
        pinned = tensor.clone()
        tensors.append((pinned.nbytes, StorageWeakRef(pinned.untyped_storage())))
        return pinned

    with mock.patch.object(get_accelerator(), "pin_memory", pin):
        run = scenarios.build(overrides, ds)
        scenarios.update(run, 1)
    stays, gone = ([size for size, place in tensors if place.expired() == expired] for expired in (False, True))
    scenarios.destroy(run)
    return stays, gone


ON_HOST = {
    "ZeRO 1": (1, HOST, {}),
    "ZeRO 2 of G, accumulating in bf16": (2, HOST, BF16),
    "ZeRO 3 in bf16": (3, {**HOST, "offload_param": {"device": "cpu"}, "sub_group_size": 5000}, BF16),
    "ZeRO 3, parameters": (3, {"offload_param": {"device": "cpu", "pin_memory": False}}, {}),
    "ZeRO 2, not pinned": (2, {"offload_optimizer": {"device": "cpu", "pin_memory": False}}, BF16),
}
PINNED_IN_CI = {"ZeRO 2 of G, accumulating in bf16", "ZeRO 3 in bf16"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in PINNED_IN_CI else pytest.mark.nightly) for name in ON_HOST],
)
def test_what_deepspeed_pins_is_predicted(ranks, tmp_path, name):
    """By the rank whose blocks are largest; on a CPU DeepSpeed asks for pinned memory too, and gets none."""
    stage, section, content = ON_HOST[name]
    ds = dict.fromkeys(NETWORKS, zero(stage, zero=section, **content))
    if "of G" in name:  # the ranks with the largest blocks of gradients of G and of D are not the same
        ds["discriminator"] = zero(stage, **content)
    overrides = ["accumulation=2"] if "accumulating" in name else []
    plan = tiny_plan(tmp_path, 2, overrides, ds)
    sizes = {n: [p.numel() for p in network_on_meta(plan.recipe, n).parameters()] for n in NETWORKS}
    states = [build_states(plan, n, sizes[n]) for n in NETWORKS]
    by_rank = ranks(2).run(pins, overrides, ds)
    found = max(sum(pinned_bytes(size) - size for size in stays) for stays, _ in by_rank)
    assert found == sum(own.spare for own in states)
    for _, gone in by_rank:
        assert Counter(pinned_bytes(size) for size in gone) == states[0].built + states[1].built
