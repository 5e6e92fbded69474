"""Networks that are replayed as CUDA graphs: what is asked of torch, and that nothing is used once it is written over.

There are no CUDA graphs here. What stands for them keeps all that passes yield, images, logits, singular values and
gradients, in a pool, which it fills with NaN at each mark: who still looks there sees it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.utils._pytree as pytree

from bigsgan.config import NETWORKS
from bigsgan.engines import compile_checks, compiling
from bigsgan.engines.deepspeed.gradient_groups import GradientGroup
from bigsgan.engines.replays import begin_update
from bigsgan.models.layers import SpectralLayer
from bigsgan.models.network import LayerStack
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import SAME
from tests.tiny import TINY_GAMES, both

UPDATES = 4


class Pool:
    """Takes the place of torch.compile and of its marks.

    Attributes:
        events: ``mark`` and ``pass``, in order.
        held: Gradients of parameters that were there at marks.
    """

    def __init__(self, marks_each_pass=False):
        self.events, self.held, self._storages = [], 0, []
        self._parameters, self._marks_each_pass = [], marks_each_pass

    def keep(self, *tensors):
        self._storages += [tensor.untyped_storage() for tensor in tensors if tensor is not None]

    def mark(self):
        self.events.append("mark")
        self.held += sum(parameter.grad is not None for parameter in self._parameters)
        self._write_over()

    def compile(self, function, dynamic, fullgraph, mode=None):
        assert dynamic is False
        module = getattr(function, "__self__", function)  # whose method it may be
        self._parameters += list(module.parameters())
        if mode is None:
            return function
        layers = [layer for layer in module.modules() if isinstance(layer, SpectralLayer)]

        def run(*inputs, **options):
            self.events.append("pass")
            if self._marks_each_pass:
                self._write_over()
            leaves, structure = pytree.tree_flatten((inputs, options))
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            made = []

            def call(*leaves):
                inputs, options = pytree.tree_unflatten(leaves, structure)
                outputs, shape = pytree.tree_flatten(function(*inputs, **options))
                made.append(shape)
                return outputs

            outputs = Replay.apply(self, call, len(leaves), *leaves, *parameters)
            for layer in layers:
                layer.sigma = layer.sigma.clone()
                self.keep(layer.sigma)
            return pytree.tree_unflatten(outputs, made[0])

        return run

    def _write_over(self):
        for storage in self._storages:
            storage.fill_(255)  # NaN in every type of floating point
        self._storages.clear()


class Replay(torch.autograd.Function):
    """A pass whose outputs and gradients lie in the pool."""

    @staticmethod
    def forward(ctx, pool, call, num_inputs, *given):
        inputs = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in given[:num_inputs]
        ]
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            ctx.outputs = call(*inputs)
        ctx.pool, ctx.leaves = pool, [*inputs, *given[num_inputs:]]
        copies = [output.detach().clone() for output in ctx.outputs]
        ctx.mark_non_differentiable(*(copy for copy in copies if not copy.is_floating_point()))
        pool.keep(*copies)
        return tuple(copies)

    @staticmethod
    def backward(ctx, *grads):
        wanted = [leaf for leaf in ctx.leaves if getattr(leaf, "requires_grad", False)]
        pairs = [(output, grad) for output, grad in zip(ctx.outputs, grads, strict=True) if output.requires_grad]
        outputs, arrived = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, arrived, allow_unused=True))
        grads = [next(found) if getattr(leaf, "requires_grad", False) else None for leaf in ctx.leaves]
        ctx.pool.keep(*grads)
        return None, None, None, *grads


@contextmanager
def replaying(pool):
    """Let engines be built as on a GPU."""
    cuda = SimpleNamespace(device_name=lambda: "cuda")
    compiler = SimpleNamespace(
        compile=pool.compile,
        are_deterministic_algorithms_enabled=torch.are_deterministic_algorithms_enabled,
        __version__="2.15.0",
    )
    with (
        mock.patch.object(compiling, "torch", compiler),
        mock.patch.object(compile_checks, "torch", SimpleNamespace(device=torch.device, __version__="2.15.0")),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", pool.mark),
        mock.patch.object(compile_checks, "get_accelerator", return_value=cuda),
        mock.patch.object(compile_checks, "has_triton", return_value=True),
    ):
        yield pool


def replayed(networks=NETWORKS):
    keys = ("compile=whole", "cuda_graphs=true")
    return [f"engines.{network}.{key}" for network in networks for key in keys]


def trained(overrides, ds, marks_each_pass=False):
    """State after some updates, what reports show, and what is to be known of the replays."""
    with replaying(Pool(marks_each_pass)) as pool:
        run = scenarios.build(overrides, ds)
        scenarios.update(run, UPDATES)
        engines = (run.step.generator, run.step.discriminator)
        begin_update(*engines)
        sigmas = [float(layer.sigma) for engine in engines for layer in engine.network.spectral_layers()]
        found = {
            "state": scenarios.local_state(run), "sigmas": sigmas, "means": run.statistics.reduce(lambda total: total),
            "held": pool.held, "events": pool.events, "skipped": [engine.outcomes.num_skipped for engine in engines],
        }  # fmt: skip
        scenarios.destroy(run)
    return found


def check(pool, overrides, ds, networks=NETWORKS):
    """What is written over at each mark changes nothing."""
    results, plain = (pool.run(trained, [*overrides, *extra], ds) for extra in (replayed(networks), []))
    for found, wanted in zip(results, plain, strict=True):
        assert ("pass" in found["events"], wanted["events"]) == (True, [])
        assert (found["held"], found["skipped"]) == (0, [0, 0])
        assert found["sigmas"] == pytest.approx(wanted["sigmas"], rel=1e-5)
        assert found["means"] == pytest.approx(wanted["means"], rel=1e-4, abs=1e-5)
    states, expected = (scenarios.merge([found["state"] for found in each]) for each in (results, plain))
    distance, name = reference.worst(states, expected)
    assert distance <= SAME, name


GAMES = {
    "tangents": ["accumulation=2", "objective.d_steps=2", "objective.r1={weight: 0.2, every: 3, method: forward_mode}"],
    "micro_batches": ["accumulation=2", "objective.d_steps=2", "objective.r1={weight: 0.2, every: 3}"],
    "reused_fakes": ["objective={reuse_fakes: true, d_steps: 2}"],
    "reused_fakes_made_again": ["objective={reuse_fakes: true, lecam: {decay: 0.5}}", "accumulation=2"],
    "orthogonal": ["objective.orthogonal={generator: 1e-2, discriminator: 1e-2}", "accumulation=2"],
    "clipped": ["optimizer.generator.clip_norm=0.1", "optimizer.discriminator.clip_norm=0.1"],
    "pairs": TINY_GAMES["pix2pix"],
}


def in_each_stage():
    """CI sees each game at one stage."""
    for i, name in enumerate(GAMES):
        for stage in range(3):
            yield pytest.param(stage, name, marks=pytest.mark.slow if stage == i % 3 else pytest.mark.nightly)


@pytest.mark.parametrize("stage, name", [*in_each_stage()])
def test_nothing_is_used_in_any_game(ranks, stage, name):
    check(ranks(1), GAMES[name], both(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("section", [{}, {"reduce_bucket_size": 1}])
def test_nor_by_other_ranks(ranks, stage, section):
    """Where each parameter is a group of its own, its gradient would travel as it is."""
    overrides = [*TINY_GAMES["mlp"], "accumulation=2", "objective.reuse_fakes=true"]
    check(ranks(2), overrides, both(stage, zero=section))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nor_in_bf16(ranks, stage):
    check(ranks(1), [*TINY_GAMES["mlp"], "accumulation=2"], both(stage, bf16={"enabled": True}))


@pytest.mark.parametrize("network", NETWORKS)
def test_one_network_alone(ranks, network):
    check(ranks(1), [*TINY_GAMES["dcgan_spectral"], "objective.d_steps=2"], both(0), [network])


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["accumulation=2"], ["objective.reuse_fakes=true"]])
def test_marks_within_an_update_would_be_seen(ranks, overrides):
    """Or the tests above would prove nothing: gradients of micro-batches, and images, last from pass to pass."""
    (found,) = ranks(1).run(trained, [*TINY_GAMES["mlp"], *overrides, *replayed()], both(0), True)
    assert max(found["skipped"]) > 0 or not all(map(math.isfinite, found["means"].values()))


def test_marks_come_once_an_update_before_its_first_pass(ranks):
    options = [*TINY_GAMES["mlp"], "accumulation=2", "objective.d_steps=2"]
    (found,) = ranks(1).run(trained, [*options, *replayed()], both(0))
    # For each micro-batch: in D's two steps G's images and D's pass, in G's G's images and D's judgement.
    update = ["mark", *(2 + 1) * 2 * ["pass", "pass"]]
    assert found["events"] == [*UPDATES * update, "mark"]
    assert ranks(1).run(trained, options, both(0))[0]["events"] == []


def test_torch_is_asked_where_the_recipe_asks(monkeypatch):
    monkeypatch.setattr(compiling, "DUAL_SINCE", "2.0")
    stack = LayerStack([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    for unit, num in (("whole", 3), ("layers", 2)):
        options = {"backend": compiling._compile_in_turn}, {"mode": "reduce-overhead"}
        for cuda_graphs, option in zip((False, True), options, strict=True):
            with mock.patch.object(torch, "compile", side_effect=lambda module, **options: module) as asked:
                compiling.passes(stack, unit, cuda_graphs)
            graphs = [False] * num + [True] * (1 if unit == "whole" else num)  # those with tangents in one graph
            wanted = [{"dynamic": False, "fullgraph": fullgraph, **option} for fullgraph in graphs]
            assert [call.kwargs for call in asked.call_args_list] == wanted


def test_what_reduces_overhead_is_cuda_graphs_alone():
    assert torch._inductor.list_mode_options("reduce-overhead", dynamic=False) == {"triton.cudagraphs": True}


def shared(replayed):
    """Whether a lone gradient is handed on as it lies."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    storage = parameter.grad.untyped_storage().data_ptr()
    taken = GradientGroup([parameter], dist.group.WORLD, replayed=replayed).take("grad")
    assert (parameter.grad, taken.tolist()) == (None, [2.0] * 3)
    return taken.untyped_storage().data_ptr() == storage


def test_what_travels_is_a_copy(ranks):
    assert ranks(1).run(shared, False) == [True]
    assert ranks(1).run(shared, True) == [False]
