"""Prints how long variants of kernels take at BigGAN-128's shapes, with gradients: `python -m tests.gpu.variants`.

Convolutions without and with ``cudnn.benchmark``; attention that is written out, and torch's efficient, flash
and cuDNN kernels, with how far each is from float32. Without a GPU the shapes are small, and the times mean nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPE, ROUNDS = torch.bfloat16, 10


class Convolution(NamedTuple):
    """Of a map whose sides are ``size``, by filters whose sides are ``side``."""

    num: int
    inputs: int
    outputs: int
    size: int
    side: int = 3


class Attention(NamedTuple):
    """Of ``queries`` positions to ``keys`` others, by features of both and of values."""

    num: int
    queries: int
    keys: int
    features: int
    values: int


CONVOLUTIONS = [
    Convolution(64, 1536, 1536, 8),
    Convolution(64, 1536, 768, 16),
    Convolution(64, 768, 384, 32),
    Convolution(64, 384, 192, 64),
    Convolution(64, 192, 96, 128),
    Convolution(64, 96, 96, 128),
    Convolution(64, 192, 96, 128, 1),
    Convolution(64, 8, 96, 128),  # of images, filled up from 3 channels
]
ATTENTIONS = [Attention(64, 4096, 1024, 24, 96), Attention(64, 4096, 1024, 16, 48)]
"""Of G, 192 channels at 64 x 64, and of D, 96, whose 12 features are filled up."""

SMALL = ([Convolution(2, 8, 16, 8), Convolution(2, 8, 8, 8, 1)], [Attention(2, 64, 16, 8, 24)])

VARIANTS = {
    "written out": None,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def main() -> int:
    """Print the times; 0."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    convolutions, attentions = (CONVOLUTIONS, ATTENTIONS) if on_gpu else SMALL
    print(f"milliseconds in {DTYPE} on {torch.cuda.get_device_name() if on_gpu else 'a CPU, of small shapes'}")
    for shape in convolutions:
        plain, measured = (convolution(shape, device, benchmark) for benchmark in (False, True))
        print(f"{shape}: {plain:.3f} without cudnn.benchmark, {measured:.3f} with it")
    for attention in attentions:
        for name in VARIANTS:
            try:
                milliseconds, off = attended(attention, device, name)
            except RuntimeError as error:  # torch has no such kernel for this device
                print(f"{attention}, {name}: not here ({str(error).splitlines()[0]})")
            else:
                print(f"{attention}, {name}: {milliseconds:.3f}, {off:.1e} off")
    return 0


def convolution(shape: Convolution, device: torch.device, benchmark: bool) -> float:
    """Milliseconds of a convolution and its gradients, in the order that half types have."""
    x = torch.randn(shape.num, shape.inputs, shape.size, shape.size, device=device, dtype=DTYPE)
    weight = torch.randn(shape.outputs, shape.inputs, shape.side, shape.side, device=device, dtype=DTYPE)
    operands = [t.to(memory_format=torch.channels_last).requires_grad_() for t in (x, weight)]

    def work() -> None:
        y = F.conv2d(*operands, padding=shape.side // 2)
        torch.autograd.grad(y, operands, y.detach())

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = benchmark
    try:
        return milliseconds_of(work, device)
    finally:
        torch.backends.cudnn.benchmark = before


def attended(shape: Attention, device: torch.device, name: str) -> tuple[float, float]:
    """Milliseconds of attention and its gradients; the relative norm of its difference from float32's, written out."""
    sizes = [(shape.queries, shape.features), (shape.keys, shape.features), (shape.keys, shape.values)]
    generator = torch.Generator(device).manual_seed(0)
    operands = [torch.randn(shape.num, *size, device=device, generator=generator) / size[-1] ** 0.5 for size in sizes]
    rounded = [x.to(DTYPE).requires_grad_() for x in operands]
    backend = VARIANTS[name]

    def work() -> Tensor:
        y = written_out(*rounded) if backend is None else by_kernel(backend, *rounded)
        torch.autograd.grad(y, rounded, y.detach())
        return y

    exact = written_out(*(x.detach().float() for x in rounded))
    off = float((work().detach().float() - exact).norm() / exact.norm())
    return milliseconds_of(work, device), off


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query key^T) value of (N, M, E), (N, K, E), (N, K, F) -> (N, M, F)."""
    return torch.bmm(torch.softmax(torch.bmm(query, key.mT), dim=-1), value)


def by_kernel(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by one of torch's kernels; flash wants as many features of queries and keys as of values."""
    if backend is SDPBackend.FLASH_ATTENTION:
        missing = value.shape[-1] - query.shape[-1]
        query, key = (F.pad(x, (0, missing)) for x in (query, key))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x[:, None] for x in (query, key, value)), scale=1.0).squeeze(1)


def milliseconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Of a call, after two that are not counted."""
    for _ in range(2):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin) / ROUNDS


if __name__ == "__main__":
    sys.exit(main())
