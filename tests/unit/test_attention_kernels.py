"""Which of torch's kernels an attention takes; meta tensors stand for a GPU's, and real ones on the CPU compute."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend
from torch.testing import assert_close

from bigsgan.models import attention, meta_gpu

BIGGAN = ((128, 1), (4096, 1024), (24, 96))
GAT_XL, GAT_B = ((64, 16), (256, 256), (72, 72)), ((64, 12), (256, 256), (64, 64))


@pytest.fixture
def tried(monkeypatch) -> list[list[list[int]]]:
    """A measured card, on which cuDNN takes all shapes: of what is tried, the shapes."""
    seen: list[list[list[int]]] = []
    monkeypatch.setattr(attention, "_works", {})
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.is_meta))
    monkeypatch.setattr(attention, "_try", lambda operands: seen.append([list(x.shape) for x in operands]) or True)
    return seen


def operands(many, tokens, widths, dtype=torch.bfloat16, device="meta") -> list[Tensor]:
    sizes = [(tokens[0], widths[0]), (tokens[1], widths[0]), (tokens[1], widths[1])]
    return [torch.empty(*many, *size, device=device, dtype=dtype) for size in sizes]


def chosen(*arguments, **options) -> bool:
    return attention.takes_cudnn(*operands(*arguments, **options))


@pytest.mark.parametrize(
    ("given", "options", "cudnn"),
    [
        (BIGGAN, {}, True),
        (((1, 1), (4096, 1024), (16, 48)), {}, True),
        (((0, 1), (4096, 1024), (24, 96)), {}, False),
        (BIGGAN, {"dtype": torch.float16}, True),
        (BIGGAN, {"dtype": torch.float32}, False),
        (BIGGAN, {"device": "cpu"}, False),
        (((8, 1), (4096, 1024), (48, 192)), {}, False),
        (((8, 1), (4096, 1024), (96, 96)), {}, False),
        (GAT_XL, {}, True),
        (GAT_XL, {"dtype": torch.float16}, False),
        (((32, 16), (256, 256), (72, 72)), {}, False),
        (((64, 16), (512, 512), (72, 72)), {}, False),
        (((64, 16), (64, 256), (72, 72)), {}, False),
        (GAT_B, {}, True),
        (((63, 12), (256, 256), (64, 64)), {}, False),
    ],
)
def test_cudnn_takes_what_it_was_faster_at(given, options, cudnn, tried):
    assert chosen(*given, **options) is cudnn
    assert len(tried) == cudnn


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("given", [BIGGAN, GAT_XL])
def test_not_on_other_cards_nor_compiled_nor_deterministic(given, monkeypatch):
    for place, name, value in (
        (attention, "_capability", lambda device: (8, 0)),
        (attention, "_capability", lambda device: (10, 0)),
        (torch.compiler, "is_compiling", lambda: True),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert not chosen(*given)
    assert chosen(*given)


def test_a_shape_is_tried_once_whatever_the_number_of_samples(tried):
    for samples in (64, 64, 128):
        assert chosen((samples, 16), *GAT_XL[1:])
    assert tried == [[[64, 16, 256, 72]] * 3]
    query, key, value = operands(*GAT_XL)
    assert attention.takes_cudnn(query, key, value.mT.contiguous().mT)
    assert len(tried) == 2  # cuDNN's plans depend on the order in memory


def test_an_error_of_cudnn_leaves_the_usual_kernel(monkeypatch, caplog):
    """Here there is no cuDNN, which torch's own error says."""
    monkeypatch.setattr(attention, "_works", {})
    monkeypatch.setattr(attention, "_is_faster", lambda *operands: True)
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    query, key, value = (torch.randn(2, 1, 4, width, requires_grad=True) for width in (8, 8, 16))
    with caplog.at_level(logging.INFO, logger=attention.__name__):
        found = attention.attend(query, key, value, scale=1.0)
        again = attention.attend(query, key, value, scale=1.0)
    assert_close(found, torch.softmax(query @ key.mT, dim=-1) @ value)
    assert torch.equal(found, again)
    (line,) = caplog.messages
    assert line.startswith(
        "attention of [1, 4, 8] x [1, 4, 8] x [1, 4, 16]: not by cuDNN, which ends in an error here ("
    )


def test_memory_that_runs_out_says_nothing_about_the_kernel(monkeypatch):
    """A run that resumes with more memory would take another kernel than the one it resumes."""

    def out_of_memory(*operands, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "_works", {})
    monkeypatch.setattr(attention, "_is_faster", lambda *operands: True)
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "_by", out_of_memory)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(torch.OutOfMemoryError):
        attention.takes_cudnn(*(torch.randn(2, 1, 4, width) for width in (8, 8, 16)))
    assert not attention._works


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("widths", [(3, 10), (16, 24), (12, 12)], ids=str)
def test_each_kernel_is_given_its_widths_and_the_same_comes_out(widths, cudnn, monkeypatch):
    """Whatever the kernels, torch's on the CPU compute here, with gradients."""
    seen = []

    class Chosen:
        def __init__(self, backends):
            seen.append(backends)

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    def watched(query, key, value, scale):
        seen.append([query.shape[-1], key.shape[-1], value.shape[-1]])
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    monkeypatch.setattr(attention, "takes_cudnn", lambda *operands: cudnn)
    monkeypatch.setattr(attention, "sdpa_kernel", Chosen)
    monkeypatch.setattr(meta_gpu, "attend", watched)
    features, values = widths
    leaves = [
        torch.randn(2, 3, rows, w, dtype=torch.float64, requires_grad=True)
        for rows, w in ((5, features), (4, features), (4, values))
    ]
    scale = None if features == values else 1.0
    mixed = attention.attend(*leaves, scale)
    expected = torch.softmax(leaves[0] @ leaves[1].mT * (scale or features**-0.5), dim=-1) @ leaves[2]
    assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    slopes = torch.randn_like(mixed)
    found, wanted = (torch.autograd.grad(y, leaves, slopes) for y in (mixed, expected))
    assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    kernel = [SDPBackend.CUDNN_ATTENTION] if cudnn else attention._USUAL
    given = {
        (3, 10): [8, 8, 16] if cudnn else [16] * 3,
        (16, 24): [16, 16, 24] if cudnn else [24] * 3,
        (12, 12): [12] * 3,
    }
    assert seen == [kernel, given[widths]]


def test_trying_keeps_nothing_for_a_recomputation(monkeypatch):
    """Else torch.utils.checkpoint misses at the second pass what the first one kept."""
    monkeypatch.setattr(attention, "_works", {})
    monkeypatch.setattr(attention, "_is_faster", lambda *operands: True)
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "_CUDNN", [SDPBackend.MATH])
    monkeypatch.setattr(Tensor, "is_cuda", True)
    query, key, value = (torch.randn(2, 1, 4, 8, requires_grad=True) for _ in range(3))
    kept: list[list[torch.Size]] = [[], []]
    for each in kept:
        with saved_tensors_hooks(lambda x, each=each: each.append(x.shape) or x, lambda x: x):
            mixed = attention.attend(query, key, value)
    assert list(attention._works.values()) == [True]
    assert kept[0] == kept[1] != []
    (grad,) = torch.autograd.grad(mixed.sum(), value)
    assert_close(grad, torch.softmax(query @ key.mT / 8**0.5, dim=-1).mT @ torch.ones_like(value))
