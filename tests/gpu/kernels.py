"""Prints how BigGAN-128's Triton kernels compare with torch's operations on a GPU: `python -m tests.gpu.kernels`.

First each kernel alone at the sizes of 128 images, beside a copy; then an update of 128 images by torch's operations,
with pooling and upsampling, with the gains too, and as it is, with its kernel for attention too, in turns; and where
the device's time goes without and with them. Without a GPU the sizes are small, and the times mean nothing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from bigsgan.bench.product import build_engine_loop
from bigsgan.config import load_recipe, plan_run
from bigsgan.doctor.kernels import laid_out
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.models import attention, fused, resizing
from bigsgan.models.modulation import modulate_and_rectify
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels
from tests import REPOSITORY
from tests.gpu.variants import DTYPE, milliseconds_of

MAPS, SMALL_MAP = [(256, 96, 128), (128, 192, 64), (128, 384, 32), (128, 1536, 8)], (2, 8, 8)
"""Samples, channels and sides of the large map."""
RECIPE = ["data.kind=synthetic", "data.root=null", "metrics=null"]
SMALL = [
    *("data.resolution=32", "data.num_classes=10", "generator.latent_size=20", "generator.embedding_size=8"),
    *(f"{network}.{key}" for network in ("generator", "discriminator") for key in ("channels=4", "attention=[16]")),
]
TURNS, UPDATES = (3, 4) if torch.cuda.is_available() else (1, 1)

GROUPS = {
    "pooling, upsampling": ("pool", "upsample", "_spread", "_split", "_join"),
    "gains": ("_modulate", "_differentiate"),
    "attention": ("fmha", "flash", "attention", "sdpa"),
    "convolutions": ("conv", "fprop", "dgrad", "wgrad", "cudnn", "nchwToNhwc", "nhwcToNchw"),
    "products": ("gemm", "nvjet", "cutlass", "gemv", "splitK"),
    "norms": ("norm",),
    "rectifiers": ("_rectify", "_slopes"),
    "sums": ("reduce",),
    "optimizer": ("multi_tensor",),
    "copies, casts": ("copy", "Memcpy", "Memset"),
    "elementwise": ("elementwise",),
}
"""By words in a kernel's name; the first that fits."""


@contextmanager
def without(*subjects: str) -> Iterator[None]:
    """torch's operations for these subjects of ``fused`` in the block."""
    usual = fused.obstacle
    with mock.patch.object(fused, "obstacle", lambda d, t, s=fused.MAPS: "off" if s in subjects else usual(d, t, s)):
        yield


@contextmanager
def by_efficient() -> Iterator[None]:
    """Attention by torch's memory-efficient kernel, which takes keys and values of two widths."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        filled = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (query, key, value))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(*filled, scale=scale)[..., : value.shape[-1]]

    with mock.patch.object(attention, "attend", attend):
        yield


VARIANTS: dict[str, list[str]] = {
    "torch's operations": [fused.SIZES, fused.GAINS],
    "pooling and upsampling": [fused.GAINS],
    "gains too": [],
    "as it is": [],
}
"""Of an update: what torch computes. All but the last have its memory-efficient attention."""


def main() -> int:
    """Print the times; 0."""
    comm.initialize()
    choose_kernels(deterministic=False)
    device = comm.device()
    on_gpu = device.type == "cuda"
    print(f"milliseconds in {DTYPE} on {torch.cuda.get_device_name() if on_gpu else 'a CPU, of small sizes'}")
    for shape in MAPS if on_gpu else [SMALL_MAP]:
        each_kernel(*shape, device)
    update(device)
    return 0


def each_kernel(num: int, channels: int, side: int, device: torch.device) -> None:
    """Print times of maps (N, C, H, W), and of their backward passes, by torch's operations and by kernels."""
    sizes = [(num, channels, each, each) for each in (side, side // 2)]
    x, small = (laid_out(torch.randn(size, device=device, dtype=DTYPE), "channels_last") for size in sizes)
    gain, bias = (torch.randn(num, channels, device=device, dtype=DTYPE) for _ in range(2))
    copied = torch.empty_like(x)
    print(f"{tuple(x.shape)}: copy {milliseconds_of(lambda: copied.copy_(x), device):.3f}")
    functions: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "pooled": (resizing.pool_average, [x]),
        "pooled, with bias and shortcut": (resizing.pool_average_beside, [x, bias[0], small]),
        "rectified and pooled": (resizing.rectify_and_pool_average, [x]),
        "upsampled": (resizing.upsample_nearest, [small]),
        "upsampled onto a map, with bias": (resizing.upsample_nearest_onto, [x, bias[0], small]),
        "gain, bias and ReLU": (modulate_and_rectify, [x, gain, bias]),
        "gain, bias, ReLU, upsampled": (partial(modulate_and_rectify, upsamples=True), [small, gain, bias]),
    }
    for name, (function, given) in functions.items():
        times = []
        for chosen in (nullcontext(), without(fused.SIZES, fused.GAINS)):
            with chosen:
                times += forward_and_backward(function, given, device)
        ours, back, plain, plain_back = times
        print(f"  {name}: torch {plain:.3f}, kernel {ours:.3f}; backward: torch {plain_back:.3f}, kernel {back:.3f}")


def forward_and_backward(
    function: Callable[..., Any], given: list[Tensor], device: torch.device
) -> tuple[float, float]:
    """Milliseconds of a function without gradients, and of its backward pass alone."""
    with torch.no_grad():
        forward = milliseconds_of(lambda: function(*given), device)
    leaves = [each.detach().requires_grad_() for each in given]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    slopes = [torch.randn_like(each) for each in results]
    return forward, milliseconds_of(lambda: torch.autograd.grad(results, leaves, slopes, retain_graph=True), device)


def update(device: torch.device) -> None:
    """Print times of updates of BigGAN-128 in turns, and where the device's time goes in the first and the last."""
    on_gpu = device.type == "cuda"
    directory = REPOSITORY / "launch" / "recipes"
    batch = 128 if on_gpu else 2
    more = ["data.num_workers=10"] if on_gpu else ["data.num_workers=0", "data.num_images=64", *SMALL]
    recipe = load_recipe(directory / "biggan128_imagenet.yaml", [*RECIPE, f"batch={batch}", *more])
    with leaving_nothing():
        loop = build_engine_loop(plan_run(recipe, 1, directory))
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for turn in range(TURNS):
            for name in VARIANTS if turn % 2 == 0 else reversed(VARIANTS):
                with entered(name):
                    times[name].append(seconds_of(loop))
        for name, each in times.items():
            shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in each)
            print(f"update, {name}: {shown}; at best {batch / min(each):.0f} images/s")
        for name in (next(iter(VARIANTS)), "as it is"):
            with entered(name):
                print(f"device, {name}: {groups(loop, device)}")
        loop.close()


@contextmanager
def entered(name: str) -> Iterator[None]:
    """Compute by a variant in the block."""
    with without(*VARIANTS[name]), nullcontext() if name == "as it is" else by_efficient():
        yield


def seconds_of(loop: Callable[[], None]) -> float:
    """Of an update, after one that is not counted."""
    loop()
    comm.synchronize()
    begin = time.perf_counter()
    for _ in range(UPDATES):
        loop()
    comm.synchronize()
    return (time.perf_counter() - begin) / UPDATES


def groups(loop: Callable[[], None], device: torch.device) -> str:
    """Milliseconds and number of the kernels of an update, by ``GROUPS``."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        loop()
        comm.synchronize()
    spent: Counter[str] = Counter()
    kernels = [each for each in seen.events() if device.type != "cuda" or str(each.device_type) == "DeviceType.CUDA"]
    for each in kernels:
        spent[group_of(each.name)] += (each.time_range.end - each.time_range.start) / 1000
    listed = ", ".join(f"{group} {milliseconds:.1f}" for group, milliseconds in spent.most_common())
    return f"{sum(spent.values()):.1f} ms in {len(kernels)} kernels: {listed}"


def group_of(name: str) -> str:
    """Return a kernel's group."""
    fits = (group for group, words in GROUPS.items() if any(word in name for word in words))
    return next(fits, "others")


if __name__ == "__main__":
    sys.exit(main())
