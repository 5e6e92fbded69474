"""Where ranks' parts of flat groups begin: at a multiple of 16 bytes, as NCCL's fast kernels ask for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import align_dense_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from bigsgan import checkpoint
from bigsgan.config import NETWORKS
from bigsgan.engines import initialization
from bigsgan.engines.deepspeed import collectives
from bigsgan.engines.parameter_groups import grouped
from bigsgan.models.build import build_network
from bigsgan.planner.states import _cut_line
from tests.distributed import scenarios
from tests.tiny import TINY_GAMES, tiny_recipe, zero

BYTES = 16
BF16 = {"bf16": {"enabled": True}}
SMALL = {"reduce_bucket_size": 300, "allgather_bucket_size": 302}
FILES = {
    "1-bf16": zero(1, zero=SMALL, **BF16),
    "1-bf16-fp32-accumulation": zero(1, zero=SMALL, **BF16, data_types={"grad_accum_dtype": "fp32"}),
    "2": zero(2, zero=SMALL),
    "2-fp16": zero(2, zero=SMALL, fp16={"enabled": True, "initial_scale_power": 8}),
}


@pytest.mark.parametrize("family", ["biggan", *TINY_GAMES])
def test_parts_of_every_family_are_aligned_on_any_number_of_ranks(family, tmp_path):
    collectives.align_parts(True)
    recipe = tiny_recipe(tmp_path, *TINY_GAMES.get(family, []))
    for network in NETWORKS:
        with torch.device("meta"):
            parameters = list(build_network(recipe, network).parameters())
        for group in grouped(parameters, 300):
            for num_ranks in range(1, 17):
                for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
                    optimizer = object.__new__(kind)
                    optimizer.nccl_start_alignment_factor = 2  # as its constructor does
                    padded = align_dense_tensors(list(group), optimizer.nccl_start_alignment_factor * num_ranks)
                    whole = sum(tensor.numel() for tensor in padded)
                    assert whole % num_ranks == 0
                    assert whole // num_ranks * torch.bfloat16.itemsize % BYTES == 0
                    sizes = [parameter.numel() for parameter in group]
                    assert _cut_line(sizes, num_ranks)[0] * num_ranks == whole


def beginnings(ds: dict[str, Any]) -> dict[str, list[int]]:
    """Addresses of all ranks' parts of the weights, relative to 16 bytes, and of what the ranks get."""
    run = scenarios.build([], {"generator": ds, "discriminator": ds})
    scenarios.update(run, 1)
    found = {}
    for network in NETWORKS:
        optimizer = getattr(run.step, network)._engine.optimizer
        groups = getattr(optimizer, "parallel_partitioned_bit16_groups", None) or optimizer.bf16_partitioned_groups
        found[network] = [part.data_ptr() % BYTES for group in groups for part in group]
    scenarios.destroy(run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_an_engines_parts_begin_at_multiples_of_16_bytes(ranks, name):
    for found in ranks(2).run(beginnings, FILES[name]):
        for network in NETWORKS:
            assert len(found[network]) > 4
            assert not any(found[network]), found


def parts_of_before(ds: dict[str, Any], directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run saves whose parts are aligned to 4 bytes, as they were, and what one of now has from it."""
    both = dict.fromkeys(NETWORKS, ds)
    with ExitStack() as before:
        before.enter_context(mock.patch.object(initialization, "align_parts", return_value=None))
        for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            before.enter_context(mock.patch.object(kind, "nccl_start_alignment_factor", 2, create=True))
        run = scenarios.build([], both)
        scenarios.update(run, 2)
    scenarios.save(run, Path(directory))
    saved, sizes = scenarios.saved_parts(run), [len(shard.master) for shard in run.step.generator.shards()]
    scenarios.destroy(run)
    run = scenarios.build([], both, checkpoint.newest(Path(directory)))
    assert sizes != [len(shard.master) for shard in run.step.generator.shards()], "there is nothing to see"
    found = scenarios.saved_parts(run)
    scenarios.update(run, 1)
    scenarios.destroy(run)
    return saved, found


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_checkpoints_of_before_load(ranks, name, tmp_path):
    by_rank = ranks(2).run(parts_of_before, FILES[name], str(tmp_path))
    saved, found = (scenarios.whole_values(list(each)) for each in zip(*by_rank, strict=True))
    assert saved.keys() == found.keys()
    assert all(np.array_equal(found[name], saved[name]) for name in saved)
