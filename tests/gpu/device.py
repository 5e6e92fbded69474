"""Prints what this machine's GPU is, and how fast it multiplies and copies: `python -m tests.gpu.device`."""

from __future__ import annotations

import platform
import sys

import deepspeed
import torch

SIZE, BYTES, ROUNDS = 8192, 1 << 30, 10


def seconds(work: object, *arguments: object) -> float:
    """Of the device, a call, after two that are not counted."""
    assert callable(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        work(*arguments)
    begin.record()
    for _ in range(ROUNDS):
        work(*arguments)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / ROUNDS


def main() -> int:
    """Print the figures; 1 without a GPU."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, deepspeed {deepspeed.__version__}"
    print(f"Python {platform.python_version()}, {versions}")
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use")
        return 1
    found = torch.cuda.get_device_properties(0)
    print(f"{found.name}: {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} multiprocessors")
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, cuDNN {torch.backends.cudnn.version()}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.randn(SIZE, SIZE, device="cuda", dtype=dtype)
        print(f"product of {SIZE} x {SIZE} in {dtype}: {2 * SIZE**3 / seconds(torch.mm, a, a) / 1e12:.0f} TFLOP/s")
    source = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    print(f"copy on the device: {2 * BYTES / seconds(target.copy_, source) / 1e9:.0f} GB/s")
    pinned = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
    print(f"copy from the host: {BYTES / seconds(target.copy_, pinned) / 1e9:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
