"""On a GPU: networks that are replayed as CUDA graphs train as those that are compiled alone, and are replayed."""

from unittest import mock

import pytest
import torch
from torch._inductor import cudagraph_trees
from torch.torch_version import TorchVersion

from bigsgan.config import NETWORKS, both_engines
from bigsgan.engines.compile_checks import GRAPHS_SINCE
from bigsgan.engines.replays import begin_update
from bigsgan.runtime import comm
from tests import reference
from tests.distributed import scenarios
from tests.tiny import TINY_GAMES, zero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < GRAPHS_SINCE, reason=f"needs torch {GRAPHS_SINCE}"),
    pytest.mark.usefixtures("alone", "exact"),
]

UPDATES = 8
"""Of which the first warms up, the second records, and one with a penalty has a path of its own."""

SAME = 1e-5

TWICE = "weight: 0.2, every: 3, method: double_backward"

GAMES = {
    "plain": [],
    "micro_batches": ["accumulation=2", "objective.d_steps=2", f"objective.r1={{{TWICE}}}"],
    "tangents": ["accumulation=2", "objective.r1={weight: 0.2, every: 3, method: forward_mode}"],
    "reused_fakes": [f"objective={{reuse_fakes: true, d_steps: 2, r1: {{{TWICE}}}}}"],
    "reused_fakes_made_again": ["objective={reuse_fakes: true, lecam: {decay: 0.5}}", "accumulation=2"],
    "orthogonal": ["objective.orthogonal={generator: 1e-2, discriminator: 1e-2}", "accumulation=2"],
    "perceptrons": [*TINY_GAMES["mlp"], "accumulation=2", "objective.d_steps=2"],
}

SINGLE = {"zero": {"reduce_bucket_size": 1}}
"""Each parameter is a group, whose gradient is handed on as it came unless it is copied."""


def trained(overrides, ds, cuda_graphs, unit="whole"):
    """State, means of losses and singular values after some updates; torch's counters; and how often a graph ran."""
    options = both_engines(f"compile={unit}", f"cuda_graphs={cuda_graphs}")
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    run_graph = cudagraph_trees.CUDAGraphNode.run_graph
    with mock.patch.object(cudagraph_trees.CUDAGraphNode, "run_graph", autospec=True, side_effect=run_graph) as replays:
        run = scenarios.build([*overrides, *options], ds)
        by_update = []
        for _ in range(UPDATES):
            before = replays.call_count
            scenarios.update(run, 1)
            by_update.append(replays.call_count - before)
        engines = (run.step.generator, run.step.discriminator)
        begin_update(*engines)
        sigmas = [float(layer.sigma) for engine in engines for layer in engine.network.spectral_layers()]
        means = run.statistics.reduce(comm.sum_over_ranks)
        state = scenarios.merge([scenarios.local_state(run)])
        scenarios.destroy(run)
    return state, means, sigmas, counters["cudagraph_skips"], by_update


def check(overrides, ds, unit="whole", same=SAME):
    state, means, sigmas, skips, replays = trained(overrides, ds, "true", unit)
    expected, wanted, expected_sigmas, _, none = trained(overrides, ds, "false", unit)
    assert (skips, none) == (0, [0] * UPDATES)
    assert replays[-1] > 0, replays
    assert means == pytest.approx(wanted, rel=10 * same, abs=same)
    assert sigmas == pytest.approx(expected_sigmas, rel=same)
    distance, name = reference.worst(state, expected)
    print(f"{distance:.2e} {name}, replays by update {replays}")
    assert distance <= same, name


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", GAMES)
def test_replays_are_the_same_training(stage, name):
    check(GAMES[name], dict.fromkeys(NETWORKS, zero(stage)))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_travel_alone(stage):
    check(GAMES["perceptrons"], dict.fromkeys(NETWORKS, zero(stage, **SINGLE)))


@pytest.mark.parametrize("name", ["micro_batches", "reused_fakes"])
def test_layers_one_by_one(name):
    check(GAMES[name], dict.fromkeys(NETWORKS, zero(0)), "layers")


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16(stage):
    """The same kernels round alike; sums in another order may not."""
    check(GAMES["perceptrons"], dict.fromkeys(NETWORKS, zero(stage, bf16={"enabled": True})), same=1e-3)
