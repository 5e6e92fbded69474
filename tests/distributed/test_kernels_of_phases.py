"""Attention by torch's kernels, but where a penalty differentiates twice: phase by phase, in every layout."""

from unittest import mock

import pytest
import torch.nn.functional as F

from tests.distributed import scenarios
from tests.tiny import TINY_GAMES, both, stages

R1 = "objective={{loss: relativistic, reuse_fakes: true, fake_labels: data, r1: {{weight: 0.2, every: 2{}}}}}"
BLOCKS = {"generator": 4, "discriminator": 2}


def fused(overrides, ds):
    """By phase and kind of task of two updates, how often this rank's attention was fused."""
    found = []
    run = scenarios.build(overrides, ds)
    attend, key = F.scaled_dot_product_attention, None

    def counted(*args, **options):
        found[-1][key] += 1
        return attend(*args, **options)

    def noting(engine, kind):
        act = getattr(engine, kind)

        def call(work, *args):
            nonlocal key
            key = f"{work.phase.label}: {kind}"
            found[-1].setdefault(key, 0)
            return act(work, *args)

        return call

    for network in BLOCKS:
        engine = getattr(run.step, network)
        for kind in ("forward", "backward"):
            setattr(engine, kind, noting(engine, kind))
    with mock.patch.object(F, "scaled_dot_product_attention", counted):
        for _ in range(2):
            found.append({})
            scenarios.update(run, 1)
    scenarios.destroy(run)
    return found


def total(by_rank):
    """Over ranks, as a stage has a part of the blocks."""
    names = set().union(*by_rank)
    return {name: sum(each.get(name, 0) for each in by_rank) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "stage", "method", "more"),
    [
        (1, 0, "double_backward", []),
        (1, 3, "forward_mode", [f"engines.{n}.activation_checkpointing=true" for n in BLOCKS]),
        (2, 1, "auto", stages(2, 2)),
    ],
)
def test_what_no_penalty_differentiates_is_fused(ranks, num_ranks, stage, method, more):
    family = [option for option in TINY_GAMES["gat"] if not option.startswith("objective")]
    options = [*family, R1.format("" if method == "auto" else f", method: {method}"), *more]
    first, second = (total(found) for found in zip(*ranks(num_ranks).run(fused, options, both(stage)), strict=True))
    again = 1 if any("checkpointing" in option for option in more) else 0
    for counts, penalized in ((first, True), (second, False)):
        others = {"G makes images": "generator", "D judges": "discriminator"}
        others |= {} if penalized else {"D trains": "discriminator"}
        for label, network in others.items():
            assert counts[f"{label}: forward"] == BLOCKS[network]
            assert counts.get(f"{label}: backward", 0) == (again * BLOCKS[network] if network != "generator" else 0)
    for label in ("D differentiates", "D trains"):
        assert all(count == 0 for name, count in first.items() if name.startswith(label))
    assert ("D differentiates: forward" in first) == (method != "double_backward")
