"""Checks of fused and Triton kernels against torch's own operations, once and twice differentiated.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.doctor.arithmetic import REMEDY
from bigsgan.doctor.checks import Finding, Subject, failed, first_of, not_applicable, passed
from bigsgan.engines.base import DTYPES
from bigsgan.images.size import Size
from bigsgan.models import fir, fused, noise, resizing
from bigsgan.models.modulation import modulate_and_rectify
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.models.stylegan2_layers import rectify_biased
from bigsgan.runtime import comm
from bigsgan.runtime.tf32 import tf32

UNEVEN = torch.tensor([[1.0, 2.0, 5.0, 4.0], [0.0, 1.0, 2.0, 3.0], [7.0, 1.0, 0.0, 2.0], [3.0, 1.0, 4.0, 1.0]]) / 8
"""A filter without symmetry, so that a flip shows; every type holds it exactly."""

FILTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "image of G": fir.upsample,
    "convolution of G": lambda x, taps: fir.blur(x, taps, padding=1, gain=4.0),
    "skip of D": fir.downsample,
    "convolution of D": lambda x, taps: fir.blur(x, taps, padding=2),
    "most padding": lambda x, taps: fir.blur(x, taps, padding=3),
}
"""All of StyleGAN2's uses of a filter, and one with more padding."""


def _both(large: Tensor, small: Tensor) -> Tensor:
    """Two maps in one, for a comparison: (N, C, H, W), (N, C, H/2, W/2) -> (N, C, H, 3W/2)."""
    return torch.cat([large, torch.cat([small, small], dim=2)], dim=3)


RESIZED: dict[str, Callable[..., Tensor]] = {
    "pooled": lambda x, bias, small: resizing.pool_average(x),
    "pooled beside": lambda x, bias, small: resizing.pool_average_beside(x, bias, laid_out(small, "channels_last")),
    "rectified and pooled": lambda x, bias, small: _both(*resizing.rectify_and_pool_average(x)),
    "upsampled": lambda x, bias, small: resizing.upsample_nearest(x),
    "upsampled onto": lambda x, bias, small: resizing.upsample_nearest_onto(x, bias, laid_out(small, "channels_last")),
}
"""All poolings and upsamplings of BigGAN, of maps whose channels lie side by side."""

LAYOUTS = ("contiguous", "channels_last", "strided")

ROUNDING = {torch.float64: 2.0**-49, torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative error allowed: half a step for the half types, which are rounded once; a few steps for types of sums."""

LIMIT = 1.01
"""A limit that bf16 and fp16 round down, so that values compared with it must be rounded too."""

SHAPES = [(3, 16, 33, 129), (2, 3, 5, 7), (2, 2, 2, 2), (1, 1, 3, 2), (1, 70, 9, 70)]

CELLS = [
    (dtype, shape, layout)
    for dtype in ROUNDING
    for shape in (SHAPES if dtype == torch.float32 else SHAPES[:1])
    for layout in LAYOUTS
]

NETWORKS: dict[str, tuple[float, dict[str, Any]]] = {
    "float64": (1e-10, {}),
    "fp16 above": (0.02, {"half_resolutions": 1, "half_type": "fp16"}),
    "bf16 above": (0.2, {"half_resolutions": 1, "half_type": "bf16"}),
}
"""Largest relative norm of a difference, and sections of networks; bf16 alone puts second derivatives 20 % off."""

DRAWN = (2, 1031, 2**21 + 1)
CLOSE = 1e-6
"""Relative and absolute error allowed of normal numbers: a rounding or two. Uniform ones have the same bits."""


def feature_maps(subject: Subject) -> Finding:
    """Check filters, rectifiers, resizings and gains in every type and layout, and whole networks that use them."""
    device, excesses = str(comm.device()), {}
    obstacles = {dtype: _obstacle(dtype) for dtype in ROUNDING}
    if why := obstacles[torch.float32] or obstacles[torch.float64]:
        return not_applicable(f"torch's own operations are used, as {why}")
    left_out = [dtype for dtype, why in obstacles.items() if why]
    with tf32(allowed=False):
        for dtype, shape, layout in CELLS:
            if dtype in left_out:
                continue
            cell = f"{str(dtype).removeprefix('torch.')} {shape} {layout}"
            for name in FILTERS:
                excesses[f"filter, {name}, {cell}"] = filter_excess(name, shape, layout, dtype, device)
            if layout == "channels_last":
                even = (*shape[:2], 2 * shape[2], 2 * shape[3])
                for name in RESIZED:
                    excesses[f"{name}, {cell}"] = resized_excess(name, even, dtype, device)
                for upsamples in (False, True):
                    named = f"gains, upsampled {upsamples}, {cell}"
                    excesses[named] = modulation_excess(shape, upsamples, upsamples, dtype, device)
            for limit in (None, LIMIT):
                excesses[f"rectifier, limit {limit}, {cell}"] = rectifier_excess(limit, shape, layout, dtype, device)
        for name, (tolerance, section) in NETWORKS.items():
            if "half_type" not in section or DTYPES[section["half_type"]] not in left_out:
                excesses[f"StyleGAN2, {name}"] = network_error(name, device) / tolerance
    return _finding("kernels of feature maps", excesses)


def random_numbers(subject: Subject) -> Finding:
    """Compare numbers drawn on the device with those drawn on a CPU, uniform ones bit for bit."""
    if why := fused.obstacle(comm.device(), torch.int64, fused.DRAWS):
        return not_applicable(f"torch's own operations are used, as {why}")
    excesses = {f"{kind}, {num:,}": draw_excess(kind, num) for kind in ("uniform", "normal") for num in DRAWN}
    return _finding("kernels of random numbers", excesses)


def _obstacle(dtype: torch.dtype) -> str | None:
    """Why this rank's device has no kernels for maps of a type; None if it has."""
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU does not compute bf16"
    return fused.obstacle(comm.device(), dtype)


def draw_excess(kind: str, num: int) -> float:
    """Largest difference of numbers drawn on the device, in units of what is allowed; infinite for other bits."""
    seeds, streams = torch.tensor([0, 3, 2**62 + 12345, 2**63 - 1]), range(2**32, 2**32 + 3)
    if not fused.used_for(seeds.to(comm.device()), fused.DRAWS):
        return float("inf")
    drawn, plain = noise.draw(seeds.to(comm.device()), streams, num, kind).cpu(), noise.draw(seeds, streams, num, kind)
    if kind == "normal":
        return float(((drawn - plain).abs() / (CLOSE + CLOSE * plain.abs())).max())
    return 0.0 if torch.equal(drawn, plain) else float("inf")


@contextmanager
def choosing(kernels: bool, subject: str = fused.MAPS) -> Iterator[None]:
    """Use kernels or torch's operations for a subject, and torch's for the others, as their last bits differ."""

    def obstacle(device: torch.device, dtype: torch.dtype, asked: str) -> str | None:
        return None if kernels and asked == subject else "a check wants it so"

    with mock.patch.object(fused, "obstacle", obstacle):
        yield


def coarse(shape: tuple[int, ...], seed: int) -> Tensor:
    """Multiples of 1/8: every type holds them and their sums exactly, and only 1 is near LIMIT."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-30, 31, shape, generator=generator).double() / 8


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same values in another memory layout."""
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if layout == "strided" else x


def orders(function: Callable[..., Tensor], inputs: list[Tensor], layout: str, most: int = 2) -> list[Tensor]:
    """A function's value, its gradients by the inputs, and a second backward pass: the gradient of those gradients.

    The last is left out if ``most`` is 1.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(laid_out(leaves[0], layout), *leaves[1:])
    v = laid_out(coarse(tuple(y.shape), 1).to(y), layout).requires_grad_()
    firsts = torch.autograd.grad(y, leaves, v, create_graph=most > 1)
    if most == 1:
        return [y.detach(), *firsts]
    directions = [coarse(tuple(g.shape), 2 + i).to(g) for i, g in enumerate(firsts)]
    (second,) = torch.autograd.grad(firsts, v, directions)
    return [y.detach(), *(g.detach() for g in firsts), second]


def excess(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    layout: str,
    dtype: torch.dtype,
    subject: str = fused.MAPS,
    most: int = 2,
) -> float:
    """Largest difference, over all ``orders``, of kernels in ``dtype`` from torch's operations in float64.

    It is relative to what rounding allows, and infinite if the type is another or the expected values are all 0.
    """
    with choosing(kernels=True, subject=subject):
        found = orders(function, [x.to(dtype) for x in inputs], layout, most)
    with choosing(kernels=False):
        expected = orders(function, inputs, "contiguous", most)
    # Triton's interpreter truncates to bf16 instead of rounding (seen in 3.9).
    rounding = ROUNDING[dtype] * (2 if dtype == torch.bfloat16 and inputs[0].is_cpu else 1)
    in_sums = ROUNDING[torch.promote_types(dtype, torch.float32)]
    worst = 0.0
    for kernel, plain in zip(found, expected, strict=True):
        if kernel.dtype != dtype or not plain.any():
            return float("inf")
        # A bias's gradient is the sum of x's gradient, whose numbers are rounded.
        rounded = expected[1].abs().sum(dim=(0, 2, 3)) if plain.dim() == 1 else plain.abs()
        allowed = rounding * rounded + in_sums * plain.abs().max()
        worst = max(worst, float(((kernel - plain).abs() / allowed).nan_to_num(nan=torch.inf).max()))
    return worst


def filter_excess(name: str, shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> float:
    """``excess`` of a filter of ``FILTERS`` on maps (N, C, H, W)."""
    taps = UNEVEN.to(device)
    return excess(lambda x: FILTERS[name](x, taps), [coarse(shape, 0).to(device)], layout, dtype)


def rectifier_excess(
    limit: float | None, shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str
) -> float:
    """``excess`` of the rectifier on maps (N, C, H, W)."""
    inputs = [coarse(shape, 0).to(device), coarse(shape[1:2], 9).to(device)]

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return rectify_biased(1 * x, bias, limit)  # a copy, because the kernel may overwrite its input

    return excess(function, inputs, layout, dtype)


def networks(device: str, **section: Any) -> tuple[LayerStack, LayerStack]:
    """A tiny G and D in float64, with residual connections, classes and every kind of layer."""
    sizes: dict[str, Any] = {"channel_base": 64, "channel_max": 6, "mapping_layers": 1, **section}
    g = generator_layers(StyleGAN2Generator(latent_size=4, w_size=5, style_mixing=0, **sizes), Size(8, 8), 3, 2)
    d = discriminator_layers(StyleGAN2Discriminator(mbstd_group=2, **sizes), Size(8, 8), 3, 2)
    made = []
    for network in (LayerStack(g), LayerStack(d)):
        initialize(network, 0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith(("bias", "noise_strength")):  # these begin at 0
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
        made.append(network.double().to(device))
    return made[0], made[1]


def penalized(g: LayerStack, d: LayerStack, device: str) -> list[Tensor]:
    """Images, logits, and the parameters' gradients of a loss with the penalties that differentiate twice."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, generator=generator, dtype=torch.float64).to(device)
    labels, seeds = torch.tensor([0, 1], device=device), torch.tensor([5, 6], device=device)
    ws, seeds = g.part(0, 1).fold(latents, labels, seeds)
    images = g.part(1, len(g.layers))(ws, seeds)
    logits = d(images, labels)
    (paths,) = torch.autograd.grad(images.square().sum(), ws, create_graph=True)
    (r1,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    parameters = [*g.parameters(), *d.parameters()]
    loss = logits.sum() + 0.1 * paths.square().sum().sqrt() + 10 * r1.square().sum()
    grads = torch.autograd.grad(loss, parameters)
    return [images.detach(), logits.detach(), torch.cat([grad.flatten() for grad in grads])]


def resized_excess(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> float:
    """``excess`` of an entry of ``RESIZED`` on maps (N, C, H, W) of even sides."""
    n, c, height, width = shape
    x, bias, small = (coarse(s, i).to(device) for i, s in enumerate([shape, (c,), (n, c, height // 2, width // 2)]))
    operands = [x, bias, small] if name.endswith(("beside", "onto")) else [x]

    def function(*given: Tensor) -> Tensor:
        return RESIZED[name](*given, *[bias, small][: 3 - len(given)])

    return excess(function, operands, "channels_last", dtype, fused.SIZES)


def modulation_excess(shape: tuple[int, ...], shared: bool, upsamples: bool, dtype: torch.dtype, device: str) -> float:
    """``excess`` of gain, bias and ReLU on maps (N, C, H, W), with one gain for all samples or one for each.

    Below float32, gradients of gradients round as often as torch's operations do, and are left out.
    """
    gains = [coarse((1 if shared else shape[0], shape[1]), seed).to(device) for seed in (1, 2)]

    def function(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return modulate_and_rectify(x, gain, bias, upsamples)

    half = dtype in (torch.float16, torch.bfloat16)
    return excess(function, [coarse(shape, 0).to(device), *gains], "channels_last", dtype, fused.GAINS, 1 + (not half))


def network_error(name: str, device: str) -> float:
    """Largest relative norm of the difference between kernels and torch's operations in a network of ``NETWORKS``."""
    found = []
    for kernels in (True, False):
        with choosing(kernels):
            found.append(penalized(*networks(device, **NETWORKS[name][1]), device))
    errors = [float((kernel - plain).norm() / plain.norm()) for kernel, plain in zip(*found, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _finding(what: str, excesses: dict[str, float]) -> Finding:
    numbers = {name: {"difference_in_bounds": each, "bound": 1.0} for name, each in excesses.items()}
    bad = [name for name, each in excesses.items() if not each <= 1]
    if bad:
        text = f"{what} differ from torch's operations by {excesses[bad[0]]:.2g} times the bound"
        return failed(f"{first_of(bad, len(excesses))}: {text}", REMEDY, numbers, len(bad))
    worst = max(excesses, key=lambda name: excesses[name])
    return passed(f"{len(excesses)} {what} within {excesses[worst]:.2f} of their bounds: {worst}", numbers)
