"""Recipes of a billion parameters, at reduced resolution: what ranks hold, and what they compute."""

import json
import time
from contextlib import closing
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from bigsgan.bench.host import HostPeak
from bigsgan.config import NETWORKS, load_recipe
from bigsgan.engines.deepspeed import internals
from bigsgan.models.build import build_network
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict
from tests import REPOSITORY
from tests.distributed import allocations, scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.pool import RankPool
from tests.tiny import tiny_plan, zero

RECIPE = REPOSITORY / "launch" / "recipes" / "biggan_xl_1b.yaml"
REDUCED = [
    "data={kind: synthetic, resolution: 64, image_channels: 3, num_classes: 1000, num_images: 64}",
    "generator.attention=[32]",
    "discriminator.attention=[32]",
]
GAT_XL = REPOSITORY / "launch" / "recipes" / "gat_xl_imagenet256.yaml"
GAT_REDUCED = [  # images as large as the latents, an image on each rank at a time
    "data={kind: synthetic, resolution: 32, image_channels: 3, num_classes: 1000, num_images: 64}",
    "batch=2",
]
BILLION = 1e9


def numel(overrides, path=RECIPE):
    """Parameters of each network."""
    recipe = load_recipe(path, overrides)
    with torch.device("meta"):
        return {n: sum(p.numel() for p in build_network(recipe, n).parameters()) for n in NETWORKS}


def offloaded(sizes, name="zero3_offload", optimizer=(), **options):
    """A file of ds_configs/ in float32, its limits in the proportion that they have to a billion parameters."""
    section = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())["zero_optimization"]
    section["offload_optimizer"].update(optimizer)
    limits = {key: section[key] for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance")}
    limits |= dict.fromkeys(("stage3_prefetch_bucket_size", "reduce_bucket_size", "sub_group_size"), 50_000_000)
    return {
        network: zero(3, zero=section | {k: int(v / BILLION * size) // 2 * 2 for k, v in limits.items()}, **options)
        for network, size in sizes.items()
    }


def host_bytes(run):
    """What a GPU's rank would hold in the host's memory: shards of weights, masters, gradients, moments, EMA.

    But for the buffers through which a drive is read, which are not torch's.
    """
    tensors = list(run.ema.shards)
    for network in NETWORKS:
        engine = getattr(run.step, network)
        optimizer = engine._engine.optimizer
        assert bool(engine.outcomes.last)
        for master in internals.keys(engine._engine):  # not ``shards``, which may be files on a drive
            state = engine._engine.basic_optimizer.state.get(master, {}).values()
            tensors += [master, *(value for value in state if torch.is_tensor(value))]
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            tensors += [m.grad for m in optimizer.fp32_partitioned_groups_flat if m.grad is not None]
            tensors += [p.ds_tensor for p in engine.network.parameters()]
            tensors.append(optimizer.grad_partitions_flat_buffer)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held(overrides, ds, num_updates=2):
    """Most bytes of this rank's tensors in an update beside those that a GPU's rank would have on the host."""
    found = allocations.peaks(overrides, ds, num_updates, RECIPE, host_bytes)
    return found["update"] - found["inspected"]


def billion(overrides, ds):
    """The same on a CPU that may lack bf16 arithmetic, in minutes: convolutions in float32, no QR decompositions."""

    def convolve(x, weight, bias=None, *rest, **options):
        return exact(x.float(), weight.float(), None if bias is None else bias.float(), *rest, **options).to(x.dtype)

    def draw(tensor, generator):
        return tensor.normal_(0, max(len(tensor), tensor[0].numel()) ** -0.5, generator=generator)

    exact = F.conv2d
    with mock.patch.object(F, "conv2d", convolve), mock.patch.object(torch.nn.init, "orthogonal_", draw):
        return held(overrides, ds, 1)


def step(overrides, ds):
    """Most bytes in an update of this rank's tensors, and of its process beyond those before; and its seconds."""
    update, seconds = scenarios.update, []

    def timed(run, num):
        start = time.perf_counter()
        update(run, num)
        seconds.append(time.perf_counter() - start)

    def applied(run):
        return all(bool(getattr(run.step, network).outcomes.last) for network in NETWORKS)

    with closing(HostPeak()) as host, mock.patch.object(scenarios, "update", timed):
        found = allocations.peaks(overrides, ds, 1, GAT_XL, applied)
        assert found["inspected"]
        return found["update"], host.peak() - host.before, *seconds


@pytest.mark.slow
def test_no_rank_needs_room_for_all_parameters(ranks):
    """Beside what is offloaded, which lies in the same memory here, a rank holds less than the networks' parameters.

    At ZeRO 2, where they are whole on each, it holds more.
    """
    options = [*REDUCED, "generator.width=0.4", "discriminator.width=0.35", "batch=2", "accumulation=1"]
    options.append("objective.d_steps=1")
    sizes = numel(options)
    full = 4 * sum(sizes.values())
    sharded = ranks(2).run(held, options, offloaded(sizes))
    replicated = ranks(2).run(held, options, dict.fromkeys(NETWORKS, zero(2)))
    print(f"ZeRO 3, offloaded {sharded}, ZeRO 2 {replicated}, all parameters {full} bytes")
    assert max(sharded) < full
    assert min(replicated) > full


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_billion_parameters_take_a_step(async_io, tmp_path):
    """The same with a billion in both networks together, in bf16 with the masters on a drive: 13 GiB in all."""
    options = [*REDUCED, "generator.width=1.62", "discriminator.width=1.4", "batch=2", "accumulation=1"]
    options += ["objective.d_steps=1", "objective.orthogonal.generator=0", *(f"{n}.depth=4" for n in NETWORKS)]
    options += [f"optimizer.{network}={{kind: sgd, lr: 1e-4}}" for network in NETWORKS]
    sizes = numel(options)
    assert sum(sizes.values()) > BILLION
    pool = RankPool(2)
    ds = offloaded(sizes, "zero3_nvme", {"nvme_path": str(tmp_path)}, bf16={"enabled": True})
    try:
        by_rank = pool.run(billion, options, ds, timeout=3000)
    finally:
        pool.stop()
    full = 4 * sum(sizes.values())
    print(f"ZeRO 3, on a drive and offloaded {by_rank}, all parameters {full} bytes")
    assert max(by_rank) < full


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_gat_of_a_billion_parameters_takes_a_step(async_io, tmp_path):
    """GAT-XL with the game and the optimizers of its recipe: parameters in bf16 on the host, all else on a drive."""
    sizes = numel(GAT_REDUCED, GAT_XL)
    assert sum(sizes.values()) > BILLION
    ds = offloaded(sizes, "zero3_nvme", {"nvme_path": str(tmp_path)}, bf16={"enabled": True})
    pool = RankPool(2)
    try:
        by_rank = pool.run(step, GAT_REDUCED, ds, timeout=3000)
    finally:
        pool.stop()
    prediction = predict(tiny_plan(tmp_path, 2, GAT_REDUCED, ds, GAT_XL), Traces())
    expected = prediction.stays + sum(prediction.host.values()) + max(p.total for p in prediction.update.values())
    print(f"parameters {sizes}; tensors, process, seconds by rank {by_rank}; predicted {expected}: {prediction.host}")
    assert max(found[0] for found in by_rank) == pytest.approx(expected, rel=0.1)


@pytest.mark.nightly
def test_its_narrow_twin_agrees_with_the_reference(ranks):
    options = [*REDUCED, "generator.width=0.02", "discriminator.width=0.02", "batch=4", "accumulation=2"]
    options += ["optimizer.generator={kind: sgd, lr: 0.01}", "optimizer.discriminator={kind: sgd, lr: 0.01}"]
    options += ["ema={half_life_nimg: 8}"]
    check_updates(ranks(2), options, offloaded(numel(options)), 3, RECIPE)
