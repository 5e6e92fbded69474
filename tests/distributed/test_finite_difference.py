"""Finite differences of D that are checked against the exact penalty, in layouts of every kind."""

import tempfile
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from bigsgan.runtime import comm
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import check
from tests.distributed.test_forward_mode import LAYOUTS
from tests.tiny import tiny_recipe

SIGMA = 0.5
PENALTY = "{{weight: {}, every: 2, form: finite_difference, sigma: 0.5, antithetic: {}, check_every: {}}}"


def game(often):
    r1 = PENALTY.format(0.2, "true", often)
    r2 = PENALTY.format(0.1, "false", often)
    return ["accumulation=2", f"objective.r1={r1}", f"objective.r2={r2}"]


def trained(overrides, ds, num_updates):
    """The state after some updates, and the means of their statistics by update."""
    run = scenarios.build(overrides, ds)
    found = []
    for _ in range(num_updates):
        scenarios.update(run, 1)
        found.append(run.statistics.reduce(comm.sum_over_ranks))
    state = scenarios.local_state(run)
    scenarios.destroy(run)
    return state, found


@lru_cache
def expected():
    """Of the first micro-batch, where D is as it begins."""
    plain = reference.Reference(tiny_recipe(Path(tempfile.mkdtemp()), *game(1)))
    with closing(plain.reals), torch.no_grad():
        (x, y), part = plain.reals.next_phase()[0], plain.parts["discriminator"]
        inputs = plain.generator_inputs("discriminator", (0, 0), part)[0]
        fake = plain.forward(plain.g, False, *inputs)
        found = {}
        for name, images, labels, weight in (("r1", x, y, 0.2), ("r2", fake, inputs[1], 0.1)):
            e = plain.draws.noise(name, (0, 0), part.positions(0), images.shape[1:])
            with torch.enable_grad():
                images = images.clone().requires_grad_()
                (g,) = torch.autograd.grad(plain.forward(plain.d, False, images, labels).sum(), images)
            start, width = (images - SIGMA * e, 2 * SIGMA) if name == "r1" else (images, SIGMA)
            ends = [plain.forward(plain.d, False, at, labels) for at in (images + SIGMA * e, start)]
            found[f"penalty/{name}_exact"] = weight / 2 * float(g.square().sum((1, 2, 3)).mean())
            found[f"slope/{name}_exact"] = float((g * e).sum((1, 2, 3)).square().mean())
            found[f"slope/{name}"] = float(((ends[0] - ends[1]) / width).square().mean())
    return found


ALL = [
    pytest.param(layout, marks=() if layout in ("zero3", "D in stages", "pipelines") else pytest.mark.nightly)
    for layout in ("zero0", "zero1", "zero3", "D in stages", "pipelines", "zero3 and stages", "one after the other")
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALL)
def test_a_check_tells_of_the_first_micro_batch_and_changes_nothing(ranks, layout):
    num, options, ds = LAYOUTS[layout]
    with_check = ranks(num).run(trained, [*game(1), *options], ds, 3)
    without = ranks(num).run(trained, [*game(0), *options], ds, 3)
    wanted = expected()
    for (state, by_update), (plain, plain_by_update) in zip(with_check, without, strict=True):
        assert_equal(state, plain)
        assert {name: by_update[0].pop(name) for name in wanted} == pytest.approx(wanted, rel=1e-4)
        assert wanted.keys() <= by_update[2].keys()
        assert by_update[:2] == plain_by_update[:2]


def assert_equal(found, wanted):
    """All numbers, bit for bit."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_equal(found[name], value)
    elif isinstance(wanted, list):
        assert [offset for offset, _ in found] == [offset for offset, _ in wanted]
        for (_, own), (_, value) in zip(found, wanted, strict=True):
            assert_equal(own, value)
    else:
        assert np.array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero0", "D in stages"])
def test_antithetic_differences(ranks, layout):
    num, options, ds = LAYOUTS[layout]
    check(ranks(num), [*game(2), *options], ds)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "pipelines"])
def test_beside_a_gradient_penalty_in_forward_mode(ranks, layout):
    num, options, ds = LAYOUTS[layout]
    penalty = ["objective.loss=wasserstein", "objective.gradient_penalty={weight: 1}"]
    check(ranks(num), [*game(1), *options, *penalty], ds)
