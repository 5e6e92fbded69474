"""Fused kernels beside torch's own operations: in Triton's interpreter (tests/unit) and on a GPU (tests/gpu)."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.models import fir, fused
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.models.stylegan2_layers import rectify_biased

UNEVEN = torch.tensor([[1.0, 2.0, 5.0, 4.0], [0.0, 1.0, 2.0, 3.0], [7.0, 1.0, 0.0, 2.0], [3.0, 1.0, 4.0, 1.0]]) / 8
"""No symmetry hides which way round it lies; every type holds it exactly."""

FILTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "image of G": fir.upsample,
    "convolution of G": lambda x, taps: fir.blur(x, taps, padding=1, gain=4.0),
    "skip of D": fir.downsample,
    "convolution of D": lambda x, taps: fir.blur(x, taps, padding=2),
    "most padding": lambda x, taps: fir.blur(x, taps, padding=3),
}
"""All that StyleGAN2 does, and more padding than it uses."""

LAYOUTS = ("contiguous", "channels_last", "strided")

ROUNDING = {torch.float64: 2.0**-49, torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative: half a step of the half types, which are rounded once, and a few of those that sums are computed in."""

LIMIT = 1.01
"""bf16 and fp16 round it down: what is compared with the limit has to be rounded too."""


def fresh_kernels(name: str = "fused_kernels") -> ModuleType:
    """A module, anew and under no name: what Triton's decorator makes of a kernel depends on the environment."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec(f"bigsgan.models.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_OWN = {"seeds_ptr": "i64", "first": "i64", "eps": "fp32"} | dict.fromkeys(["sums_ptr", "sigma_ptr"], "fp32")
"""Types of arguments that follow from none other."""


def compiled(kernel: Any, dtype: str, **given: Any) -> Any:
    """Code for an H100, which Triton can write without one; arguments that are not given are numbers."""
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    signature, constants = {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in given:
            signature[name], constants[(i,)] = "constexpr", given[name]
        else:
            own = _OWN.get(name, "i32")
            signature[name] = f"*{_OWN.get(name, dtype)}" if name.endswith("_ptr") else own
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = backends.GPUTarget("cuda", 90, 32)
    return compiler.compile(source, target=target).asm


@contextmanager
def choosing(monkeypatch: pytest.MonkeyPatch, kernels: bool, subject: str = fused.MAPS) -> Iterator[None]:
    """Kernels or torch's operations for a subject; torch's for the others, as their last bits differ."""

    def obstacle(device: torch.device, dtype: torch.dtype, asked: str) -> str | None:
        return None if kernels and asked == subject else "a test wants it so"

    with monkeypatch.context() as patch:
        patch.setattr(fused, "obstacle", obstacle)
        yield


def coarse(shape: tuple[int, ...], seed: int) -> Tensor:
    """Eighths: every type holds them and their sums exactly, and none of these is near LIMIT but at 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-30, 31, shape, generator=generator).double() / 8


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another order of the memory."""
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if layout == "strided" else x


def orders(function: Callable[..., Tensor], inputs: list[Tensor], layout: str) -> list[Tensor]:
    """Value, gradients by the inputs, and the second backward pass: those gradients' own gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(laid_out(leaves[0], layout), *leaves[1:])
    v = laid_out(coarse(tuple(y.shape), 1).to(y), layout).requires_grad_()
    firsts = torch.autograd.grad(y, leaves, v, create_graph=True)
    directions = [coarse(tuple(g.shape), 2 + i).to(g) for i, g in enumerate(firsts)]
    (second,) = torch.autograd.grad(firsts, v, directions)
    return [y.detach(), *(g.detach() for g in firsts), second]


def compare(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    layout: str,
    dtype: torch.dtype,
) -> None:
    """All orders by kernels in ``dtype`` against torch's operations in float64, on the same numbers."""
    with choosing(monkeypatch, kernels=True):
        found = orders(function, [x.to(dtype) for x in inputs], layout)
    with choosing(monkeypatch, kernels=False):
        expected = orders(function, inputs, "contiguous")
    # Triton's interpreter does not round to bf16 but cuts off (seen in 3.9).
    rounding = ROUNDING[dtype] * (2 if dtype == torch.bfloat16 and inputs[0].is_cpu else 1)
    in_sums = ROUNDING[torch.promote_types(dtype, torch.float32)]
    for kernel, plain in zip(found, expected, strict=True):
        assert kernel.dtype == dtype
        assert plain.any()
        # A bias's gradient is a sum of rounded numbers, those of x's gradient.
        rounded = expected[1].abs().sum(dim=(0, 2, 3)) if plain.dim() == 1 else plain.abs()
        assert ((kernel - plain).abs() <= rounding * rounded + in_sums * plain.abs().max()).all()


def compare_filter(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str
) -> None:
    taps = UNEVEN.to(device)
    compare(monkeypatch, lambda x: FILTERS[name](x, taps), [coarse(shape, 0).to(device)], layout, dtype)


def compare_rectifier(
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    inputs = [coarse(shape, 0).to(device), coarse(shape[1:2], 9).to(device)]

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return rectify_biased(1 * x, bias, limit)  # which may overwrite its input

    compare(monkeypatch, function, inputs, layout, dtype)


def networks(device: str, **section: Any) -> tuple[LayerStack, LayerStack]:
    """A tiny pair in float64, with residual connections, classes and every kind of layer."""
    sizes: dict[str, Any] = {"channel_base": 64, "channel_max": 6, "mapping_layers": 1, **section}
    g = generator_layers(StyleGAN2Generator(latent_size=4, w_size=5, style_mixing=0, **sizes), 8, 3, 2)
    d = discriminator_layers(StyleGAN2Discriminator(mbstd_group=2, **sizes), 8, 3, 2)
    made = []
    for network in (LayerStack(g), LayerStack(d)):
        initialize(network, 0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith(("bias", "noise_strength")):  # which begin at 0
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
        made.append(network.double().to(device))
    return made[0], made[1]


def penalised(g: LayerStack, d: LayerStack, device: str) -> list[Tensor]:
    """Images, logits, and the parameters' gradients by a loss with the penalties that differentiate twice."""
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


NETWORKS: dict[str, tuple[float, dict[str, Any]]] = {
    "float64": (1e-10, {}),
    "fp16 above": (0.02, {"half_resolutions": 1, "half_type": "fp16"}),
    "bf16 above": (0.2, {"half_resolutions": 1, "half_type": "bf16"}),
}
"""Largest difference in units of the norm, and sections; second derivatives in bf16 are 20 % off by themselves."""


def compare_networks(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    tolerance, section = NETWORKS[name]
    found = []
    for kernels in (True, False):
        with choosing(monkeypatch, kernels):
            found.append(penalised(*networks(device, **section), device))
    for kernel, plain in zip(*found, strict=True):
        assert plain.isfinite().all()
        assert (kernel - plain).norm() <= tolerance * plain.norm()
