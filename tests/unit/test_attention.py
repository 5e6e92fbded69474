"""Self-attention by torch's kernels, as a GPU takes them for half types, against weights that are written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.models import convolutions, layers
from bigsgan.models.build import build_network
from bigsgan.models.layers import SelfAttention
from bigsgan.models.network import initialize
from tests.tiny import attend, tiny_recipe


@pytest.fixture
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(convolutions, "suits_tensor_cores", lambda device, dtype: True)


def ready(channels: int) -> SelfAttention:
    layer = SelfAttention(channels)
    initialize(layer, 0)
    x = torch.randn(1, channels, 4, 4)
    assert torch.equal(layer(x), x)  # switched off at first
    attend(layer)
    return layer.double()


def written_out(layer: SelfAttention, x: Tensor) -> Tensor:
    """Of each sample by itself, as the paper's equations have it."""
    maps = [nn.functional.conv2d(x, part.normalized_weight()) for part in (layer.query, layer.key, layer.value)]
    mixed = []
    for query, key, value in zip(*maps, strict=True):
        key, value = (nn.functional.max_pool2d(each[None], 2)[0].flatten(1) for each in (key, value))
        scores = query.flatten(1).T @ key
        weights = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
        mixed.append((value @ weights.T).view(-1, *x.shape[2:]))
    return x + layer.gamma * nn.functional.conv2d(torch.stack(mixed), layer.out.normalized_weight())


@pytest.mark.parametrize(
    "channels", [64, 16, 40, 4]
)  # none, some and all of the features are padded; an eighth of 4 would be none
@pytest.mark.parametrize("exact", [False, True])
def test_attention_is_that_of_the_paper_with_its_gradients(channels, exact, on_tensor_cores, monkeypatch):
    seen, layer = [], ready(channels)
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*operands, **options):
        seen.append([x.shape[-1] for x in operands])
        return attention(*operands, **options)

    monkeypatch.setattr(layers.F, "scaled_dot_product_attention", watched)
    layer.exact = exact
    x = torch.randn(3, channels, 6, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found, expected = layer(x), written_out(layer, x)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = torch.randn_like(x)
    grads = [torch.autograd.grad(y, leaves, slopes, create_graph=exact) for y in (found, expected)]
    assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)
    assert seen == ([] if exact else [[-(-channels // 2 // 8) * 8] * 3])
    if exact:
        second = [torch.autograd.grad(sum(g.square().sum() for g in each), leaves) for each in grads]
        assert_close(second[0], second[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("objective", "exact"),
    [
        ("objective.loss=hinge", False),
        ("objective.r1={weight: 1, every: 16}", True),
        ("objective.r1={weight: 1, form: finite_difference, sigma: 0.1}", False),
        ("objective.gradient_penalty={weight: 10}", True),
    ],
)
def test_weights_are_written_out_where_a_penalty_differentiates_them_twice(objective, exact, tmp_path):
    recipe = tiny_recipe(tmp_path, objective)
    for network, wanted in (("generator", False), ("discriminator", exact)):
        stack = build_network(recipe, network)
        assert [m.exact for m in stack.modules() if isinstance(m, SelfAttention)] == [wanted]
