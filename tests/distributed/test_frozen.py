"""Frozen parts of networks at ZeRO 3, of which each rank holds a part."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from bigsgan import checkpoint, plugins
from bigsgan.config import NETWORKS, both_engines
from bigsgan.doctor import agreement
from bigsgan.models.frozen import frozen_parts
from bigsgan.planner.counting import count_work
from tests import distillation, outside
from tests.distillation import DISTILLATION, DistillationReference
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_operations import operations
from tests.distributed.test_planner import COMMON, check
from tests.reference import build_networks
from tests.tiny import both, tiny_plan, tiny_recipe, zero

pytestmark = pytest.mark.slow


class Half(outside.Generator):
    """A generator whose convolutions are frozen behind what it learns."""

    def __init__(self, latent_size, num_classes, resolution, image_channels):
        super().__init__(latent_size, num_classes, resolution, image_channels)
        self.body.requires_grad_(False)


GAME = [f'generator={{family: "{__name__}:Half", latent_size: 12}}', *DISTILLATION]
FROZEN = {
    "generator": {f"layers.0.module.body.{number}.weight" for number in (3, 7)},
    "discriminator": {"layers.0.module.teacher.weight", "layers.1.module.teacher.weight"},
}
"""Those that ranks share: vectors stay whole."""

LAYOUTS = {
    "recomputing": (["engines.discriminator.activation_checkpointing=true", "accumulation=2"], both(3)),
    "on the host": ([], both(3, zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})),
}


@pytest.fixture
def given(ranks):
    names = [f"{__name__}:Half", *(f"tests.distillation:{name}" for name in distillation.NAMES)]
    plugins.give(names)

    def start(num):
        ranks(num).run(plugins.give, names)
        return ranks(num)

    return start


@pytest.mark.parametrize("name", ["recomputing", pytest.param("on the host", marks=pytest.mark.nightly)])
def test_updates(given, name):
    overrides, ds = LAYOUTS[name]
    with mock.patch.object(agreement, "Reference", DistillationReference):
        check_updates(given(2), [*GAME, *overrides], ds, 2)


def trained(more, ds, directory, found, num_updates):
    """Norms and the state after some updates and a save, and what an engine has of the frozen tensors beside them."""
    run = scenarios.build([*GAME, *more], ds, checkpoint.newest(Path(directory)) if found else None)
    norms = []
    for _ in range(num_updates):
        scenarios.update(run, 1)
        norms.append([float(getattr(run.step, network).grad_norm) for network in NETWORKS])
    state = scenarios.local_state(run)
    scenarios.save(run, Path(directory))
    beside = {}
    for network in NETWORKS:
        engine = getattr(run.step, network)
        updated = {piece.name for shard in engine.shards() for piece in shard.pieces}
        beside[network] = {*updated, *engine.network.state_dict(), *run.ema.buffers} & FROZEN[network]
        shares = bool(more) or ds[network]["zero_optimization"]["stage"] == 3
        assert frozen_parts(engine.network).keys() == (FROZEN[network] if shares else set())
    scenarios.destroy(run)
    return norms, state, beside


@pytest.mark.parametrize(
    "stage, more",
    [(3, []), (1, both_engines("frozen.sharded=true", "frozen.persistence_threshold=0"))],
    ids=["ZeRO 3", "ZeRO 1 that shares them"],
)
def test_they_stay_bit_for_bit_in_any_layout(given, tmp_path, stage, more):
    """Norms are those of whole networks, and resumes in other layouts give back what the constructors made."""
    begun = dict(zip(NETWORKS, build_networks(tiny_recipe(tmp_path, *GAME)), strict=True))
    norms = []
    for num, num_updates in ((2, 2), (1, 1), (2, 0)):
        given_more, ds = (more, both(stage)) if num == 2 else ([], both(0))
        found = given(num).run(trained, given_more, ds, str(tmp_path / "tags"), bool(norms), num_updates)
        merged = scenarios.merge([state for _, state, _ in found])
        for network, names in FROZEN.items():
            state = begun[network].state_dict()
            for entry in (network, "average") if network == "generator" else (network,):
                assert all(torch.equal(merged[entry][n].flatten(), state[n].flatten()) for n in names), (entry, num)
        if num == 2:
            assert not any(names for _, _, beside in found for names in beside.values())
        norms += found[0][0]
    (whole,) = given(1).run(trained, [], both(0), str(tmp_path / "whole"), False, 3)
    assert torch.tensor(norms) == pytest.approx(torch.tensor(whole[0]), rel=1e-3)


class Taught(torch.nn.Module):
    """A small D beside a teacher that is many times as large, and is asked where G learns."""

    def __init__(self, resolution, image_channels, num_classes, width=512, depth=8):
        super().__init__()
        size = image_channels * resolution**2
        self.first, self.last = torch.nn.Linear(size, 64), torch.nn.Linear(64, 1)
        layers = [torch.nn.Linear(size, width), torch.nn.SiLU()]
        layers += [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.SiLU())]
        self.teacher = torch.nn.Sequential(*layers, torch.nn.Linear(width, size)).requires_grad_(False)

    def forward(self, images, labels):
        """(N, C, R, R), (N,) -> (N, 1), (N, C * R * R)."""
        images = images.flatten(1)
        logits = self.last(torch.nn.functional.silu(self.first(images)))
        if not images.requires_grad:
            return logits, torch.zeros_like(images)
        with torch.no_grad():
            target = self.teacher(images)
        return logits, (images - target).square()


def matching(fake_matching):
    """For G."""
    return fake_matching.mean()


TAUGHT = [
    *COMMON,
    "generator={family: mlp, latent_size: 64, width: 128, depth: 2}",
    f'discriminator={{family: "{__name__}:Taught", outputs: [matching]}}',
    f"objective={{terms: [{{use: '{__name__}:matching'}}]}}",
    "batch=32",
]


@pytest.fixture
def taught(ranks):
    names = [f"{__name__}:Taught", f"{__name__}:matching"]
    plugins.give(names)
    for num in (1, 2):
        ranks(num).run(plugins.give, names)


@pytest.mark.parametrize(
    "name, ds", [pytest.param("fp32", {}, marks=pytest.mark.nightly), ("bf16", {"bf16": {"enabled": True}})]
)
def test_memory_is_that_of_a_plan(ranks, taught, tmp_path, name, ds):
    check(ranks, tmp_path, f"a teacher, ZeRO 3 in {name}", TAUGHT, zero(3, **ds))


def test_an_update_computes_what_a_plan_counts(ranks, taught, tmp_path):
    ds = dict.fromkeys(NETWORKS, zero(1))
    (computed,) = ranks(1).run(operations, TAUGHT, ds)
    counted = count_work(tiny_plan(tmp_path, 1, TAUGHT, ds))
    assert counted["discriminator"]["forward_flop"] < counted["update_flop"] / 10
    assert computed / 32 == pytest.approx(counted["update_flop"], rel=0.05)
