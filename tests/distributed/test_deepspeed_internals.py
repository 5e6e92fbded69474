"""Fails first if a later DeepSpeed changes what engines/deepspeed/internals.py relies on."""

import itertools

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from bigsgan.config import both_engines
from bigsgan.engines import Rates
from bigsgan.engines.deepspeed import internals
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.tiny import both, zero

FILES = {
    "0": zero(0), "1": zero(1), "2": zero(2), "3": zero(3),
    "0-bf16": zero(0, bf16={"enabled": True}), "1-bf16": zero(1, bf16={"enabled": True}),
    "1-bf16-fp32-accumulation": zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
    "2-fp16": zero(2, fp16={"enabled": True}), "3-bf16": zero(3, bf16={"enabled": True}),
}  # fmt: skip


def layout(ds):
    """Which element of which parameter each rank says lies where, and what DeepSpeed itself says is there."""
    run = scenarios.build([], {"generator": ds, "discriminator": ds})
    engine = run.step.generator
    shards = [(len(s.master), [tuple(p) for p in s.pieces], s.master.dtype) for s in engine.shards()]
    parts = scenarios.named_parts(run, "generator", [s.master for s in engine.shards()])
    with deepspeed.zero.GatheredParameters(list(engine.network.parameters())):
        whole = {n: p.detach().float().numpy().copy() for n, p in engine.network.named_parameters()}
    scenarios.destroy(run)
    return shards, parts, whole


QUICK = ("0", "1-bf16-fp32-accumulation", "2-fp16", "3")
"""A stage each, of which two hold masters beside the parameters."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FILES])
def test_pieces_cover_every_parameter_once(ranks, name):
    by_rank = ranks(2).run(layout, FILES[name])
    _, _, whole = by_rank[0]
    every_rank_has_all = name.startswith("0")
    for parameter, values in whole.items():
        count = np.zeros(values.size, dtype=int)
        for _, parts, _ in by_rank[: 1 if every_rank_has_all else 2]:
            for offset, part in parts.get(parameter, []):
                count[offset : offset + len(part)] += 1
                assert np.array_equal(part, values.ravel()[offset : offset + len(part)]), parameter
        assert (count == 1).all(), parameter
    for shards, _, _ in by_rank:
        for size, pieces, dtype in shards:
            assert dtype == torch.float32
            spans = sorted((start, start + numel) for _, _, numel, start in pieces)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            assert not spans or spans[-1][1] <= size


def pinned_status():
    run = scenarios.build([], {"generator": zero(3), "discriminator": zero(3)})
    engine = run.step.discriminator
    parameters = list(engine.network.parameters())
    images, labels = torch.zeros(2, 1, 16, 16), torch.zeros(2, dtype=torch.int64)

    def available():
        return sum(p.ds_status == ZeroParamStatus.AVAILABLE for p in parameters)

    counts = [available()]
    with internals.pinned(parameters):
        counts.append(available())
        engine.infer_everywhere((images, labels))  # a forward pass would release each layer behind it
        counts.append(available())
    counts.append(available())
    scenarios.destroy(run)
    return counts, len(parameters)


def test_pinned_parameters_stay_whole(ranks):
    for counts, num in ranks(2).run(pinned_status):
        assert counts == [0, num, num, 0]


def loss_scaler():
    ds = zero(2, fp16={"enabled": True, "initial_scale_power": 4})
    run = scenarios.build([], {"generator": ds, "discriminator": ds})
    engine = run.step.generator._engine
    before = internals.loss_scaler_numbers(engine)
    internals.set_loss_scaler_numbers(engine, {**before, "cur_scale": 64.0, "cur_iter": 7})
    after, scale = internals.loss_scaler_numbers(engine), run.step.generator.loss_scale
    scenarios.destroy(run)
    return before, after, scale


def test_loss_scaler_numbers(ranks):
    for before, after, scale in ranks(2).run(loss_scaler):
        assert before["cur_scale"] == 16.0
        assert before["cur_iter"] == 0
        assert (after["cur_scale"], after["cur_iter"], scale) == (64.0, 7, 64.0)


def pipeline_facts(stages):
    run = scenarios.build(both_engines(f"pipeline_stages={stages}"), both(1))
    facts = {}
    for name in ("generator", "discriminator"):
        engine = getattr(run.step, name)
        inner = engine._engine
        facts[name] = {
            "type": type(inner).__name__,
            "stage": inner.stage_id,
            "pipe": dist.get_process_group_ranks(internals.pipe_group(inner)),
            "replicas": dist.get_process_group_ranks(internals.replica_group(inner)),
            "layers": list(engine.network.layers),
            "division": engine.division,
            "private": [callable(getattr(inner, f, None)) for f in ("_exec_reduce_grads", "_exec_optimizer_step")],
            "wrapper": internals.has_optimizer_wrapper(inner),
        }
    # Every replica's gradient is its rank; a step of SGD then moves each parameter by lr times their mean.
    engine = run.step.generator
    before = [p.detach().clone() for p in engine.network.parameters()]
    for parameter in engine.network.parameters():
        parameter.grad = torch.full_like(parameter, float(comm.rank()))
    engine._set_rates(Rates(0.5))
    internals.reduce_pipeline_gradients(engine._engine)
    internals.step_pipeline(engine._engine)
    moves = [(a - b).unique() for a, b in zip(before, engine.network.parameters(), strict=True)]
    facts["moved"] = [m.round(decimals=4).unique().tolist() for m in moves]
    facts["applied"] = engine._engine.was_step_applied()
    facts["grads"] = [p.grad is None for p in engine.network.parameters()]
    scenarios.destroy(run)
    return facts


@pytest.mark.slow
def test_a_pipeline_is_laid_out_as_its_placement_says(ranks):
    by_rank = ranks(4).run(pipeline_facts, 2)
    for rank, facts in enumerate(by_rank):
        replica = rank % 2
        mean = {0: 0.5, 1: 2.5}[rank // 2]  # of ranks 0 and 1, or 2 and 3
        for name, order in (("generator", [0, 1]), ("discriminator", [1, 0])):
            found = facts[name]
            assert found["type"] == "PipelineEngine"
            assert found["stage"] == order[rank // 2]
            assert sorted(found["pipe"]) == [replica, 2 + replica]
            assert sorted(found["replicas"]) == [2 * (rank // 2), 2 * (rank // 2) + 1]
            bounds = found["division"]
            first, last = bounds[found["stage"]], bounds[found["stage"] + 1]
            assert found["layers"] == [str(i) for i in range(first, last)]
            assert found["private"] == [True, True]
            assert found["wrapper"]
        assert facts["moved"] == [[pytest.approx(0.5 * mean)]] * len(facts["moved"])
        assert facts["applied"]
        assert all(facts["grads"])


def wrappers():
    found = []
    for ds in (zero(0), zero(0, bf16={"enabled": True})):
        overrides = both_engines("pipeline_stages=2")
        run = scenarios.build(overrides, {"generator": ds, "discriminator": ds})
        engine = run.step.generator._engine
        parameter = next(run.step.generator.network.parameters())
        for _ in range(2):
            parameter.grad = torch.full_like(parameter, 0.25)
            internals.accumulate_gradients(engine)
        high = getattr(parameter, "_hp_grad", parameter.grad)
        found.append((internals.has_optimizer_wrapper(engine), high.unique().tolist(), high.dtype))
        scenarios.destroy(run)
    return found


@pytest.mark.slow
def test_only_bf16_accumulates_apart(ranks):
    for (plain, kept, _), (wrapped, summed, _) in ranks(2).run(wrappers):
        assert (plain, kept) == (False, [0.25])
        assert (wrapped, summed) == (True, [0.5])
