"""Fused and written-out attention of a GAT block against float64: what each is off, and the time of both.

    python -m tests.benchmarks.attention [--width 768] [--heads 12] [--side 16] [--samples 2] [--calls 5]

Relative norms of the differences of outputs and of gradients at the input, on this machine's device.
"""

import argparse
import time

import torch

from bigsgan.images.size import Size
from bigsgan.models.network import initialize
from bigsgan.models.transformer import Attention, written_out
from bigsgan.runtime import comm


def pass_through(layer, x):
    """Outputs and the gradient of a weighted sum of them, at least in float32."""
    at = x.clone().requires_grad_()
    out = layer(at)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    (grad,) = torch.autograd.grad((weights * out).sum(), at)
    return torch.cat([out.flatten(), grad.flatten()]).double()


def timed(layer, x, calls):
    start = time.perf_counter()
    for _ in range(calls):
        found = pass_through(layer, x)
    comm.synchronize()
    return found, (time.perf_counter() - start) / calls


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, number in (("width", 768), ("heads", 12), ("side", 16), ("samples", 2), ("calls", 5)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    device = comm.device()
    layer = Attention(options.width, options.heads, [Size.of(options.side)], bf16=False)
    initialize(layer, 0)
    x = torch.randn(options.samples, options.side**2, options.width, generator=torch.Generator().manual_seed(1))
    layer, x = layer.to(device), x.to(device)
    print("| type | fused, off | written out, off | apart | fused, ms | written out, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in (torch.float32, torch.bfloat16):
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        given = x.to(dtype)
        exact = Attention(options.width, options.heads, [Size.of(options.side)], bf16=False).to(device).double()
        for parameter, value in zip(exact.parameters(), layer.parameters(), strict=True):
            parameter.data = value.data.double()
        with written_out():
            expected = pass_through(exact, given.double())
            written, written_seconds = timed(layer, given, options.calls)
        fused, fused_seconds = timed(layer, given, options.calls)
        numbers = [off(fused, expected), off(written, expected), off(fused, written)]
        errors = " | ".join(f"{number:.1e}" for number in numbers)
        print(f"| {str(dtype)[6:]} | {errors} | {1e3 * fused_seconds:.0f} | {1e3 * written_seconds:.0f} |")


if __name__ == "__main__":
    main()
