"""Adam that keeps no first moment, against torch's, and parameters that do not decay."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from bigsgan.config.sections import Optimizer
from bigsgan.doctor.games import stages, tiny_plan, tiny_recipe, zero
from bigsgan.engines import Rates
from bigsgan.engines.optimizer import AdamWithoutMomentum, build_torch_optimizer, fit_state, set_rates
from bigsgan.engines.parameter_groups import described
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta

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


ADAMW = {"kind": "adamw", "lr": 0.01, "betas": [0.5, 0.9], "weight_decay": 0.1, "weight_decay_on": "matrices"}
MUON = {"kind": "muon", "lr": 0.01, "betas": [0.5, 0.9], "weight_decay": 0.1, "muon": {"lr_multiplier": 0.5}}
GROUPS = [
    {"parameters": "trunk.*", "lr_multiplier": 4},
    {"parameters": "*.bias", "lr_multiplier": 0.25},
    {"parameters": "head.*", "frozen_from_nimg": 16},
]
FACTORS = {"trunk.weight": 4.0, "trunk.bias": 4.0, "neck.bias": 0.25, "head.bias": 0.25, "head.weight": None}


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("trunk", "neck", "head"):
            setattr(self, name, torch.nn.Linear(4, 4))

    def named_matrices(self):
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.dim() == 2]


def followed(step, num_updates=4):
    """Return a network's parameters by name after updates with gradients at random."""
    torch.manual_seed(0)
    network = Network()
    for update in range(num_updates):
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        step(network, update)
    return dict(network.named_parameters())


@pytest.mark.parametrize("settings", [ADAMW, MUON], ids=["adamw", "muon"])
def test_groups_have_rates_of_their_own(settings):
    """As torch's optimizers of each parameter alone: 8 images an update, so that the third does not move the head."""
    section = Optimizer.model_validate({**settings, "groups": GROUPS})
    ours, theirs = {}, {}

    def step(network, update):
        optimizer = ours.setdefault("optimizer", None) or build_torch_optimizer(section, network)
        ours["optimizer"] = optimizer
        factors = tuple(group.lr_multiplier * (not group.is_frozen(8 * update)) for group in section.groups)
        set_rates(optimizer, Rates(0.01 / (update + 1), None, factors))
        optimizer.step()

    def expected(network, update):
        for name, parameter in network.named_parameters():
            is_matrix = parameter.dim() == 2
            if name not in theirs and settings is MUON and is_matrix:
                theirs[name] = torch.optim.Muon([parameter], 0.01, 0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95)
            elif name not in theirs:
                decay = 0.1 if is_matrix or settings is MUON else 0.0
                theirs[name] = torch.optim.AdamW([parameter], 0.01, (0.5, 0.9), weight_decay=decay, fused=True)
            factor = FACTORS.get(name, 1.0)
            factor = float(update < 2) if factor is None else factor
            factor *= 0.5 if settings is MUON and is_matrix else 1.0
            theirs[name].param_groups[0]["lr"] = factor * 0.01 / (update + 1)
            theirs[name].step()

    found, wanted, earlier = followed(step), followed(expected), {}
    for name, parameter in wanted.items():
        assert_close(found[name], parameter, rtol=1e-6, atol=1e-7)
    ours.clear()
    earlier = followed(step, 2)
    assert torch.equal(earlier["head.weight"], found["head.weight"])  # frozen: to the last bit
    assert not torch.equal(earlier["neck.weight"], found["neck.weight"])


def test_groups_say_what_they_take(tmp_path):
    def lines(*groups):
        overrides = [f"optimizer.generator={{lr: 0.1, groups: [{', '.join(groups)}]}}"]
        recipe = tiny_recipe(tmp_path, *overrides)
        return described(recipe)

    first, second = "{parameters: conv1.*, lr_multiplier: 2}", "{parameters: layers.1.*, frozen_from_nimg: 0}"
    stack = dict(network_on_meta(tiny_recipe(tmp_path), "generator").named_parameters())
    convolutions = [each for name, each in stack.items() if ".conv1." in name]
    block = [each for name, each in stack.items() if name.startswith("layers.1.") and ".conv1." not in name]
    assert lines(first, second) == [
        f"optimizer.generator.groups.{number}.parameters={pattern}: {len(own)} parameters, "
        f"{sum(each.numel() for each in own):,} numbers"
        for number, (pattern, own) in enumerate([("conv1.*", convolutions), ("layers.1.*", block)])
    ]
    field = "optimizer.generator.groups"
    with pytest.raises(UserError, match=re.escape(f"{field}.0.parameters: 'conv9.*' is of no parameter of gen")):
        lines("{parameters: conv9.*, lr_multiplier: 2}")
    with pytest.raises(UserError, match=re.escape("'layers.1.conv1.*' is of no parameter of generator that an")):
        lines(first, "{parameters: layers.1.conv1.*, lr_multiplier: 3}")


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


@pytest.mark.parametrize("name", STAGED)
def test_groups_are_refused_there_too(tmp_path, name):
    file, overrides, allowed = STAGED[name]
    groups = "optimizer.generator={lr: 0.1, groups: [{parameters: conv1.*, lr_multiplier: 2}]}"
    message = "optimizer.generator.groups: must be [] with these pipeline stages, got ['conv1.*']"
    with nullcontext() if allowed else pytest.raises(UserError, match=re.escape(message)):
        tiny_plan(tmp_path, 2, [*overrides, groups, *stages(2, 2)], {"generator": file, "discriminator": zero(0)})
