"""Which of torch's kernels computes an attention, by what was measured on a GPU: none of them stores the weights.

FlashAttention, which needs keys as wide as values, or torch's memory-efficient kernel, unless cuDNN's is known to be
faster. The choice depends on the card, the type and the shapes alone, so that ranks, recomputations and resumed runs
make the same one. None of the kernels has second derivatives.

Shapes: N samples, A heads, M queries, K keys, E features of queries and keys, F of values.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from bigsgan.models import convolutions, meta_gpu

_USUAL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch takes the first that it can."""
_CUDNN = [SDPBackend.CUDNN_ATTENTION]
"""torch, which prefers it on a Hopper, raises an error where it finds no plan (2.14). So it is tried first."""

_CARD = (9, 0)
"""Compute capability of the cards on which cuDNN's kernel was measured (H100, torch 2.11, cuDNN 9.19)."""
_WIDEST = 128
"""Features; of keys and values of two widths, which FlashAttention only takes padded, cuDNN's took half the time."""
_FEWEST_HEADS = {(torch.bfloat16, 72, 256): 1024, (torch.bfloat16, 64, 256): 768}
"""By type, features and tokens: from how many heads of all samples on cuDNN's kernel was faster than FlashAttention,
with gradients 0.43 ms instead of 0.62, and 0.28 instead of 0.32. With 512 of 72 it was slower: 0.41 instead of 0.32."""

_log = logging.getLogger(__name__)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale query key^T) value of (N, A, M, E), (N, A, K, E), (N, A, K, F) -> (N, A, M, F).

    The scale of None is E^-0.5, for keys as wide as values. Zeros, which add nothing, fill up features of two widths:
    each to a multiple of 8 for cuDNN's kernel, else both to one.
    """
    if key.shape[-1] == value.shape[-1]:
        return _by(_CUDNN if takes_cudnn(query, key, value) else _USUAL, query, key, value, scale)
    q, k, v = (_filled(x, x.shape[-1]) for x in (query, key, value))
    backends = _CUDNN if takes_cudnn(q, k, v) else _USUAL
    if backends is _USUAL:
        width = max(k.shape[-1], v.shape[-1])
        q, k, v = (_filled(x, width) for x in (query, key, value))
    return _by(backends, q, k, v, scale)[..., : value.shape[-1]]


def takes_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's kernel computes this attention; the first use of a shape tries it on a sample.

    It computes none in compiled code, where it was not measured, and none where kernels have to be deterministic, which
    its backward pass need not be.
    """
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return False
    if not query.is_cuda or not _is_faster(query, key, value) or _capability(query.device) != _CARD:
        return False
    operands = query, key, value
    case = query.device, query.dtype, *((x.shape[1:], x.stride()[1:]) for x in operands)
    if case not in _works:
        _works[case] = _try(operands)
    return _works[case]


def _is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether it was on the measured card, or was at similar shapes."""
    (n, heads, queries, features), (keys, values) = query.shape, value.shape[-2:]
    if features != values:
        return n > 0 and values <= _WIDEST and query.dtype in (torch.bfloat16, torch.float16)
    fewest = _FEWEST_HEADS.get((query.dtype, features, keys))
    return queries == keys and fewest is not None and n * heads >= fewest


def _by(backends: list[SDPBackend], query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    with sdpa_kernel(backends):
        return meta_gpu.attend(query, key, value, scale)


def _filled(x: Tensor, width: int) -> Tensor:
    """Fill the features up with zeros to a width, rounded up to a multiple of 8."""
    missing = width + -width % convolutions.MULTIPLE - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


_capability = cache(torch.cuda.get_device_capability)

_works: dict[tuple[object, ...], bool] = {}
"""By device, type, and the shapes and strides of a sample: whether cuDNN has a plan."""


def _try(operands: tuple[Tensor, ...]) -> bool:
    """Whether cuDNN's kernel takes the first sample, with its gradients."""
    shapes = " x ".join(str(list(x.shape[1:])) for x in operands)
    try:
        # A recomputation, which does not come here again, must not miss tensors that were kept here.
        with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            query, key, value = (x[:1].detach().requires_grad_() for x in operands)
            mixed = _by(_CUDNN, query, key, value, scale=1.0)
            torch.autograd.grad(mixed, (query, key, value), torch.zeros_like(mixed))
    except torch.OutOfMemoryError:  # it says nothing about the kernel, and a resumed run would choose another one
        raise
    except RuntimeError as error:
        _log.info("attention of %s: not by cuDNN, which ends in an error here (%s)", shapes, error)
        return False
    _log.info("attention of %s: cuDNN's kernel", shapes)
    return True
