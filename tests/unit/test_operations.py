"""The operations that `bigsgan plan` foretells, against counts by hand and of what torch is asked to compute."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bigsgan.adversarial.objectives import DiscriminatorObjective, InputGradients
from bigsgan.adversarial.terms import stateless_terms
from bigsgan.adversarial.terms.path_length import PathLengthPenalty, Probed
from bigsgan.config.objective import num_images
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.engines.zero import Pass, Root
from bigsgan.models import dual
from bigsgan.models.build import build_network
from bigsgan.monitor import Statistics
from bigsgan.plan import describe_networks
from bigsgan.planner.counting import count_heads, count_network, count_work
from bigsgan.planner.teaching import empty_targets
from tests.tiny import TINY_GAMES, both, tiny_plan, zero

META = torch.device("meta")
METHODS = ("double_backward", "forward_mode")


class Counter(TorchDispatchMode):
    """Adds up the operations of products, as torch's FlopCounterMode, whose hooks do not bear torch.autograd.grad."""

    flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.flop += count(*args, **(kwargs or {}), out_val=out)
        return out


def operations(compute: Callable[[], Any]) -> int:
    with Counter() as counter:
        compute()
    return counter.flop


def d_step(network, loss, inputs, method):
    """One D step, as the engines compute it."""
    if not loss.differentiates_inputs:
        loss(network(*inputs, segments=loss.num_segments), inputs).backward()
        return
    if method == "double_backward":
        Root(network)(inputs, Pass(loss=loss))[0].backward()
        return
    network.requires_grad_(False)
    num = loss.num_differentiated
    reals_or_all = tuple(entry[: len(entry) * num // loss.num_segments] for entry in inputs)
    images, *rest = loss.differentiated(reals_or_all)
    first = images.requires_grad_(), *rest
    (grads,) = torch.autograd.grad(InputGradients(num)(network(*first, segments=num), first), first[0])
    network.requires_grad_(True)
    outputs, along = dual.end(network.fold_dual(dual.begin(inputs, loss.slopes(grads)), loss.num_segments))
    loss(outputs, inputs, tangents=along).backward()


def test_operations_of_an_update(tmp_path):
    plan = tiny_plan(tmp_path, 1, ["objective.d_steps=2"], {"generator": zero(0), "discriminator": zero(0)})
    g, d = (count_network(plan, network)[1] for network in ("generator", "discriminator"))
    # G: 2 forward for D, 1 forward and 2 backward; D: 2 steps of 3 over 2 images, then forward and to the images.
    assert count_work(plan)["update_flop"] == (2 + 3) * g + (2 * 3 * 2 + 2) * d
    assert f"{((2 + 3) * g + 14 * d) / 1e9:.3f}" in describe_networks(plan, count_work(plan))


R1, R2 = "r1: {weight: 1, every: 1, method: %s}", "r2: {weight: 1, every: 1}"
R1_OF_A_QUARTER = "r1: {weight: 1, batch_shrink: 4, method: %s}"
PENALTIES = {  # the objective, and the forward passes of D that a double backward and forward mode add to a step
    "r1": (R1, 6, 8),  # of the real images alone, the slope
    "r1 and r2": (f"{R1}, {R2}", 6, 10),
    "gradient penalty": ("gradient_penalty: {weight: 1, method: %s}", 3 + 9, 3 + 15),
    "a finite difference": ("r1: {weight: 1, form: finite_difference}", 3, 3),
    "from both sides": ("r1: {weight: 1, form: finite_difference, antithetic: true}", 6, 6),
    "a finite difference of a quarter": ("r1: {weight: 1, form: finite_difference, batch_shrink: 4}", 3 / 4, 3 / 4),
    "r1 of a quarter": (R1_OF_A_QUARTER, 3 / 4, 6 + 2 / 4),
    "r1 and r2 of a quarter": (f"{R1_OF_A_QUARTER}, r2: {{weight: 1, batch_shrink: 4}}", 6 / 4, 6 + 4 / 4),
    "two kinds": (
        "r1: {weight: 1, form: finite_difference}, gradient_penalty: {weight: 1, method: %s}",
        6 + 12,
        6 + 20,
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", [n if n == "two kinds" else pytest.param(n, marks=pytest.mark.slow) for n in PENALTIES]
)
def test_operations_of_penalties(name, method, tmp_path):
    """Against those of a D step with the penalty, over those of one without."""
    objective, *passes = PENALTIES[name]
    plan = tiny_plan(tmp_path, 1, [f"objective={{{objective.replace('%s', method)}}}"], both(0))
    counted, flop = count_work(plan), count_network(plan, "discriminator")[1]
    expected = passes[METHODS.index(method)] * flop
    assert counted["penalties_flop"] == counted["by_method"]["penalties_flop"][method] == expected
    with META:
        network = build_network(plan.recipe, "discriminator").train()
    num, found = plan.engines["discriminator"].micro_batch_size, []
    without = plan.objective.model_copy(update={"r1": None, "r2": None, "gradient_penalty": None})
    for objective in (plan.objective, without):
        loss = DiscriminatorObjective(stateless_terms(objective), Statistics(META), 0)
        inputs = meta_inputs(plan, "discriminator", num_images(loss.num_segments, num, plan.objective.batch_shrink))
        found.append(operations(partial(d_step, network, loss, inputs, method)) / num)
    # Of the first layer an ordinary pass does not go back to the images.
    assert found[0] - found[1] == pytest.approx(expected, rel=0.05)
    assert found[1] == pytest.approx(6 * flop, rel=0.04)


LAZY = {  # options, and the forward passes of D in the mean update
    "r1 of every second step": (["objective.r1={weight: 1, every: 2}"], 6 / 2),
    "of two steps": (["objective={d_steps: 2, r1: {weight: 1, every: 4, method: forward_mode}}"], 2 * 8 / 4),
    "with a penalty of each step": (["objective={r1: {weight: 1, every: 4}, gradient_penalty: {weight: 1}}"], 12),
}


@pytest.mark.parametrize("name", LAZY)
def test_operations_of_lazy_penalties(name, tmp_path):
    options, passes = LAZY[name]
    plan = tiny_plan(tmp_path, 1, options, both(0))
    assert count_work(plan)["penalties_flop"] == passes * count_network(plan, "discriminator")[1]


def g_pass(network, regularizer, inputs, method):
    """G's passes of one update with path length, as the engines compute them."""
    if method == "double_backward":
        images, styles = regularizer.forward(network, inputs)
        (images.sum() + regularizer.penalty(images, styles, inputs)).backward()
        return
    ahead, rest = network.part(0, regularizer.ahead), network.part(regularizer.ahead, len(network.layers))
    network.requires_grad_(False)
    styles, *others = ahead.fold(*regularizer.taking_part(inputs))
    styles = styles.clone().requires_grad_(True)
    (grads,) = torch.autograd.grad(Probed()(rest(styles, *others), (*others,)), styles)
    network.requires_grad_(True)
    begun = dual.begin(ahead.fold(*inputs), regularizer.direction(grads))
    images, along = dual.end(rest.fold_dual(begun))
    (images.sum() + regularizer.along(along, inputs)).backward()


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("method", METHODS)
def test_operations_of_path_length(method, shrink, tmp_path):
    styles = [option for option in TINY_GAMES["stylegan2"] if not option.startswith("objective")]
    section = f"path_length: {{weight: 1, every: 4, batch_shrink: {shrink}, method: {method}}}"
    plan = tiny_plan(tmp_path, 1, [*styles, f"objective={{loss: non_saturating, {section}}}"], both(0))
    counted = count_work(plan)
    expected = counted["path_length_flop"]
    assert expected == counted["by_method"]["path_length_flop"][method]
    with META:
        network = build_network(plan.recipe, "generator").train()
    num = plan.engines["generator"].micro_batch_size
    inputs = meta_inputs(plan, "generator", num)
    section = plan.recipe.objective.path_length
    regularizer = PathLengthPenalty(section, Statistics(META), META, torch.clone)
    plain = operations(lambda: network(*inputs).sum().backward())
    more = operations(partial(g_pass, network, regularizer, inputs, method)) - plain
    assert more / num / 4 == pytest.approx(expected, rel=0.06)
    flop = counted["generator"]["forward_flop"]
    passes = {"double_backward": 3 / shrink, "forward_mode": 2 / shrink + 3}[method]
    assert expected == pytest.approx(passes * flop / 4, rel=0.01)


def test_both_methods_stand_side_by_side(tmp_path):
    options = ["objective={loss: non_saturating, r1: {weight: 1}, path_length: {weight: 1, every: 1}}"]
    styles = [option for option in TINY_GAMES["stylegan2"] if not option.startswith("objective")]
    plan = tiny_plan(tmp_path, 1, [*styles, *options], {"generator": zero(3), "discriminator": zero(0)})
    counted = count_work(plan)
    d, by = counted["discriminator"]["forward_flop"], counted["by_method"]
    *_, penalties, path_length = describe_networks(plan, counted).splitlines()
    twice, once = 6 * d / 1e9, 8 * d / 1e9
    expected = f"penalties {twice:.3f} of D in the mean update, by a double backward (in forward mode {once:.3f})"
    assert penalties.split() == expected.split()
    twice, once = (by["path_length_flop"][method] / 1e9 for method in METHODS)
    expected = f"path length {once:.3f} of G in the mean update, in forward mode (by a double backward {twice:.3f})"
    assert path_length.split() == expected.split()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gat", "cat"])
def test_operations_of_heads_for_a_teacher(tmp_path, family):
    """A D step that predicts features computes what the plan adds for them, three times for each real image."""
    plan = tiny_plan(tmp_path, 1, [*TINY_GAMES[family], "objective.teacher={path: away.pt}"], both(0))
    with META:
        network = build_network(plan.recipe, "discriminator").train()
    terms = stateless_terms(plan.objective)
    loss = DiscriminatorObjective(terms, Statistics(META), 0)
    inputs = meta_inputs(plan, "discriminator", 8 * loss.num_segments)

    def step(predicts):
        if not predicts:
            without = DiscriminatorObjective([each for each in terms if each.name != "teacher"], Statistics(META), 0)
            return without(network(*inputs, segments=2), inputs)
        outputs, predictions = network.with_predictions(*inputs, num=8, segments=2)
        return loss(outputs, inputs, (predictions, *empty_targets(plan.recipe, None, 8)))

    plain, more = (operations(lambda p=predicts: step(p).backward()) for predicts in (False, True))
    assert more - plain == 8 * 3 * count_heads(plan)


def test_no_line_without_a_penalty(tmp_path):
    plan = tiny_plan(tmp_path, 1, [], both(0))
    *_, update, norms = describe_networks(plan, count_work(plan)).splitlines()
    assert (update[:9], norms[:10]) == ("an update", "batch norm")


@pytest.mark.parametrize("overrides, made", [(["objective.loss=relativistic"], 2), (TINY_GAMES["pix2pix_features"], 1)])
def test_objectives_of_pairs_judge_the_reals_too(overrides, made, tmp_path):
    """Pairs go through G once: D's step and G's update share the images."""
    plan = tiny_plan(tmp_path, 1, overrides, {"generator": zero(0), "discriminator": zero(0)})
    g, d = (count_network(plan, network)[1] for network in ("generator", "discriminator"))
    assert count_work(plan)["update_flop"] == (made + 2) * g + (3 * 2 + 2 * 2) * d
