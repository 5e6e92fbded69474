"""Bytes that a ReLU and nearest-neighbour upsampling read and write when compiled, by torch's function and by ours.

    python -m tests.benchmarks.upsampling

Counted by torch's compiler from the buffers of its kernels, in units of the input's bytes. Nothing is timed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import compile_fx, config, metrics

from bigsgan.models.resizing import upsample_nearest

SHAPE = (2, 16, 8, 8)


def traffic(upsample: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Return the units of the forward and of the backward pass."""
    torch.compiler.reset()
    metrics.reset()
    n, c, height, width = SHAPE
    x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    outputs = torch.compile(lambda x: upsample(F.relu(x)), dynamic=False)(x)
    forward = metrics.num_bytes_accessed
    outputs.backward(torch.randn(n, c, 2 * height, 2 * width, dtype=dtype))
    return forward / x.nbytes, (metrics.num_bytes_accessed - forward) / x.nbytes


def main() -> None:
    """Print a table."""
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # or nothing is counted
    compile_fx.inductor_metrics_log.propagate = False
    kinds = {"torch": lambda x: F.interpolate(x, scale_factor=2), "bigsgan": upsample_nearest}
    print("| type | upsampling by | forward | backward |\n| --- | --- | ---: | ---: |")
    with config.patch(force_disable_caches=True):
        for dtype in (torch.float32, torch.bfloat16):
            for name, upsample in kinds.items():
                forward, backward = traffic(upsample, dtype)
                print(f"| {str(dtype).removeprefix('torch.')} | {name} | {forward:.1f} | {backward:.1f} |")


if __name__ == "__main__":
    main()
