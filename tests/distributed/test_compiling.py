"""Training through torch.compile is the same training."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from bigsgan.config import both_engines
from bigsgan.engines import compiling
from bigsgan.models import dual
from bigsgan.models.network import LayerStack
from bigsgan.training.recovery import first_not_finite
from tests.distributed import scenarios
from tests.distributed.test_equivalence import PENALTIES, check
from tests.tiny import TINY_GAMES, both, stages, zero


def compiled(unit):
    return both_engines(f"compile={unit}")


def num_frames(overrides, ds):
    """How much torch has compiled after an update, after another, and after samples in a number of their own."""
    counters = torch._dynamo.utils.counters["frames"]
    torch.compiler.reset()
    counters.clear()
    run = scenarios.build(overrides, ds)
    found = []
    for _ in range(3):
        scenarios.update(run, 1)
        found.append(counters["ok"])
    inputs = run.source.phase("standing", (0,), run.step._sources.slices["generator"]["generator"])(0)
    run.step.generator.infer_everywhere(tuple(tensor[:1] for tensor in inputs))
    found.append(counters["ok"])
    scenarios.destroy(run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit, stage", [pytest.param("layers", 2, marks=pytest.mark.nightly), ("whole", 1), ("layers", 3)]
)
def test_small_networks_are_the_same(ranks, unit, stage):
    """Where R1 is due, which differentiates twice, the update is not compiled."""
    check(ranks(2), [*TINY_GAMES["mlp"], "accumulation=2", *PENALTIES["exact"], *compiled(unit)], both(stage))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["layers", "whole"])
def test_stages_are_the_same(ranks, unit):
    """R1 carries tangents, and the updates beside it do not."""
    options = [*TINY_GAMES["mlp"], "accumulation=2", *PENALTIES["exact"], *compiled(unit)]
    check(ranks(2), [*options, *stages(2, 2)], both(1))


LARGE = {
    "ZeRO 3": ([], 3),
    "stages": (stages(2, 2), 1),
    "recomputed": (both_engines("activation_checkpointing=true"), 3),
}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "family, layout",
    [("biggan", "ZeRO 3"), ("biggan", "stages"), *itertools.product(["gat", "r3gan", "stylegan2"], LARGE)],
)
def test_layouts_of_large_networks_are_the_same(ranks, family, layout):
    own, stage = LARGE[layout]
    check(ranks(2), [*TINY_GAMES.get(family, []), "accumulation=2", *own, *compiled("layers")], both(stage))


@pytest.mark.nightly
def test_penalties_in_the_backward_pass_have_the_losses_scale(ranks):
    """Orthogonal regularization adds to gradients there; half as much where there are two micro-batches."""
    options = [*TINY_GAMES["dcgan_spectral"], "objective.orthogonal.discriminator=0.1", "accumulation=2"]
    check(ranks(2), [*options, *compiled("layers")], both(1))


@pytest.mark.slow
def test_what_is_not_finite_is_found_in_its_layer():
    torch.compiler.reset()
    stack = LayerStack([Halved(), Inverted(), Halved()])
    run = compiling.passes(stack, "whole")[0]
    assert run(torch.ones(2)).tolist() == [1.0, 1.0]
    with first_not_finite({"generator": SimpleNamespace(network=stack)}) as found:
        run(torch.zeros(2))
    ((_, text),) = found
    assert text.startswith("first in the output of layer 1 of the generator (Inverted): 2 of 2 numbers")


class Halved(torch.nn.Module):
    def forward(self, x):
        return (x / 2,)


class Inverted(torch.nn.Module):
    def forward(self, x):
        return (1 / x,)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("unit", ["layers", "whole"])
def test_biggan_is_the_same(ranks, unit):
    check(ranks(2), ["accumulation=2", *PENALTIES["exact"], *compiled(unit)], both(1))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["stylegan2", "r3gan"])
def test_layers_that_are_recomputed_are_the_same(ranks, family):
    recomputing = both_engines("activation_checkpointing=true")
    check(ranks(2), [*TINY_GAMES[family], "accumulation=2", *recomputing, *compiled("layers")], both(1))


needs_dual = pytest.mark.skipif(
    TorchVersion(torch.__version__) < compiling.DUAL_SINCE, reason=f"needs torch {compiling.DUAL_SINCE}"
)
TANGENTS = ["accumulation=2", "objective.r1={weight: 0.1, every: 2, method: forward_mode}"]


def cells():
    """Of passes with tangents; batch norm of ``dcgan`` is over ranks, ``gat`` has attention."""
    for game, unit, stage in [("mlp", "whole", 0), ("dcgan", "layers", 1)]:
        yield pytest.param(game, unit, stage, marks=pytest.mark.slow)
    for game in ("biggan", "dcgan_spectral", "r3gan", "stylegan2", "gat"):
        for unit, stage in (("layers", 1), ("whole", 2)):
            yield pytest.param(game, unit, stage, marks=pytest.mark.nightly)


@needs_dual
@pytest.mark.timeout(600)
@pytest.mark.parametrize("game, unit, stage", [*cells()])
def test_passes_with_tangents_are_the_same(ranks, game, unit, stage):
    check(ranks(2), [*TINY_GAMES.get(game, []), *TANGENTS, f"engines.discriminator.compile={unit}"], both(stage))


@needs_dual
@pytest.mark.slow
def test_so_they_are_beside_a_network_at_zero_3(ranks):
    """Whose engine replaces the linear maps of all networks of the process."""
    ds = {"generator": zero(3), "discriminator": zero(1)}
    check(ranks(2), [*TINY_GAMES["mlp"], *TANGENTS, "engines.discriminator.compile=whole"], ds)


def num_graphs(overrides, ds, updates):
    """How many graphs torch has made after each of some updates, and why it left something out of them."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    run, found = scenarios.build(overrides, ds), []
    for _ in range(updates):
        scenarios.update(run, 1)
        found.append(counters["stats"]["unique_graphs"])
    scenarios.destroy(run)
    return found, dict(counters["graph_break"])


@needs_dual
@pytest.mark.slow
def test_passes_with_tangents_are_compiled_once(ranks):
    """Real images with a penalty go through D as judged ones do, then with tangents; without one it trains as usual."""
    options = [*TINY_GAMES["mlp"], *TANGENTS, "engines.discriminator.compile=whole"]
    for found, _ in ranks(2).run(num_graphs, options, both(1), 4):
        assert found == [2, 3, 3, 3]


def test_older_torch_computes_passes_with_tangents_as_they_are(caplog):
    stack = LayerStack([Halved(), Inverted()])
    with (
        mock.patch.object(torch, "__version__", "2.13.0+cpu"),
        mock.patch.object(torch, "compile", side_effect=AssertionError),
    ):
        compiling._warn_of_old_torch.cache_clear()
        run = compiling.compiled_dual(stack, "whole")
        _, tangents = dual.end(run(dual.begin((torch.full((1,), 4.0),), torch.full((1,), 3.0)), 1))
    assert tangents.tolist() == [-3 / 8]  # (1 / (x / 2))' = -2 / x^2
    assert [record.getMessage() for record in caplog.records] == [
        "torch 2.13.0+cpu: passes with tangents are compiled from 2.15 on"
    ]


@pytest.mark.slow
def test_what_was_compiled_serves_the_next_updates(ranks):
    for found in ranks(2).run(num_frames, [*TINY_GAMES["mlp"], *compiled("whole")], both(1)):
        assert 2 <= found[0] == found[1] == found[2] == found[3]
    for found in ranks(2).run(num_frames, TINY_GAMES["mlp"], both(1)):
        assert found == [0] * 4


def found_in_cache(overrides, ds, directory):
    """Graphs that a run's updates compiled, and those that it found compiled, on this rank."""
    counters = torch._dynamo.utils.counters
    torch.compiler.reset()
    counters.clear()
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=directory):
        run = scenarios.build(overrides, ds)
        scenarios.update(run, 2)
        scenarios.destroy(run)
    torch.compiler.reset()
    return [counters["inductor"][f"fxgraph_cache_{found}"] for found in ("miss", "hit")]


@pytest.mark.slow
def test_gathers_lie_outside_of_graphs(ranks):
    """ZeRO 3 has as many graphs as ZeRO 1, and none after the first update."""
    options = [*TINY_GAMES["mlp"], *compiled("layers")]
    at_1, at_3 = (ranks(2).run(num_graphs, options, both(stage), 3) for stage in (1, 3))
    assert at_3 == at_1
    assert all(not breaks and len(set(found)) == 1 for found, breaks in at_3)


@pytest.mark.parametrize(
    "family, unit",
    [
        pytest.param("mlp", "whole", marks=pytest.mark.slow),
        pytest.param("dcgan_spectral", "layers", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_a_host_compile_each_graph_once(family, unit, ranks, tmp_path):
    options = [*TINY_GAMES[family], *compiled(unit)]
    (misses, hits), (others, found) = ranks(2).run(found_in_cache, options, both(1), str(tmp_path))
    assert misses + hits == others + found > 0
    assert 0 < misses + others <= misses + hits  # fewer where layers of one rank are alike, too
    again = ranks(2).run(found_in_cache, options, both(1), str(tmp_path))
    assert [rank[0] for rank in again] == [0, 0]
    assert list(tmp_path.glob("bigsgan_*.lock"))
