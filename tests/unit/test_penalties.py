"""Penalties and terms of pairs that learn from more than one gradient, against their definitions on numbers by hand."""

import math
from dataclasses import replace

import pytest
import torch

from bigsgan.adversarial.objectives import GeneratorObjective
from bigsgan.adversarial.terms import image_gradient, stateless_terms
from bigsgan.adversarial.terms.lecam import LeCam
from bigsgan.adversarial.terms.path_length import NAME, PathLengthPenalty
from bigsgan.adversarial.terms.reconstruction import reconstruction_terms
from bigsgan.bench.arithmetic import arithmetic_of, matrix_precision
from bigsgan.commands.planning import plan_on_ranks
from bigsgan.config import NETWORKS
from bigsgan.config import objective as sections
from bigsgan.config.objective import Objective, PathLength
from bigsgan.engines.build import on_this_machine
from bigsgan.models import noise
from bigsgan.models.build import network_on_meta
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics
from bigsgan.planner.balance import one_of_each, plan_balanced
from bigsgan.runtime import comm
from tests.tiny import TINY_GAMES, tiny_plan, tiny_recipe, zero
from tests.unit.test_objectives import SHAPE, coefficients, labelled, made, means, penalized_loss, quadratic

CPU = torch.device("cpu")

BY_ITSELF = {(3, 1), (0, 2), (1, 2)}
"""ZeRO stages and pipeline stages at which ``auto`` is forward mode: docs/explanation/penalties.md."""


@pytest.mark.parametrize(
    "stage, num_stages, unit",
    [
        *((0, 1, "none"), (1, 1, "none"), (2, 1, "none"), (3, 1, "none"), (0, 2, "none"), (1, 2, "none")),
        *((0, 1, "whole"), (1, 1, "whole"), (2, 1, "layers")),
    ],
)
@pytest.mark.parametrize("network, other", [NETWORKS, NETWORKS[::-1]])
def test_how_a_penalty_is_differentiated(tmp_path, network, other, stage, num_stages, unit):
    """Each network by its own layout, compiled or not, unless it is asked for; R1 for D, path length for G."""
    penalty = {"generator": "path_length: {weight: 1, ", "discriminator": "r1: {weight: 1, "}
    styles = [option for option in TINY_GAMES["stylegan2"] if not option.startswith("objective")]
    for method in ("auto", "double_backward", "forward_mode"):
        if method == "double_backward" and num_stages == 2:
            continue  # refused: test_bad_games.py
        options = [*styles, f"objective={{loss: non_saturating, {penalty[network]}method: {method}}}}}"]
        options += [f"engines.{network}.pipeline_stages={num_stages}", f"engines.{network}.compile={unit}"]
        plan = tiny_plan(tmp_path, 2, options, {network: zero(stage), other: zero(1)})
        assert plan.differentiates_forward(network) == (
            method == "forward_mode" or (method == "auto" and (stage, num_stages) in BY_ITSELF)
        )
        assert not plan.differentiates_forward(other)


@pytest.mark.parametrize(
    "family, method, expected",
    [
        ("stylegan2", "auto", True),
        ("biggan_light", "auto", True),
        ("dcgan", "auto", True),
        ("dcgan", "double_backward", False),
        ("gat", "auto", False),
        ("mlp", "auto", False),
        ("mlp", "forward_mode", True),
    ],
)
def test_convolutions_are_differentiated_forward_on_gpus(tmp_path, family, method, expected):
    """An update with a double backward took 1.2 to 11 times as long on an H200."""
    styles = ["objective.path_length={weight: 1, method: auto}"] if family == "stylegan2" else []
    options = [*TINY_GAMES[family], f"objective.r1={{weight: 1, method: {method}}}", *styles]
    plan = tiny_plan(tmp_path, 1, options, {network: zero(1) for network in NETWORKS})
    on_gpus = replace(plan, on_gpus=True)
    assert on_gpus.differentiates_forward("discriminator") == expected
    assert plan.differentiates_forward("discriminator") == (method == "forward_mode")
    assert not on_gpus.differentiates_forward("generator")


@pytest.mark.parametrize("network, other", [NETWORKS, NETWORKS[::-1]])
def test_a_network_that_recomputes_is_differentiated_forward(tmp_path, network, other):
    """A double backward would keep all of its activations."""
    styles = [option for option in TINY_GAMES["stylegan2"] if not option.startswith("objective")]
    game = "objective={loss: non_saturating, path_length: {weight: 1}, r1: {weight: 1}}"
    options = [*styles, game, f"engines.{network}.activation_checkpointing=true"]
    plan = tiny_plan(tmp_path, 1, options, {each: zero(1) for each in NETWORKS})
    assert plan.differentiates_forward(network)
    assert not plan.differentiates_forward(other)
    penalty = {"generator": "path_length", "discriminator": "r1"}[network]
    twice = [*options, f"objective.{penalty}.method=double_backward"]
    asked = tiny_plan(tmp_path, 1, twice, {each: zero(1) for each in NETWORKS})
    assert not asked.differentiates_forward(network)


def test_a_run_asks_its_device_how_to_differentiate(tmp_path, monkeypatch):
    plan = tiny_plan(tmp_path, 1, ["objective.r1={weight: 1}"], {network: zero(1) for network in NETWORKS})
    assert not on_this_machine(replace(plan, on_gpus=True)).on_gpus
    monkeypatch.setattr(comm, "device", lambda: torch.device("cuda", 0))
    assert on_this_machine(plan).on_gpus


@pytest.mark.parametrize("family", TINY_GAMES)
def test_families_say_whether_they_convolve(tmp_path, family):
    plan = tiny_plan(tmp_path, 1, TINY_GAMES[family], {network: zero(1) for network in NETWORKS})
    shapes = [parameter.shape for parameter in network_on_meta(plan.recipe, "discriminator").parameters()]
    assert plan.recipe.discriminator.convolves == any(len(shape) == 4 for shape in shapes)


def test_commands_plan_for_gpus(tmp_path):
    recipe = tiny_recipe(tmp_path)
    assert plan_on_ranks(recipe, 2, tmp_path / "recipe.yaml").on_gpus
    assert plan_balanced(recipe, 2, tmp_path)[0].on_gpus
    assert one_of_each(recipe, tmp_path).on_gpus
    chosen = plan_balanced(tiny_recipe(tmp_path, "engines.generator.ranks=auto"), 4, tmp_path)[0]
    assert chosen.is_split
    assert chosen.on_gpus


def test_operations_are_those_of_the_device(tmp_path, monkeypatch):
    """Of one rank, on which forward mode takes more of them."""
    plan = tiny_plan(tmp_path, 1, ["objective.r1={weight: 1}"], {network: zero(1) for network in NETWORKS})
    counted = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(comm, "device", lambda device=device: torch.device(device))
        peaks = {matrix_precision("fp32", torch.device(device)): 1.0}
        counted[device] = arithmetic_of(plan, peaks).flops
    assert counted["cpu"] < counted["cuda"]


def alone(vector):
    """The sum over a single rank."""
    return vector


def test_gradient_penalty_of_a_quadratic_discriminator():
    objective, statistics = made(loss="wasserstein", gradient_penalty={"weight": 7.0})
    a, real, fake = coefficients(), labelled("real", 5, 1), labelled("fake", 5, 2)
    share = torch.linspace(0.1, 0.9, 5).view(5, 1, 1, 1)
    value = penalized_loss(
        objective, lambda x: quadratic(a, x), objective.batch(real, fake, {"gradient_penalty": share})
    )
    between = share * real[0] + (1 - share) * fake[0]
    norms = (2 * a * between).square().sum(dim=(1, 2, 3)).sqrt()
    penalty = 7 * (norms - 1).square().mean()
    expected = (quadratic(a, fake[0]) - quadratic(a, real[0])).mean() + penalty
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    grad, expected_grad = (torch.autograd.grad(v, a)[0] for v in (value, expected))
    assert torch.allclose(grad, expected_grad, rtol=1e-4)
    assert means(statistics)["penalty/gradient_penalty"] == pytest.approx(penalty.item(), rel=1e-5)


def test_lecam_keeps_logits_near_their_averages():
    anchors = LeCam(sections.LeCam(weight=1, decay=0.75), CPU, alone)
    real, fake = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 0.0])
    assert anchors.value(real, fake) == 0  # nothing is known yet
    anchors.observe(real, fake)
    anchors.finish_update(0, applied=True)  # averages 2 and -0.5
    assert anchors.value(real, fake).item() == pytest.approx((1.5**2 + 3.5**2) / 2 + (3.0**2 + 2.0**2) / 2)
    assert anchors.value(torch.tensor([-1.0]), torch.tensor([4.0])) == 0
    anchors.observe(torch.tensor([6.0]), torch.tensor([-4.5]))
    anchors.finish_update(1, applied=False)  # a skipped update teaches nothing
    anchors.observe(torch.tensor([4.0]), torch.tensor([-2.5]))
    anchors.finish_update(2, applied=True)  # 0.75 * 2 + 0.25 * 4 = 2.5, and -1
    assert anchors.value(real, fake).item() == pytest.approx((2.0**2 + 4.0**2) / 2 + (3.5**2 + 2.5**2) / 2)


@pytest.mark.parametrize("lost", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("side", ["real", "fake"])
def test_lecam_keeps_its_averages_where_only_an_earlier_step_of_d_was_skipped(lost, side):
    anchors = LeCam(sections.LeCam(weight=1, decay=0.75), CPU, alone)
    overflowed = torch.tensor([lost, 1.0])
    real, fake = (overflowed, torch.ones(2)) if side == "real" else (torch.ones(2), overflowed)
    for known in ([0, 0, 0], [2, -0.5, 1]):
        anchors.observe(real, fake)
        anchors.observe(torch.tensor([4.0]), torch.tensor([-2.5]))
        anchors.finish_update(0, applied=True)
        assert anchors.state()["anchors"].tolist() == known
        anchors.observe(torch.tensor([2.0]), torch.tensor([-0.5]))
        anchors.finish_update(1, applied=True)


@pytest.mark.parametrize("shrink", [1, 2])
def test_path_length_of_a_linear_generator(shrink):
    """As NVlabs' loss: the mean length moves first, by the lengths at hand, and is then held constant."""
    statistics = Statistics(CPU)
    section = PathLength(weight=3, every=4, decay=0.5, batch_shrink=shrink)
    penalty = PathLengthPenalty(section, statistics, CPU, alone)
    matrix = torch.randn(6, math.prod(SHAPE), generator=torch.Generator().manual_seed(0), requires_grad=True)
    seeds = torch.tensor([5, 6, 7, 8])
    probe = noise.normal(seeds[::shrink], 2**32, SHAPE).flatten(1) / 2  # the root of 2 x 2 pixels
    lengths = (probe @ matrix.T).square().sum(dim=1).sqrt()  # of one style vector as of each of two alike
    pl_mean = torch.zeros([])
    for update in (0, 4):
        network = LinearStyles(matrix)
        inputs = (torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1), requires_grad=True), seeds)
        images, styles = penalty.forward(network, inputs)
        assert torch.equal(images, network(*inputs))
        value = penalty.penalty(images, styles, inputs)
        pl_mean = pl_mean.lerp(lengths.mean(), 0.5).detach()
        expected = (lengths - pl_mean).square().mean()
        assert value.item() == pytest.approx(4 * 3 * expected.item(), rel=1e-5)
        grad, expected_grad = (torch.autograd.grad(v, matrix, retain_graph=True)[0] for v in (value, 12 * expected))
        assert torch.allclose(grad, expected_grad, rtol=1e-4, atol=1e-5)
        assert means(statistics)[NAME] == pytest.approx(3 * expected.item(), rel=1e-5)
        penalty.finish_update(update, applied=True)
        assert penalty.state()["average"].item() == pytest.approx(pl_mean.item(), rel=1e-5)
    assert [update for update in range(9) if penalty.is_due(update)] == [0, 4, 8]


def test_the_mean_length_moves_with_the_micro_batches_of_all_ranks_and_once_an_update():
    matrix = torch.eye(6, math.prod(SHAPE))
    seeds, styles = torch.arange(4), torch.ones(4, 2, 6, requires_grad=True)
    lengths = (noise.normal(seeds, 2**32, SHAPE).flatten(1) / 2 @ matrix.T).square().sum(dim=1).sqrt()

    def other_rank(vector):  # whose two samples a micro-batch have lengths of 10
        return vector + torch.tensor([20.0, 2.0]) * (vector[1:] / 2)

    penalty = PathLengthPenalty(PathLength(weight=1, every=1, decay=0.25), Statistics(CPU), CPU, other_rank)
    for update, applied in enumerate((False, True)):  # the first is skipped, and teaches nothing
        seen = []
        for part in (slice(0, 2), slice(2, 4)):
            inputs = (styles[part], seeds[part])
            value = penalty.penalty(*penalty.forward(LinearStyles(matrix), inputs), inputs)
            seen += [*lengths[part].tolist(), 10.0, 10.0]
            mean = 0.25 * sum(seen) / len(seen)
            assert value.item() == pytest.approx((lengths[part] - mean).square().mean().item(), rel=1e-5)
        penalty.finish_update(update, applied=applied)
        assert penalty.state()["average"].item() == pytest.approx(mean if applied else 0.0)


class LinearStyles(LayerStack):
    """Styles (n, L, W), seeds (n,) -> images: the sum over the styles times a matrix."""

    def __init__(self, matrix):
        super().__init__([Styles(), Product(matrix)])


class Styles(torch.nn.Module):
    def forward(self, styles, seeds):
        return styles * 1, seeds


class Product(torch.nn.Module):
    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, styles, seeds):
        return ((styles.sum(dim=1) @ self.matrix).view(-1, *SHAPE),)


def test_reconstruction_is_the_gradient_of_the_mean_absolute_difference():
    images, targets = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0))
    images.requires_grad_()
    statistics = Statistics(CPU)
    statistics.declare("loss/l1")
    loss = (images - targets).abs().mean()
    (expected,) = torch.autograd.grad(10 * loss, images)
    (term,) = reconstruction_terms(Objective(l1=10.0))
    inputs = {"images": images, "real_images": targets}
    torch.testing.assert_close(image_gradient([term], inputs, statistics), expected)
    assert means(statistics)["loss/l1"] == pytest.approx(loss.item())


def test_feature_matching_is_a_mean_over_layers():
    statistics = Statistics(CPU)
    objective = GeneratorObjective(
        stateless_terms(Objective(loss="least_squares", feature_matching=3.0)), statistics, pairs=True
    )
    features = [torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[5.0], [4.0]])]  # real before fake
    for feature in features:
        feature.requires_grad_()
    logits = torch.tensor([0.5, 0.25])  # of a real and a fake image
    value = objective(logits, (), features)
    matching = ((3 + 2) / 2 + 1) / 2
    assert value.item() == pytest.approx(0.75**2 / 2 + 3 * matching)
    assert means(statistics)["loss/feature_matching"] == pytest.approx(matching)
    grads = torch.autograd.grad(value, features)
    assert [grad.tolist() for grad in grads] == [[[0, 0], [0.75, -0.75]], [[0], [-1.5]]]
