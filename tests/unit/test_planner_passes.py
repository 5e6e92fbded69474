"""Memory of passes: by hand for a small network, against one census of the whole for every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bigsgan.config import both_engines
from bigsgan.engines.pipeline.layout import build_on_meta, meta_inputs
from bigsgan.models.network import LayerStack
from bigsgan.planner.activations import Traces, trace_discriminator, trace_generator
from bigsgan.planner.census import Census, Stretch
from bigsgan.planner.layers import trace_layers, watched
from bigsgan.planner.passes import Passes
from tests.tiny import TINY_GAMES, tiny_plan

N, A, B, C = 50, 30, 20, 10
SCALARS = 16
"""Bytes of the loss and its gradient."""


class Dense(nn.Module):
    """tanh(x W): the backward pass reads x and the output."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(x @ self.weight),)


def dense_passes(checkpointing: bool) -> Passes:
    with torch.device("meta"):
        stack = LayerStack([Dense(A, B), Dense(B, C)])
        return Passes(trace_layers(stack, [torch.empty(N, A)], "train", 1), checkpointing)


def test_a_census_counts_storages_as_long_as_they_live():
    before = torch.ones(8)
    with Census() as census:
        census.ignore([before])
        kept = before.view(2, 4) + 1  # a view has no storage of its own
        twice = kept * 2
        del twice
        whole = [kept, kept[0]]
    del kept, whole
    live = census.take().live.tolist()
    assert max(live) == 2 * 8 * 4
    assert live[-1] == 0


def test_two_layers_by_hand():
    passes, size = dense_passes(False), 4
    assert passes.plain.peak == (N * B + 2 * N * C) * size  # the hidden features, x W of the second, and its tanh
    assert passes.kept == N * B * size  # the outputs are held by whoever asked for them
    assert passes.returned == passes.gradients == N * C * size
    # From the outputs' gradients: through the second tanh, then to the weight, then to the hidden features.
    through_tanh = (N * B + 2 * N * C) * size
    at_weight = (N * B + N * C + B * C) * size
    at_hidden = (N * B + N * C + N * B) * size
    first = (N * B + 2 * N * B) * size  # the second layer has let go of everything
    most = max(through_tanh, at_weight, at_hidden, first, (N * B + A * B) * size)
    assert passes.backward.peak == pytest.approx(most, abs=SCALARS)
    assert passes.backward.arrived[-1] == A * B + B * C


def test_two_checkpointed_layers_by_hand():
    passes, size = dense_passes(True), 4
    assert passes.kept == N * B * size  # what came into the second
    recomputed = (N * B + N * C + 2 * N * C) * size  # beside that and the gradients: x W and its tanh
    assert passes.backward.peak == pytest.approx(max(recomputed, (N * B + 2 * N * B) * size), abs=SCALARS)


class Head(torch.autograd.Function):
    """A loss that holds nothing; its gradient at the outputs appears in the backward pass."""

    @staticmethod
    def forward(ctx, outputs):
        ctx.shape = outputs.shape
        return outputs.new_empty(())

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape)


def whole(stack: LayerStack, inputs: list[Tensor], segments: int) -> dict[str, int]:
    """The peaks of passes through all layers at once, which hold no more than the layers one after the other."""
    census = Census()
    with watched(stack, census):
        census.ignore(inputs)
        with census:
            with torch.no_grad():
                outputs = stack(*inputs, segments=segments)
            plain = census.take()
            del outputs
            census.take()
            outputs = stack(*inputs, segments=segments)
            forward, size = census.take(), outputs.untyped_storage().nbytes()
            Head.apply(outputs).backward()
            backward = census.take()
    found = {"plain": plain.peak, "forward": forward.peak, "kept": forward.end - size, "backward": backward.peak - size}
    return {**found, "arrived": int(backward.arrived[-1])}


QUICK = ("gat",)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing, is_closed", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(
    "family",
    [
        "biggan",
        # CycleGAN's terms go backward from outputs beside the images, which ``whole`` lets go.
        *(f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in TINY_GAMES if f != "cyclegan"),
    ],
)
def test_layers_make_a_whole(tmp_path, family, checkpointing, is_closed):
    plan = tiny_plan(tmp_path, 1, ["batch=16", *TINY_GAMES.get(family, [])], {})
    for network, mode, segments in (
        ("generator", "train", 1),
        ("discriminator", "train", 2),
        ("discriminator", "judge", 1),
    ):
        stack = build_on_meta(plan, network)
        stack.checkpointing = False
        inputs = list(meta_inputs(plan, network, 16 * segments))
        passes = Passes(trace_layers(stack, inputs, mode, segments), checkpointing, 4 if is_closed else 0)
        stack.checkpointing, stack.is_closed = checkpointing, is_closed
        inputs[0].requires_grad_(mode == "judge")
        stack(*inputs, segments=segments)  # from which it knows what has gradients
        found = whole(stack, inputs, segments)
        predicted = {name: getattr(passes, name).peak for name in ("plain", "forward", "backward")}
        predicted |= {"kept": passes.kept, "arrived": int(passes.backward.arrived[-1])}
        assert predicted == pytest.approx(found, rel=0.02, abs=4_000), (network, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["biggan", *(pytest.param(f, marks=pytest.mark.slow) for f in ("stylegan2", "pix2pix"))]
)
def test_two_sizes_tell_of_a_third(tmp_path, family):
    plan = tiny_plan(tmp_path, 1, ["batch=48", *TINY_GAMES.get(family, [])], {})
    for network, segments in (("generator", 1), ("discriminator", 2)):
        stack = build_on_meta(plan, network)
        tapes = trace_layers(stack, meta_inputs(plan, network, 12 * segments), "train", segments)
        direct = Passes(tapes, False)
        between = Traces().passes(plan, network, "train", segments, 12, (0, len(stack.layers)))
        for name in ("plain", "forward", "backward"):
            assert np.array_equal(getattr(between, name).live, getattr(direct, name).live), (network, name)
        assert between.kept == direct.kept


def test_a_condensed_stretch_keeps_what_is_most():
    live = np.array([1, 5, 2, 7, 3, 4])
    stretch = Stretch(live, np.array([0, 0, 0, 9, 9, 9]))
    condensed = stretch.condensed()
    assert condensed.live.tolist() == [5, 7]
    assert condensed.arrived.tolist() == [0, 9]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_penalties_that_differentiate_twice_by_their_sizes(tmp_path, checkpointing):
    """A trace of 12 samples is what those of 2 and 4 say, of StyleGAN2 with ADA, whose moments grow with them."""
    changes = both_engines(f"activation_checkpointing={str(checkpointing).lower()}")
    changes += ["batch=12", "augmentation={target: 0.6}"]
    game = "objective={loss: non_saturating, r1: {weight: 1, every: 16}, path_length: {}}"
    plan = tiny_plan(tmp_path, 1, [*TINY_GAMES["stylegan2_path_length"][:2], game, *changes], {})
    traces = Traces()
    for network, trace in (("generator", trace_generator), ("discriminator", trace_discriminator)):
        predicted = traces.penalized(plan, network, 12)
        found = trace(plan, traces.prepared(plan, network), 12)
        assert predicted.kept == pytest.approx(found.kept, rel=0.01)
        for name in ("forward", "backward"):
            assert getattr(predicted, name).peak == pytest.approx(getattr(found, name).peak, rel=0.03), (network, name)
