"""The weight of the adversarial loss: its schedule, the exposed parameter, what is refused, and its memory."""

import pytest
import torch
from torch import nn

from bigsgan import plugins
from bigsgan.adversarial.adaptive_weight import AdaptiveWeight
from bigsgan.adversarial.terms import Own
from bigsgan.config.adversarial_weight import Adaptive, Adversarial
from bigsgan.config.run_plan import plan_run
from bigsgan.engines.exposing import exposed, gradients
from bigsgan.engines.phases import MakesOwnImages, PullsBack, Weighs, game_of, phases_of
from bigsgan.errors import UserError
from bigsgan.monitor import Statistics
from bigsgan.planner.activations import Traces
from bigsgan.planner.phases import _exposed
from tests.image_games import ADAPTIVE, NAMES, Encoder
from tests.tiny import both, stages, tiny_plan, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def given():
    plugins.give([*(f"tests.image_games:{name}" for name in NAMES), f"{__name__}:Idle", f"{__name__}:doubt"])


def test_factor():
    section = Adversarial(weight=0.5, from_nimg=100, ramp_nimg=49)
    assert [section.factor(nimg) for nimg in (0, 99, 100, 124, 149, 10**6)] == [0, 0, 0.01, 0.25, 0.5, 0.5]
    assert Adversarial().factor(0) == 1


def doubt(fake_logits):
    return fake_logits.mean()


class Idle(Encoder):
    """A generator with a module whose result it drops."""

    def __init__(self, image_channels):
        super().__init__(image_channels, 4)
        self.idle, self.image = nn.Linear(1, 1), nn.Upsample(scale_factor=4)

    def forward(self, images, labels, seeds):
        """As the autoencoder of two layers."""
        latents, code, classes = super().forward(images, labels, seeds)
        self.idle(images[:, :1, 0, :1])
        return self.image(latents).mean(1, keepdim=True).expand_as(images), code, classes


class Net(nn.Module):
    """One module is called twice, and one never."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last, self.idle = (nn.Conv2d(3, 3, 1) for _ in range(4))

    def forward(self, x):
        """(N, 3, H, W) -> the same."""
        return self.last(self.twice(self.twice(self.first(x)).tanh()).sin()).tanh()


def test_gradients_by_an_exposed_parameter():
    """They are those of a pass with a whole graph, by a module that is called twice too."""
    network, x = Net(), torch.randn(4, 3, 5, 5)
    for name in ("last.weight", "twice.weight", "twice.bias"):
        parts = [torch.randn(4, 3, 5, 5) for _ in range(2)]
        expected = [torch.autograd.grad(network(x), network.get_parameter(name), part)[0] for part in parts]
        with exposed(network, name) as found:
            images = network(x)
        own = gradients(images, found.copy, torch.cat(parts, dim=1))
        for ours, theirs in zip(own, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert torch.is_grad_enabled()
    assert "forward" not in vars(network.twice)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5])
def test_half_types_hold_gradients_of_any_size(size):
    """Their scale is that of each part; the gradient of zeros is zero."""
    layer, x = nn.Conv2d(3, 3, 1, bias=False).half(), torch.randn(8, 3, 64, 64)
    part = size * torch.randn(8, 3, 64, 64).abs()
    with exposed(layer, "weight") as found:
        images = layer(x.half()).float()
    own, zero = gradients(images, found.copy, torch.cat([part, 0 * part], dim=1))
    expected = torch.einsum("nohw,nihw->oi", part, x)[:, :, None, None]
    assert float((own - expected).norm() / expected.norm()) < 1e-2
    assert not zero.any()


def test_an_overflow_gives_no_weight():
    own = AdaptiveWeight(Adaptive(parameter="x"), 1.0, 1, lambda total: total, Statistics(CPU))
    own.weigh(0, [torch.tensor([torch.inf, 1.0]), torch.ones(2)])
    assert own.weighted(0, torch.ones(1, 2, 1, 1)).isnan().all()


def test_a_shared_parameter_is_refused():
    network = Net()
    network.last.weight = network.first.weight
    for name in ("last.weight", "first.weight"):
        with pytest.raises(UserError, match="is shared by several modules"), exposed(network, name):
            pass


@pytest.mark.parametrize(
    "name, problem", [("weight", "several"), ("other.weight", "no parameter"), ("idle.weight", "does not call")]
)
def test_parameters_that_cannot_be_exposed(name, problem):
    def expose():
        network = Net()
        with exposed(network, name) as found:
            network(torch.zeros(1, 3, 2, 2))
        return found.copy

    with pytest.raises(UserError, match=problem):
        expose()


def test_the_weight_is_that_of_the_mean_gradients():
    """Over two micro-batches on three ranks, which add up to three times this one's; with a limit; by micro-batch."""
    adversarial, rest, seen = torch.randn(2, 7), torch.randn(2, 7), torch.ones(1, 2, 1, 1)

    def weights(section, factor=0.5):
        own = AdaptiveWeight(section, factor, 6, lambda total: total.mul_(3), Statistics(CPU))
        for index in range(2):
            own.weigh(index, [adversarial[index], rest[index]])
        return [float(own.weighted(index, seen)) - 1 for index in range(2)]

    ratio = 0.5 * float(rest.mean(0).norm() / (adversarial.mean(0).norm() + 1e-4))
    assert weights(Adaptive(parameter="x")) == pytest.approx([ratio, ratio])
    assert weights(Adaptive(parameter="x", largest=0.01)) == pytest.approx([0.005, 0.005], abs=1e-6)
    each = [0.5 * float(r.norm() / (a.norm() + 1e-4)) for a, r in zip(adversarial, rest, strict=True)]
    assert weights(Adaptive(parameter="x", over="micro_batch")) == pytest.approx(each)


@pytest.mark.parametrize(
    "old, new, field, problem",
    [
        ("1.module.second", "second", "objective.adversarial.adaptive.parameter", "is of several"),
        ("1.module.second", "third", "objective.adversarial.adaptive.parameter", "is of no parameter"),
        ("l1: 3, ", "", "objective.adversarial.adaptive", "needs a term of G's images in every update"),
        ("weight: 0.7", "weight: -1", "objective.adversarial.weight", "must be"),
        ("1.module.second", "module.idle", "objective.adversarial.adaptive.parameter", "do not depend"),
        ("tests.image_games:divergence", f"{__name__}:doubt", "objective.terms.0.use", "must read images or outputs"),
    ],
)
def test_what_is_refused(tmp_path, old, new, field, problem):
    game = [each.replace(old, new) for each in ADAPTIVE]
    if "idle" in new:
        game = [each.replace("tests.image_games:autoencoder", f"{__name__}:Idle") for each in game]
    recipe = tiny_recipe(tmp_path, *game) if "-1" not in new else None
    with pytest.raises(UserError, match=problem) as caught:
        Own.of(recipe or tiny_recipe(tmp_path, *game), CPU)
    assert caught.value.field == field


def test_pipelines_repeat_passes(tmp_path):
    with pytest.raises(UserError, match=r"must be recompute with objective\.adversarial"):
        plan_run(tiny_recipe(tmp_path, *ADAPTIVE, *stages(2, 1)), 2, tmp_path)


@pytest.mark.parametrize(
    "num_ranks, options, stage, keeps",
    [
        (1, [], 0, True),
        (2, [], 2, True),
        (2, ["engines.generator.ranks=1"], 1, True),
        (2, stages(1, 2), 1, True),
        (1, ["accumulation=2"], 1, False),
        (2, [], 3, False),
        (1, ["engines.generator.activation_checkpointing=true"], 1, False),
        (1, ["engines.generator.compile=layers"], 1, False),
        (2, [*stages(2, 1), "pipeline.generator_phase=recompute"], 1, False),
    ],
)
def test_when_g_keeps_its_graphs(tmp_path, num_ranks, options, stage, keeps):
    """All phases of its update agree on it."""
    phases = phases_of(plan := tiny_plan(tmp_path, num_ranks, [*ADAPTIVE, *options], both(stage)), game_of(plan, 1))
    (made,) = (number for number, phase in enumerate(phases) if isinstance(phase, MakesOwnImages))
    (weighs,) = (phase for phase in phases if isinstance(phase, Weighs))
    (pulls_back,) = (phase for phase in phases if isinstance(phase, PullsBack))
    assert (phases[made].keeps_graphs, phases[made].exposes, weighs.keeps_graphs) == (keeps, not keeps, keeps)
    assert (weighs.graphs_from, pulls_back.graphs_from) == (made, made if keeps else None)


def test_bytes_that_wait(tmp_path):
    """What the exposed layer reads, a map of 4 channels of half the side."""
    plan = tiny_plan(tmp_path, 1, ADAPTIVE, both(1))
    side = plan.recipe.data.network_size.height // 2
    assert _exposed(Traces(), plan, 3) == 3 * 4 * side**2 * 4
