"""TF32 on newer CUDA devices: float32 products with ten-bit mantissas, summed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let all float32 convolutions and matrix products use TF32 inside the block, or none of them.

    By default, torch uses it for convolutions but not for matrix products. Without effect on a CPU.
    """
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = allowed
        yield
    finally:
        for backend, was_allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = was_allowed
