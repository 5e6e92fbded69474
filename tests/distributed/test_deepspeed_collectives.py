"""Gradients that are reduced by group, or scattered: the sums are those of DeepSpeed's all-reduce, with fewer bytes."""

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


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PRECISIONS = {"fp32": {}, "bf16": BF16, "bf16-accumulating": ACCUMULATING, "fp16": FP16}


def both_ways(ranks, content, most_padding=1.05):
    """What reduced the gradients here, after asserting that DeepSpeed as it comes arrives at the same, bit for bit.

    It all-reduces them: a sum of two terms has no order.
    """
    states, calls = [], []
    for economises in (True, False):
        results = ranks(2).run(
            trained, [*ADAM, "accumulation=2"], dict.fromkeys(NETWORKS, content), economises, most_padding
        )
        states.append(scenarios.merge([state for state, _ in results]))
        calls.append(results[0][1])
    assert max(tensor.numel() for tensor in states[0]["generator"].values()) > 300
    assert states[0].keys() == states[1].keys()
    for entry, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][entry][name]), (entry, name)
    here, stock = calls
    assert stock["reduce_scatter_tensor"] == stock["reduce"] == 0
    return here


def cells():
    """Stages, precisions, buckets (some parameters are larger), and whether passes go on while gradients travel."""
    for stage, precision, bucket, overlaps in product((1, 2), PRECISIONS, (None, 300), (False, True)):
        if (stage, precision) != (1, "bf16-accumulating"):  # another optimizer
            quick = bucket == 300 and (stage, precision, overlaps) in ((2, "fp32", False), (1, "bf16", True))
            slow = bucket == 300 and (stage, precision) in ((2, "bf16-accumulating"), (2, "fp16"), (1, "fp32"))
            marks = () if quick else pytest.mark.slow if slow and not overlaps else pytest.mark.nightly
            yield pytest.param(stage, precision, bucket, overlaps, marks=marks)


@pytest.mark.parametrize("stage, precision, bucket, overlaps", [*cells()])
def test_grouped_gradients_are_the_reduced_ones(ranks, stage, precision, bucket, overlaps):
    section = {"overlap_comm": overlaps, **({} if bucket is None else {"reduce_bucket_size": bucket})}
    calls = both_ways(ranks, zero(stage, zero=section, **PRECISIONS[precision]))
    assert calls["reduce_scatter_tensor"] > 0
    assert calls["reduce"] == 0


@pytest.mark.parametrize("most_padding", [1.05, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_scattered_gradients_are_the_reduced_ones(ranks, stage, most_padding):
    """With an optimizer on the host; where no padding is allowed, the parts of a bucket are reduced one by one."""
    section = {"reduce_bucket_size": 300, "offload_optimizer": {"device": "cpu"}}
    calls = both_ways(ranks, zero(stage, zero=section), most_padding)
    assert calls["reduce"] > 0
    assert (calls["reduce_scatter_tensor"] > 0) == (most_padding > 1)
