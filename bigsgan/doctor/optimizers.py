"""Checks optimizers on each rank's device: torch's fused kernels against their equations in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.doctor.checks import Finding, Subject, judged
from bigsgan.engines.optimizer import build_optimizer
from bigsgan.runtime import comm

_SHAPES = ((64, 33), (7,), (1, 1, 3, 3))
_LR, _STEPS, _SIZE = 0.05, 4, 0.01
_FILE = DeepSpeedFile(Path(), {}, stage=0, precision="fp32", offload_optimizer="none", offload_parameters="none")

CLOSE = 1e-5
"""Largest error in float32, relative to the length of all steps: 24 roundings of 6e-8 to numbers of that size."""

ROUGH = 0.03
"""The same where matrices are orthogonalized in bf16: 8 roundings of 2e-3 that the iteration enlarges."""

KINDS: dict[str, dict[str, Any]] = {
    "Adam": {"betas": [0.5, 0.9], "weight_decay": 0.1},
    "Adam without momentum": {"betas": [0.0, 0.99]},
    "AdamW": {"kind": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.3},
    "AdamW without momentum": {"kind": "adamw", "betas": [0.0, 0.9], "weight_decay": 0.3},
    "SGD": {"kind": "sgd", "weight_decay": 0.1},
    "SGD with momentum": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "Muon": {"kind": "muon", "betas": [0.5, 0.9], "weight_decay": 0.1},
    "RMSprop": {"kind": "rmsprop", "betas": [0.0, 0.9], "momentum": 0.5, "weight_decay": 0.1},
}
"""Options of a recipe's ``optimizer``, by the names in messages."""


def optimizers(subject: Subject) -> Finding:
    """Compare four steps of each kind of optimizer, built as for networks, with its equations."""
    kinds = {name: Optimizer.model_validate({"lr": _LR, **options}) for name, options in KINDS.items()}
    known = hasattr(torch.optim, "Muon")  # from torch 2.9 on
    errors = {name: error(section) for name, section in kinds.items() if known or section.kind != "muon"}
    remedy = "repeat on another device: if only this one fails, take it out of use; otherwise install another torch"
    whole = f"{_STEPS} steps of {len(errors)} kinds are"
    bounds = {name: ROUGH if name == "Muon" else CLOSE for name in errors}
    return judged(f"{_STEPS} steps are", errors, bounds, "of their length off", remedy, whole)


class _Stack(nn.ParameterList):
    """Weights of which those with two dimensions are in a transformer's blocks."""

    def named_matrices(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.dim() == 2]


def error(section: Optimizer) -> float:
    """Distance between an optimizer's weights and those of its equations, relative to how far they moved."""
    generator = torch.Generator().manual_seed(0)
    start = [_SIZE * torch.randn(shape, generator=generator) for shape in _SHAPES]
    grads = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)]
    stack: Any = _Stack(weight.to(comm.device(), copy=True) for weight in start)
    optimizer = build_optimizer(section, stack, _FILE)
    for gradients in grads:
        for parameter, gradient in zip(stack, gradients, strict=True):
            parameter.grad = gradient.to(comm.device())
        optimizer.step()
    difference, length = 0.0, 0.0
    for i, (parameter, weight) in enumerate(zip(stack, start, strict=True)):
        expected = EQUATIONS[section.kind](section, weight.double(), [each[i].double() for each in grads])
        difference += float((parameter.detach().double().cpu() - expected).square().sum())
        length += float((expected - weight.double()).square().sum())
    return float((difference / length) ** 0.5)


def _adam(section: Optimizer, w: Tensor, grads: list[Tensor]) -> Tensor:
    """Kingma and Ba 2015, algorithm 1; for AdamW, Loshchilov and Hutter 2019, algorithm 2."""
    m, v, (beta1, beta2) = torch.zeros_like(w), torch.zeros_like(w), section.betas
    for t, g in enumerate(grads, start=1):
        if section.kind != "adam":
            w = w * (1 - section.lr * section.weight_decay)
        else:
            g = g + section.weight_decay * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - section.lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + section.eps)
    return w


def _muon(section: Optimizer, w: Tensor, grads: list[Tensor]) -> Tensor:
    """Jordan 2024, https://kellerjordan.github.io/posts/muon/, with the factor of Liu et al. 2025, arXiv 2502.16982."""
    if w.dim() != 2:
        return _adam(section, w, grads)
    own, momentum, factor = section.matrices, torch.zeros_like(w), 0.2 * max(w.shape) ** 0.5
    a, b, c = own.ns_coefficients
    for g in grads:
        momentum = own.momentum * momentum + (1 - own.momentum) * g
        x = own.momentum * momentum + (1 - own.momentum) * g
        x = x / x.norm()
        for _ in range(own.ns_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        w = w * (1 - section.lr * section.weight_decay) - section.lr * factor * x
    return w


def _sgd(section: Optimizer, w: Tensor, grads: list[Tensor]) -> Tensor:
    velocity = torch.zeros_like(w)
    for g in grads:
        velocity = section.momentum * velocity + g + section.weight_decay * w
        w = w - section.lr * velocity
    return w


def _rmsprop(section: Optimizer, w: Tensor, grads: list[Tensor]) -> Tensor:
    """RMSprop with torch's momentum, which adds up steps before it applies the learning rate."""
    velocity, square = torch.zeros_like(w), torch.zeros_like(w)
    for g in grads:
        g = g + section.weight_decay * w
        square = section.betas[1] * square + (1 - section.betas[1]) * g * g
        velocity = section.momentum * velocity + g / (square.sqrt() + section.eps)
        w = w - section.lr * velocity
    return w


EQUATIONS: dict[str, Callable[[Optimizer, Tensor, list[Tensor]], Tensor]] = {
    "adam": _adam,
    "adamw": _adam,
    "muon": _muon,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
}
