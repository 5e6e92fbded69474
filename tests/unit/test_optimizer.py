"""Adam that keeps no first moment, against torch's, and parameters that do not decay."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from bigsgan.doctor.games import stages, tiny_plan, zero
from bigsgan.engines.optimizer import AdamWithoutMomentum, fit_state
from bigsgan.errors import UserError

BETA2, EPS, DECAY = 0.9, 1e-6, 0.02


def trained(kind, decay, num_steps=4):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), (2,))]
    optimizer = kind(parameters, 1e-2, betas=(0.0, BETA2), eps=EPS, weight_decay=decay, fused=True)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for parameter in parameters[:2]:  # the last one never gets a gradient
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, parameters


def without_momentum(*arguments, **options):
    return AdamWithoutMomentum(*arguments, **options, decoupled_weight_decay=True)


@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize(
    "kind, theirs", [(AdamWithoutMomentum, torch.optim.Adam), (without_momentum, torch.optim.AdamW)]
)
def test_it_is_torchs_adam(kind, theirs, decay):
    optimizer, parameters = trained(kind, decay)
    reference, expected = trained(theirs, decay)
    for mine, theirs in zip(parameters, expected, strict=True):
        assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(parameters[:2], expected[:2], strict=True):
        assert optimizer.state[mine].keys() == {"step", "exp_avg_sq"}
        assert_close(optimizer.state[mine]["exp_avg_sq"], reference.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=0)
        assert optimizer.state[mine]["step"] == reference.state[theirs]["step"] == 4
    assert parameters[2] not in optimizer.state


def test_state_fits_optimizers_with_and_without_a_first_moment():
    squares, moments = torch.rand(3), torch.rand(3)
    without, _ = trained(AdamWithoutMomentum, 0.0)
    adam, _ = trained(torch.optim.Adam, 0.0)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 1e-2, momentum=0.9)
    both = {"step": 3, "exp_avg": moments, "exp_avg_sq": squares}
    assert fit_state(without, both) == {"step": 3, "exp_avg_sq": squares}
    assert fit_state(adam, both) is both
    found = fit_state(adam, {"step": 3, "exp_avg_sq": squares})
    assert_close(found.pop("exp_avg"), torch.zeros(3))
    assert found == {"step": 3, "exp_avg_sq": squares}
    momentum = {"momentum_buffer": moments}
    assert fit_state(sgd, momentum) is momentum


STAGED = {
    "zero1": (zero(1), [], True),
    "zero0": (zero(0), [], True),
    "zero1, stock": (zero(1), ["engines.stock_deepspeed=both"], False),
    "zero1, no reduce-scatter": (zero(1, zero={"reduce_scatter": False}), [], False),
}


@pytest.mark.parametrize("name", STAGED)
def test_decay_of_matrices_is_refused_where_stages_would_wait_for_each_other(tmp_path, name):
    """DeepSpeed adds up the norm of each group over stages, and a stage may have no biases, so one group fewer."""
    file, overrides, allowed = STAGED[name]
    overrides = [*overrides, "optimizer.generator={lr: 0.1, weight_decay: 0.1, weight_decay_on: matrices}"]
    both = {"generator": file, "discriminator": zero(0)}
    tiny_plan(tmp_path, 2, overrides, both)
    message = "optimizer.generator.weight_decay_on: must be all with these pipeline stages"
    with nullcontext() if allowed else pytest.raises(UserError, match=re.escape(message)):
        tiny_plan(tmp_path, 2, [*overrides, *stages(2, 2)], both)
