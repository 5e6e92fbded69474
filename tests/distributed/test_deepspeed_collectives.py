"""Gradients that are reduced by group, or scattered: the sums are those of DeepSpeed's all-reduce, with fewer bytes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist

from bigsgan.config import NETWORKS
from bigsgan.engines import deepspeed_config, initialization
from bigsgan.engines.deepspeed import collectives, grouped_gradients
from bigsgan.engines.deepspeed.averaged_gradients import AveragedGradients
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.tiny import zero

ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]


def trained(overrides, ds, usual=True, most_padding=1.05):
    """Norms of the gradients of two updates, the state after them, and which collectives reduced the gradients."""
    names = ("reduce", "reduce_scatter_tensor", "all_reduce")
    with pytest.MonkeyPatch.context() as patch:
        calls = dict.fromkeys(names, 0)
        for name in names:
            patch.setattr(dist, name, _counting(getattr(dist, name), name, calls))
        patch.setattr(collectives, "_MOST_PADDING", most_padding)
        patch.setattr(deepspeed_config, "_LEAST", 100)
        patch.setattr(deepspeed_config, "_LEAST_OF_RANK", 1)
        if not usual:
            patch.setattr(initialization, "install_reducers", lambda *arguments: None)
        return *scenarios.norms(overrides, ds, 2), calls


def _counting(collective, name, calls):
    def call(*arguments, **options):
        calls[name] += max((t.numel() for t in arguments if torch.is_tensor(t)), default=0) > 100
        return collective(*arguments, **options)

    return call


BF16 = {"bf16": {"enabled": True}}
ACCUMULATING = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}  # at ZeRO 1 another optimizer would do that


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PRECISIONS = {
    "fp32": {},
    "bf16": BF16,
    "bf16-accumulating": ACCUMULATING,
    "fp16": FP16,
    "fp16-accumulating": {**FP16, "data_types": {"grad_accum_dtype": "fp32"}},
}


def both_ways(ranks, content, *overrides, most_padding=1.05, tolerance=0.0):
    """What reduced the gradients here, after asserting that DeepSpeed as it comes arrives at the same, bit for bit.

    It all-reduces them: a sum of two terms has no order. With a tolerance the factor that clips may be rounded.
    """
    states, norms, calls = [], [], []
    for usual in (True, False):
        results = ranks(2).run(
            trained, [*ADAM, "accumulation=2", *overrides], dict.fromkeys(NETWORKS, content), usual, most_padding
        )
        states.append(scenarios.merge([state for _, state, _ in results]))
        norms.append([found for found, _, _ in results])
        calls.append(results[0][2])
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    assert max(tensor.numel() for tensor in states[0]["generator"].values()) > 300
    assert states[0].keys() == states[1].keys()
    for entry, tensors in states[0].items():
        for name, tensor in tensors.items():
            same = torch.allclose(tensor, states[1][entry][name], rtol=tolerance, atol=tolerance)
            assert same, (entry, name)
    here, stock = calls
    assert stock["reduce_scatter_tensor"] == stock["reduce"] == 0
    return here


def cells():
    """ZeRO stages, precisions, buckets (some smaller than parameters), whether passes run on while gradients travel."""
    for stage, precision, bucket, overlaps in product((1, 2), PRECISIONS, (None, 300), (False, True)):
        if (stage, precision) != (1, "bf16-accumulating"):  # another optimizer
            quick = bucket == 300 and (stage, precision, overlaps) == (1, "bf16", True)
            slow = bucket == 300 and (stage, precision) in (
                (2, "fp32"),
                (2, "bf16-accumulating"),
                (2, "fp16"),
                (1, "fp32"),
                (1, "fp16-accumulating"),
            )
            marks = () if quick else pytest.mark.slow if slow and not overlaps else pytest.mark.nightly
            yield pytest.param(stage, precision, bucket, overlaps, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("stage, precision, bucket, overlaps", [*cells()])
def test_grouped_gradients_are_the_reduced_ones(ranks, stage, precision, bucket, overlaps):
    section = {"overlap_comm": overlaps, **({} if bucket is None else {"reduce_bucket_size": bucket})}
    calls = both_ways(ranks, zero(stage, zero=section, **PRECISIONS[precision]))
    assert calls["reduce_scatter_tensor"] > 0
    assert calls["reduce"] == 0


@pytest.mark.slow
def test_an_update_in_parts_is_the_same(ranks):
    """bf16 at ZeRO 0, where DeepSpeed converts all gradients at once; every part has but a few parameters."""
    both_ways(ranks, zero(0, **BF16))
    settings = ("kind=sgd", "lr=1.0", "clip_norm=0.05")
    clipped = [f"optimizer.{network}.{setting}" for network, setting in product(NETWORKS, settings)]
    both_ways(ranks, zero(0, **BF16), *clipped, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [True, False])
def test_averaged_gradients_are_the_reduced_ones(ranks, overlaps):
    """Stage 0, in groups of a few parameters each; its own type, and another on the wire."""
    calls = both_ways(ranks, zero(0, zero={"overlap_comm": overlaps}))
    assert calls["all_reduce"] > 3 * 4  # of two networks in two updates: several groups each
    both_ways(ranks, zero(0, zero={"overlap_comm": overlaps}, communication_data_type="bf16"))


def in_turn(overrides, ds):
    """Whose turn it is in an update: G's images, the gradients on their way after D's backward pass, D's step."""
    run = scenarios.build([*ADAM, *overrides], ds)
    scenarios.update(run, 1)
    order = []
    names = {
        ("G makes images", "forward"): "images",
        ("D trains", "backward"): "backward",
        ("D trains", "step"): "step",
    }

    def noted(phase, task):
        order.append(names.get((phase.label, task.kind)))
        return nullcontext()

    run.step.executor.around = noted
    scenarios.update(run, 1)
    scenarios.destroy(run)
    return [name for name in order if name]


@pytest.mark.slow
@pytest.mark.parametrize("stage, then", [(0, ["images", "step"]), (1, ["step", "images"])])
def test_gradients_of_stage_0_travel_while_images_are_made(ranks, stage, then):
    for order in ranks(2).run(in_turn, ["objective.d_steps=2"], dict.fromkeys(NETWORKS, zero(stage))):
        assert order == ["images", "backward", *then, "backward", *then]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_groups_in_another_order_are_the_reduced_ones(ranks, stage):
    """DeepSpeed deals parameters out to the ranks in turn then."""
    both_ways(ranks, zero(stage, zero={"reduce_bucket_size": 300, "round_robin_gradients": True}))


def without_some(usual, stage):
    """Weights of three linear maps after three updates of two micro-batches, of which the second uses one map alone.

    The last map is never used. Every map is a group.
    """
    torch.manual_seed(0)
    maps = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    groups = [{"params": list(linear.parameters())} for linear in maps]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.Adam(groups, 0.1)
    engine, *_ = deepspeed.initialize(model=maps, optimizer=optimizer, config=config, dist_init_required=False)
    if usual and stage:
        grouped_gradients.GroupedGradients(engine.optimizer)
    elif usual and dist.get_world_size() == 1:
        collectives._limit_reductions(engine, 100)
    averages = usual and not stage and dist.get_world_size() > 1
    averaged = AveragedGradients(engine, 100, True) if averages else None
    for step in range(6):
        x = torch.full((2, 8), 1.0 + step + dist.get_rank())
        outputs = maps[0](x)
        engine.backward((outputs if step % 2 else maps[1](outputs)).square().mean())
        if averaged is not None:
            averaged.wait()
        engine.step()
    weights = [linear.weight.detach().clone() for linear in maps]
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage, num_ranks", [(0, 1), (0, 2), (1, 2), (2, 2)])
def test_parameters_without_a_gradient(ranks, stage, num_ranks):
    """As DeepSpeed has it: what is not used is not moved, and what is used now and then by what it got."""
    found, stock = (ranks(num_ranks).run(without_some, usual, stage) for usual in (True, False))
    start = ranks(num_ranks).run(initial_weights)[0]
    for rank in range(num_ranks):
        for number in range(3):
            assert torch.equal(found[rank][number], stock[rank][number]), number
            assert torch.equal(found[rank][number], start[number]) == (number == 2)


def initial_weights():
    torch.manual_seed(0)
    return [torch.nn.Linear(8, 8).weight.detach() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("most_padding", [1.05, 0.0])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_scattered_gradients_are_the_reduced_ones(ranks, stage, most_padding):
    """With an optimizer on the host; where no padding is allowed, the parts of a bucket are reduced one by one."""
    section = {"reduce_bucket_size": 300, "offload_optimizer": {"device": "cpu"}}
    calls = both_ways(ranks, zero(stage, zero=section), most_padding=most_padding)
    assert calls["reduce"] > 0
    assert (calls["reduce_scatter_tensor"] > 0) == (most_padding > 1)


def stage_3_norms():
    """Ours and DeepSpeed's norm of gradients that differ over the ranks, and of some of which one is not finite."""
    run = scenarios.build([], dict.fromkeys(NETWORKS, zero(3)))
    optimizer = run.step.discriminator._engine.optimizer
    parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
    generator = torch.Generator().manual_seed(comm.rank())
    gradients = [torch.randn(p.partition_numel(), generator=generator) for p in parameters]
    found = []
    for last in (1.0, torch.nan, torch.inf):
        gradients[-1][-1] = last if comm.rank() == 1 else 1.0
        stock = type(optimizer).get_grad_norm_direct(optimizer, gradients, parameters)
        found.append((float(optimizer.get_grad_norm_direct(gradients, parameters)), float(stock)))
    scenarios.destroy(run)
    return found


@pytest.mark.slow
def test_the_norm_at_stage_3_is_deepspeeds_own(ranks):
    for finite, *not_finite in ranks(2).run(stage_3_norms):
        assert finite[0] == pytest.approx(finite[1], rel=1e-6)
        assert not_finite == [(math.inf, -1.0)] * 2  # both are refused
