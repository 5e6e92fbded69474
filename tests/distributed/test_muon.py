"""Muon in every layout is torch's own on one rank, and orthogonalizes each matrix once."""

import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from bigsgan.config import NETWORKS
from bigsgan.models.build import build_network
from tests.distributed import scenarios
from tests.distributed.test_adam import whole
from tests.distributed.test_state import check_same_run, check_skipped
from tests.tiny import TINY_GAMES, stages, tiny_recipe, zero

LR, MULTIPLIER, DECAY, UPDATES = 0.02, 0.5, 0.3, 3
BETAS = (0.5, 0.9)
OPTIONS = {"momentum": 0.9, "nesterov": False, "ns_steps": 4, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-6}
PLAIN = {"momentum": 0.95, "nesterov": True}


def overrides(game, options=PLAIN, adjust="match_rms_adamw", **more):
    """A tiny transformer whose networks both have Muon."""
    told = ", ".join(f"{key}: {str(list(v) if isinstance(v, tuple) else v).lower()}" for key, v in options.items())
    section = f"{{lr_multiplier: {MULTIPLIER}, adjust_lr_fn: {adjust}, {told}}}"
    optimizer = f"kind: muon, lr: {LR}, betas: {list(BETAS)}, weight_decay: {DECAY}, muon: {section}"
    optimizer += "".join(f", {key}: {value}" for key, value in more.items())
    game = [text for text in TINY_GAMES[game] if not text.startswith("optimizer.")]
    return [*game, *(f"optimizer.{network}={{{optimizer}}}" for network in NETWORKS)]


def matrices_of(network):
    """Names of the weights with two dimensions in layers that have an attention."""
    blocks = [number for number, layer in network.layers.items() if hasattr(layer, "attention")]
    return [
        name for name, parameter in network.named_parameters() if parameter.dim() == 2 and name.split(".")[1] in blocks
    ]


def check_muon(pool, game, ds, options=PLAIN, adjust="match_rms_adamw", more=(), extra=()):
    """Three updates from the same gradients are those of torch's optimizers, and each matrix is orthogonalized once."""
    told = [*overrides(game, options, adjust, **dict(more)), *extra]
    by_rank = pool.run(scenarios.muon_updates, told, ds, UPDATES)
    keys = {key for rank in by_rank for key in rank} - {"shapes"}
    recorded = {key: whole([rank.get(key, {}) for rank in by_rank]) for key in keys}
    done = Counter(shape for rank in by_rank for shape in rank["shapes"])
    expected = Counter()
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *told)
    for network in NETWORKS:
        stack = build_network(recipe, network)
        shapes = {name: parameter.shape for name, parameter in stack.named_parameters()}
        names = matrices_of(stack)
        assert len(names) >= 8
        expected.update({tuple(shapes[name]): 0 for name in names})
        for name in names:
            expected[tuple(shapes[name])] += UPDATES
        start = recorded[f"{network}.1.before"]
        assert start.keys() == shapes.keys()
        own = {name: torch.nn.Parameter(torch.from_numpy(value).view(shapes[name])) for name, value in start.items()}
        groups = [{"params": [own[name] for name in own if name not in names]}]
        if dict(more).get("weight_decay_on"):
            vectors = [parameter for parameter in groups[0]["params"] if parameter.dim() == 1]
            others = [parameter for parameter in groups[0]["params"] if parameter.dim() > 1]
            groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
        optimizers = [
            torch.optim.Muon([own[name] for name in names], LR * MULTIPLIER, DECAY, adjust_lr_fn=adjust, **options),
            torch.optim.AdamW(groups, LR, BETAS, weight_decay=DECAY, fused=True),
        ]
        for number in range(1, UPDATES + 1):
            for name, gradient in recorded[f"{network}.{number}.grad"].items():
                own[name].grad = torch.from_numpy(gradient).view(shapes[name])
            for optimizer in optimizers:
                optimizer.step()
            for name, after in recorded[f"{network}.{number}.after"].items():
                moved = torch.from_numpy(after).view(shapes[name])
                error = (moved - own[name].detach()).abs().max()
                assert error <= (0 if name in names else 1e-6), (network, number, name, float(error))
    assert done == expected
    return by_rank


QUICK = [(1, "gat"), (3, "cat")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, game",
    [
        *QUICK,
        *(
            pytest.param(stage, game, marks=pytest.mark.slow if stage + (game == "cat") == 3 else pytest.mark.nightly)
            for stage in (0, 1, 2, 3)
            for game in ("gat", "cat")
            if (stage, game) not in QUICK
        ),
    ],
)
def test_it_is_torchs(ranks, stage, game):
    by_rank = check_muon(ranks(2), game, dict.fromkeys(NETWORKS, zero(stage)))
    numbers = [len(rank["shapes"]) for rank in by_rank]
    assert max(numbers) <= 0.7 * sum(numbers)  # both work


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
HOST = {"offload_optimizer": {"device": "cpu"}}
SMALL = {"reduce_bucket_size": 300, "sub_group_size": 300}
MORE = {
    "options": (zero(2), {"options": OPTIONS, "adjust": "original"}),
    "options at 3": (zero(3), {"options": OPTIONS, "adjust": "original"}),
    "matrices decay": (zero(1), {"more": {"weight_decay_on": "matrices"}}),
    "clipped": (zero(3), {"more": {"clip_norm": 0.01}, "extra": ["accumulation=2"]}),
    "small groups at 1": (zero(1, zero={"reduce_bucket_size": 300}), {}),
    "small groups at 2": (zero(2, zero={"reduce_bucket_size": 300}), {"extra": ["accumulation=2"]}),
    "small groups at 3": (zero(3, zero=SMALL), {}),
    "bf16 at 0": (zero(0, **BF16), {}),
    "bf16 at 1": (zero(1, **BF16), {}),
    "bf16 at 1, float32 sums": (zero(1, data_types={"grad_accum_dtype": "fp32"}, **BF16), {}),
    "bf16 at 3": (zero(3, **BF16), {}),
    "fp16 at 2": (zero(2, **FP16), {}),
    "fp16 at 3": (zero(3, **FP16), {}),
    "host at 1": (zero(1, zero=HOST), {}),
    "host at 2, bf16": (zero(2, zero=HOST, **BF16), {"extra": ["accumulation=2"]}),
    "host at 3": (zero(3, zero={**HOST, "offload_param": {"device": "cpu"}}), {}),
    "stock at 0": (zero(0), {"extra": ["engines.stock_deepspeed=both"]}),
    "stock at 0, bf16": (zero(0, **BF16), {"extra": ["engines.stock_deepspeed=both"]}),
    "stock at 2": (zero(2), {"extra": ["engines.stock_deepspeed=both"]}),
    "stock at 3": (zero(3), {"extra": ["engines.stock_deepspeed=both"]}),
    "stages at 0": (zero(0), {"extra": stages(2, 2)}),
    "stages at 1": (zero(1), {"extra": stages(2, 2)}),
    "ranks of their own": (zero(3), {"extra": ["engines.generator.ranks=1", "engines.discriminator.ranks=1"]}),
}


NIGHTLY = {
    "options at 3", "small groups at 1", "bf16 at 0", "bf16 at 1", "fp16 at 3", "host at 1", "stock at 0", "stock at 2",
    "stages at 0",
}  # fmt: skip
"""Whose parts others have."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n in NIGHTLY else pytest.mark.slow) for n in MORE]
)
def test_it_is_torchs_in_other_layouts(ranks, name):
    ds, options = MORE[name]
    check_muon(ranks(2), "gat", dict.fromkeys(NETWORKS, ds), **options)


SKIPPED = [("fp16 at 2", "generator"), ("bf16 at 3", "discriminator"), ("host at 1", "generator")]


@pytest.mark.parametrize(
    "name, network",
    [
        pytest.param(*cell, marks=pytest.mark.slow if cell in SKIPPED else pytest.mark.nightly)
        for cell in product(("fp16 at 2", "bf16 at 3", "fp32 at 0", "host at 1"), NETWORKS)
    ],
)
def test_non_finite_gradients_skip_the_update(ranks, name, network):
    """Neither a momentum nor a weight moves, and the ranks do not wait for each other."""
    ds = dict.fromkeys(NETWORKS, MORE[name][0] if name in MORE else zero(0))
    check_skipped(ranks(2).run(scenarios.poisoned, overrides("gat"), ds, network), network)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (0, 2)), 3])
def test_resume_is_the_same_run(ranks, stage, tmp_path):
    ds, told = dict.fromkeys(NETWORKS, zero(stage)), [*overrides("cat"), "accumulation=2"]
    whole_run = ranks(2).run(scenarios.uninterrupted, told, ds, 6)
    check_same_run(whole_run, ranks(2).run(scenarios.resume, told, ds, str(tmp_path), 3, 3))
