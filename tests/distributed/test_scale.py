"""The recipe of a billion parameters in each network, at reduced resolution: what ranks hold, and what they compute."""

import ctypes
import gc
import json
from pathlib import Path

import pytest
import torch

from bigsgan.config import NETWORKS, load_recipe
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.models.build import build_network
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import SAME, SEEDS
from tests.tiny import zero

RECIPE = REPOSITORY / "launch" / "recipes" / "biggan_xl_1b.yaml"
OFFLOAD = json.loads((REPOSITORY / "ds_configs" / "zero3_offload.json").read_text())["zero_optimization"]
REDUCED = [
    "data={kind: synthetic, resolution: 64, image_channels: 3, num_classes: 1000, num_images: 64}",
    "generator.attention=[32]",
    "discriminator.attention=[32]",
]
BILLION = 1e9


def numel(overrides):
    """Parameters of each network."""
    recipe = load_recipe(RECIPE, overrides)
    with torch.device("meta"):
        return {n: sum(p.numel() for p in build_network(recipe, n).parameters()) for n in NETWORKS}


def offloaded(sizes):
    """ds_configs/zero3_offload.json in float32, its limits in the proportion that they have to a billion parameters."""
    found = {}
    for network, size in sizes.items():
        limits = {"stage3_prefetch_bucket_size": 5e7, "reduce_bucket_size": 5e7, **OFFLOAD}
        scaled = {k: int(v / BILLION * size) // 2 * 2 for k, v in limits.items() if isinstance(v, float | int)}
        found[network] = zero(3, zero={**OFFLOAD, **scaled, "stage": 3, "stage3_param_persistence_threshold": 0})
    return found


def resident(key):
    """Bytes of this process that are in memory (VmRSS), or the most that were since the mark was reset (VmHWM)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def settle():
    """Give back what is free, and reset the high-water mark."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def host_bytes(run):
    """What a GPU's rank would hold in the host's memory: shards of weights, masters, gradients, moments, average."""
    tensors = list(run.average.shards)
    for network in NETWORKS:
        engine = getattr(run.step, network)
        optimizer = engine._engine.optimizer
        for shard in engine.shards():
            tensors += [shard.master, *(v for v in shard.optimizer_state.values() if torch.is_tensor(v))]
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            tensors += [m.grad for m in optimizer.fp32_partitioned_groups_flat if m.grad is not None]
            tensors += [p.ds_tensor for p in engine.network.parameters()]
            tensors.append(optimizer.grad_partitions_flat_buffer)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory(overrides, ds):
    """Bytes that a run adds to this process: at rest, and at the peak of an update; and those of the host's part."""
    settle()
    before = resident("VmRSS")
    run = scenarios.build(overrides, ds, recipe=RECIPE)
    scenarios.update(run, 1)  # makes the optimizers' state
    settle()
    found = {"rest": resident("VmRSS") - before, "host": host_bytes(run)}
    scenarios.update(run, 1)
    found["peak"] = resident("VmHWM") - before
    scenarios.destroy(run)
    return found


def report(name, by_rank, full):
    for rank, found in enumerate(by_rank):
        sizes = ", ".join(f"{key} {size / 2**20:.0f} MiB" for key, size in found.items())
        print(f"{name}, rank {rank}: {sizes}; all parameters {full / 2**20:.0f} MiB")


@pytest.mark.slow
def test_no_rank_needs_room_for_all_parameters(ranks):
    """Beside what is offloaded, which lies in the same memory here, a rank holds less than the networks' parameters.

    At stage 2, where they are whole on each, it holds more.
    """
    options = [*REDUCED, "generator.width=0.4", "discriminator.width=0.35", "batch=2", "accumulation=1"]
    options.append("objective.d_steps=1")
    sizes = numel(options)
    full = 4 * sum(sizes.values())
    sharded = ranks(2).run(memory, options, offloaded(sizes))
    report("stage 3", sharded, full)
    whole = dict.fromkeys(NETWORKS, zero(2, zero={"offload_optimizer": {"device": "cpu"}}))
    replicated = ranks(2).run(memory, options, whole)
    report("stage 2", replicated, full)
    for found in sharded:
        assert 0.9 * found["host"] < found["rest"]
        assert found["peak"] - found["host"] < full
    for found in replicated:
        assert found["peak"] - found["host"] > full


@pytest.mark.slow
def test_its_narrow_twin_equals_stage_2(ranks):
    options = [*REDUCED, "generator.width=0.02", "discriminator.width=0.02", "batch=4", "accumulation=2"]
    options += ["optimizer.generator={kind: sgd, lr: 0.01}", "optimizer.discriminator={kind: sgd, lr: 0.01}"]
    options += ["ema={half_life_nimg: 8}"]
    stage_2 = dict.fromkeys(NETWORKS, zero(2))
    found = []
    for seed in SEEDS:
        states = [
            scenarios.merge(ranks(2).run(scenarios.train, [*options, f"seed={seed}"], ds, 3, RECIPE))
            for ds in (offloaded(numel(options)), stage_2)
        ]
        found.append(reference.worst(*states))
        print(f"seed {seed}: worst {found[-1][0]:.2e} {found[-1][1]}")
        if found[-1][0] <= SAME:
            return
    raise AssertionError(f"differs with every seed: {found}")
