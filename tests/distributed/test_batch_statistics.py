"""`batch_statistics: host`: every host's part of a micro-batch is normalized by itself, in messages of its ranks."""

import importlib
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from bigsgan.bench import comm as bench_comm
from bigsgan.bench.variants import VARIANTS, Planned
from bigsgan.config import load_recipe, plan_run
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.runtime import comm
from tests import REPOSITORY
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.tiny import TINY_GAMES, both, stages, tiny_plan

HOST = "batch_statistics=host"


def on_hosts(per_host, module, name, *arguments):
    """Call a function as ranks on hosts of so many ranks."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_host)):
        return getattr(importlib.import_module(module), name)(*arguments)


class Hosts:
    """A pool whose ranks are on hosts of so many ranks."""

    def __init__(self, pool, per_host):
        self.pool, self.per_host = pool, per_host

    def run(self, function, *arguments):
        return self.pool.run(on_hosts, self.per_host, function.__module__, function.__qualname__, *arguments)


def of_two_hosts(norm, x, shift=None):
    """Batch norm as torch has it, of each half of a batch; running statistics become the mean of the two."""
    moved, halves = [], []
    for half in x.chunk(2):
        running = norm.running_mean.clone(), norm.running_var.clone()
        halves.append(F.batch_norm(half, *running, training=True, momentum=norm.momentum, eps=norm.eps))
        moved.append(running)
    if norm.moving:
        for buffer, values in zip((norm.running_mean, norm.running_var), zip(*moved, strict=True), strict=True):
            buffer.copy_(torch.stack(values).mean(0))
    return torch.cat(halves)


LAYOUTS = {  # ranks, ranks on each host, overrides, ZeRO stage
    "2 hosts": (2, 1, ["accumulation=2", "objective.d_steps=2"], 0),
    "2 hosts of 2": (4, 2, ["accumulation=2"], 2),
    "stages": (4, 1, ["accumulation=2", *stages(2, 2)], 1),
    "ranks of their own": (4, 1, ["engines.generator.ranks=2"], 1),
}


@pytest.mark.parametrize(
    "game, layout",
    [
        ("dcgan", "2 hosts"),
        *(pytest.param("biggan_deep", layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_hosts_normalize_their_parts_alone(ranks, game, layout):
    """Buffers of all ranks have the same bits, or their states could not be merged."""
    num, per_host, options, stage = LAYOUTS[layout]
    with mock.patch.object(BatchStatistics, "forward", of_two_hosts):
        check_updates(Hosts(ranks(num), per_host), [*TINY_GAMES[game], HOST, *options], both(stage), 3)


def messages(*overrides):
    """Calls and bytes of all-reduces of an update of the tiny BigGAN on this rank, by phase, and a run's layout."""
    plan = tiny_plan(Path(tempfile.mkdtemp()), comm.world_size(), overrides, both(0))
    found = bench_comm.count(Planned(VARIANTS["zero0"], plan))
    run = scenarios.build([*overrides], both(0))
    scenarios.destroy(run)
    return {each["phase"]: (each["calls"], each["bytes"]) for each in found["collectives"]}, run.layout


@pytest.mark.slow
def test_statistics_leave_a_host_once_an_update(ranks):
    (apart, layout), _ = Hosts(ranks(2), 1).run(messages, HOST)
    (found, usual), _ = ranks(2).run(messages)
    (together, one_host), _ = ranks(2).run(messages, HOST)
    channels = 4 * 40  # bytes of a number of each channel of the five norms
    gradients, backward = apart["G pulls back: backward"], "G pulls back: backward"
    assert apart.pop("G pulls back: step") == (1, 2 * channels)  # running means and variances
    norms = {"G makes images": (5, 3 * channels), "G makes images, graphs kept": (5, 3 * channels)}
    assert found == apart | norms | {backward: (gradients[0] + 5, gradients[1] + 3 * channels)}
    assert together == found
    recomputing, *_ = ranks(2).run(messages, "engines.generator.activation_checkpointing=true")
    assert recomputing[0] == found  # a recomputation knows the statistics
    assert layout == usual | {"generator.ranks_of_statistics": [1]}  # a run that resumes says what has changed
    assert one_host == usual


NARROW = [
    "batch=4", "generator.channels=8", "discriminator.channels=8",
    "data={kind: synthetic, resolution: 128, image_channels: 3, num_classes: 10, num_images: 64}",
]  # fmt: skip


def small_messages(*overrides):
    """Calls of small messages of an update of BigGAN-128 with few channels, and of all, by phase."""
    path = REPOSITORY / "launch" / "recipes" / "biggan128_imagenet.yaml"
    recipe = load_recipe(path, [*NARROW, *overrides, f"out={tempfile.mkdtemp()}"])
    found = bench_comm.count(Planned(VARIANTS["zero1"], plan_run(recipe, comm.world_size(), path.parent)))
    calls = {(each["phase"], each["collective"]): each["calls"] for each in found["collectives"]}
    return {phase: num for (phase, collective), num in calls.items() if collective == "all-reduce"}, sum(calls.values())


@pytest.mark.slow
def test_messages_of_an_update_of_biggan_128(ranks):
    """All-reduces are the small ones: of three passes of G and one backward, 11 norms each, and norms of gradients."""
    (usual, num), _ = ranks(2).run(small_messages)
    norms = {"D trains: step": 2, "G pulls back: step": 1}
    passes = {"G makes images": 22, "G makes images, graphs kept": 11, "G pulls back: backward": 11}
    assert usual == passes | norms
    assert sum(usual.values()) == 47
    (apart, fewer), _ = Hosts(ranks(2), 1).run(small_messages, HOST)
    assert apart == norms | {"G pulls back: step": 2}
    assert num - fewer == 43
