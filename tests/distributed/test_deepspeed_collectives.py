"""Gradients that are scattered: the sums are those of DeepSpeed's all-reduce, with fewer bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.tiny import zero

ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]


def trained(overrides, ds):
    """Parameters after two updates, and which collectives reduced the gradients."""
    names = ("all_reduce", "reduce", "reduce_scatter_tensor")
    with pytest.MonkeyPatch.context() as patch:
        calls = dict.fromkeys(names, 0)
        for name in names:
            patch.setattr(dist, name, _counting(getattr(dist, name), name, calls))
        return scenarios.train(overrides, ds, 2), calls


def _counting(collective, name, calls):
    def call(*arguments, **options):
        calls[name] += max((t.numel() for t in arguments if torch.is_tensor(t)), default=0) > 100
        return collective(*arguments, **options)

    return call


BF16 = {"bf16": {"enabled": True}}
ACCUMULATING = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}  # at stage 1 another optimizer would do that


@pytest.mark.parametrize(
    "stage, precision",
    [(1, {}), (2, {}), (1, BF16), (2, BF16), (2, ACCUMULATING)],
    ids=["1", "2", "1-bf16", "2-bf16", "2-bf16-accumulating"],
)
@pytest.mark.parametrize("bucket", [None, 300])  # some parameters are larger than that
def test_scattered_gradients_are_the_reduced_ones(ranks, stage, bucket, precision):
    """Bit for bit: a sum of two terms has no order. Small buckets hold gradients of one rank or both."""
    zero_section = {} if bucket is None else {"reduce_bucket_size": bucket}
    states, calls = [], []
    for stock in ({}, {"use_multi_rank_bucket_allreduce": True}):
        ds = dict.fromkeys(NETWORKS, zero(stage, zero={**zero_section, **stock}, **precision))
        results = ranks(2).run(trained, [*ADAM, "accumulation=2"], ds)
        states.append(scenarios.merge([state for state, _ in results]))
        calls.append(results[0][1])
    assert max(tensor.numel() for tensor in states[0]["generator"].values()) > 300
    assert states[0].keys() == states[1].keys()
    for entry, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][entry][name]), (entry, name)
    scattered, stock = calls
    assert scattered["all_reduce"] == 0
    assert scattered["reduce_scatter_tensor"] > 0
    assert (scattered["reduce"] > 0) == (bucket is not None)
    assert stock["reduce_scatter_tensor"] == stock["reduce"] == 0
