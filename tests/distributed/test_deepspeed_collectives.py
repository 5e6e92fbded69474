"""Gradients that are scattered: the sums are those of DeepSpeed's all-reduce, with fewer bytes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from bigsgan.config import NETWORKS
from bigsgan.engines import deepspeed_collectives, initialization
from tests.distributed import scenarios
from tests.tiny import zero

ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]


def trained(overrides, ds, economises=True, most_padding=1.05):
    """Parameters after two updates, and which collectives reduced the gradients."""
    names = ("reduce", "reduce_scatter_tensor")
    with pytest.MonkeyPatch.context() as patch:
        calls = dict.fromkeys(names, 0)
        for name in names:
            patch.setattr(dist, name, _counting(getattr(dist, name), name, calls))
        patch.setattr(deepspeed_collectives, "_MOST_PADDING", most_padding)
        if not economises:
            patch.setattr(initialization, "economise", lambda *arguments: None)
        return scenarios.train(overrides, ds, 2), calls


def _counting(collective, name, calls):
    def call(*arguments, **options):
        calls[name] += max((t.numel() for t in arguments if torch.is_tensor(t)), default=0) > 100
        return collective(*arguments, **options)

    return call


BF16 = {"bf16": {"enabled": True}}
ACCUMULATING = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}  # at stage 1 another optimizer would do that


PRECISIONS = {"fp32": {}, "bf16": BF16, "bf16-accumulating": ACCUMULATING}


def cells():
    """Stages, precisions, buckets (some parameters are larger) and padding (without any, parts are reduced alone)."""
    for stage, precision, bucket, most_padding in product((1, 2), PRECISIONS, (None, 300), (1.05, 0.0)):
        if (stage, precision) != (1, "bf16-accumulating"):
            quick = bucket == 300 and (stage, precision, most_padding) in ((2, "fp32", 1.05), (1, "bf16", 0.0))
            slow = bucket == 300 and (stage == 2 or most_padding > 1)
            marks = () if quick else pytest.mark.slow if slow else pytest.mark.nightly
            yield pytest.param(stage, precision, bucket, most_padding, marks=marks)


@pytest.mark.parametrize("stage, precision, bucket, most_padding", [*cells()])
def test_scattered_gradients_are_the_reduced_ones(ranks, stage, precision, bucket, most_padding):
    """Bit for bit those of DeepSpeed as it comes, which all-reduces them: a sum of two terms has no order."""
    zero_section = {} if bucket is None else {"reduce_bucket_size": bucket}
    states, calls = [], []
    ds = dict.fromkeys(NETWORKS, zero(stage, zero=zero_section, **PRECISIONS[precision]))
    for economises in (True, False):
        results = ranks(2).run(trained, [*ADAM, "accumulation=2"], ds, economises, most_padding)
        states.append(scenarios.merge([state for state, _ in results]))
        calls.append(results[0][1])
    assert max(tensor.numel() for tensor in states[0]["generator"].values()) > 300
    assert states[0].keys() == states[1].keys()
    for entry, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][entry][name]), (entry, name)
    scattered, stock = calls
    assert (scattered["reduce_scatter_tensor"] > 0) == (most_padding > 1)
    assert (scattered["reduce"] > 0) == (most_padding < 1)
    assert stock["reduce_scatter_tensor"] == stock["reduce"] == 0
