"""What G, D and the EMA hold on a rank, against the formulas of ZeRO.

The formulas: Rajbhandari et al. 2020, arXiv 1910.02054, section 5. With weights and gradients of w bytes and states of
k (masters, which ZeRO 0 in float32 has not, and the optimizer's), a parameter on N ranks takes

    ZeRO 0: 2w + k        1: 2w + k/N        2: w + (w + k)/N        3: (2w + k)/N

and the EMA 4/N more, or 4 at ZeRO 0.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from bigsgan.config import NETWORKS
from bigsgan.engines import initialization
from bigsgan.engines.deepspeed_config import stage_0_at_a_time, zero_settings
from bigsgan.models.build import build_network
from tests.distributed import allocations
from tests.distributed.test_stock_deepspeed import STOCK
from tests.tiny import tiny_plan, zero

WIDTH, DEPTH = 512, 64
PERCEPTRONS = [
    "data={kind: synthetic, resolution: 16, image_channels: 1, num_classes: 10, num_images: 64}",
    f"generator={{family: mlp, latent_size: 64, width: {WIDTH}, depth: {DEPTH}}}",
    f"discriminator={{family: mlp, width: {WIDTH}, depth: {DEPTH}}}",
    "batch=8",
]
PRECISIONS = {"fp32": ({}, 4), "bf16": ({"bf16": {"enabled": True}}, 2)}
NUM_MOMENTS = {0.0: 1, 0.5: 2}
"""By Adam's beta1: without it the first moment is the gradient, and is not kept."""


def per_parameter(stage, weight, num_moments, num_ranks):
    """Bytes of weights, gradients and states; ZeRO 1 reduces gradients in the backward pass, and keeps a part too."""
    has_masters = stage > 0 or weight == 2
    parts = [4 * (has_masters + num_moments), weight, weight]  # in the order in which ZeRO 1 to 3 divide them
    states, gradient, weights = (
        part / num_ranks if i < (2 if stage == 1 else stage) else part for i, part in enumerate(parts)
    )
    return weights, gradient, states


def declared(plan, network, sizes, weight, num_ranks):
    """Bytes of what is reduced, or updated, at a time."""
    numel, stage = sum(sizes), plan.engines[network].file.stage
    in_float32 = 4 if weight == 2 else 0  # the gradients of an update
    if stage == 0:
        updated = stage_0_at_a_time(plan, network, numel).updated
        gone = weight if num_ranks == 1 else 0  # of several the gradients go by the group in which they were averaged
        return updated * (in_float32 - gone) if in_float32 else 0
    settings = zero_settings(plan, network, numel)
    bucket = settings.reduce_bucket_size
    if stage == 3:
        return bucket * weight + max(bucket * weight, settings.sub_group_size * (weight + in_float32))
    # When the backward pass ends, the first layers' gradients are still on their way.
    ends = np.cumsum(sizes)
    first = max(ends[0], ends[ends <= bucket].max(initial=0))
    return max(first * weight if num_ranks > 1 else 0, bucket // num_ranks * in_float32)


def cells():
    """All; CI takes the one in which most parts meet."""
    for stage, num_ranks, precision, beta1 in product((0, 1, 2, 3), (1, 2, 4), PRECISIONS, NUM_MOMENTS):
        in_ci = (stage, num_ranks, precision, beta1) == (3, 2, "bf16", 0.0)
        yield pytest.param(stage, num_ranks, precision, beta1, marks=pytest.mark.slow if in_ci else pytest.mark.nightly)


def as_it_comes(overrides, ds):
    """The peaks with DeepSpeed's own reductions, and with buckets of the network's size."""

    def size_buckets(config, plan, network, numel):
        for key in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
            if key.startswith("stage3") <= (config["zero_optimization"]["stage"] == 3):
                config["zero_optimization"].setdefault(key, numel + numel % 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "size_buckets", size_buckets)
        return allocations.peaks([*overrides, *STOCK], ds, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_as_it_comes_takes_more(ranks, tmp_path, stage, precision):
    overrides = [*PERCEPTRONS, *(f"optimizer.{n}={{kind: adam, lr: 1e-4, betas: [0.0, 0.99]}}" for n in NETWORKS)]
    ds = dict.fromkeys(NETWORKS, zero(stage, **PRECISIONS[precision][0]))
    stock = dict.fromkeys(NETWORKS, zero(stage, zero={"overlap_comm": stage == 3}, **PRECISIONS[precision][0]))
    found = [
        max(rank["discriminator"] for rank in ranks(2).run(function, *arguments))
        for function, arguments in ((as_it_comes, (overrides, stock)), (allocations.peaks, (overrides, ds, 3)))
    ]
    print(f"| {stage} | {precision} | {found[0] / 1e6:.1f} | {found[1] / 1e6:.1f} | {found[0] / found[1]:.2f} |")
    assert found[0] > 1.1 * found[1]


@pytest.mark.parametrize("stage, num_ranks, precision, beta1", [*cells()])
def test_the_peak_is_the_formulas(ranks, tmp_path, stage, num_ranks, precision, beta1):
    """Between the last backward pass and the end of the update, when one of the networks has gradients."""
    overrides = [*PERCEPTRONS, *(f"optimizer.{n}={{kind: adam, lr: 1e-4, betas: [{beta1}, 0.99]}}" for n in NETWORKS)]
    content, weight = PRECISIONS[precision]
    ds = dict.fromkeys(NETWORKS, zero(stage, **content))
    plan = tiny_plan(tmp_path, num_ranks, overrides, ds)
    with torch.device("meta"):
        sizes = {n: [p.numel() for p in build_network(plan.recipe, n).parameters()] for n in NETWORKS}
    numel = {network: sum(each) for network, each in sizes.items()}
    by_rank = ranks(num_ranks).run(allocations.peaks, overrides, ds, 3)
    weights, gradient, states = per_parameter(stage, weight, NUM_MOMENTS[beta1], num_ranks)
    ema = numel["generator"] * 4 / (1 if stage == 0 else num_ranks)
    for network in NETWORKS:
        formula = sum(numel.values()) * (weights + states) + numel[network] * gradient + ema
        buffers = declared(plan, network, sizes[network], weight, num_ranks)
        found = max(rank[network] for rank in by_rank)
        print(
            f"| {stage} | {num_ranks} | {precision} | {beta1} | {network} | {formula / 1e6:.1f} | {buffers / 1e6:.1f} "
            f"| {found / 1e6:.1f} | {found / formula:.3f} | {found / (formula + buffers):.3f} |"
        )
        assert found == pytest.approx(formula + buffers, rel=0.02)
        assert found < 1.1 * formula
