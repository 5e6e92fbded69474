"""How near finite differences of D are to its slope: `python -m tests.benchmarks.finite_differences [RECIPE ...]`.

Discriminators of recipes as they begin, 64 real images each. With --tf32 convolutions in float32 round their operands
to TF32's 10 bits on the way forward. Bias: the mean over images and directions e of the squared finite difference, over
that of (g . e)^2 along the same directions. Spread: the standard deviation over directions of an image's squared finite
difference, or of the mean of two along directions of their own, over |g|^2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan import shipped
from bigsgan.config import load_recipe
from bigsgan.data import build_training_dataset
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.precision import full

SHOWN = ("digits", "digits_r3gan", "digits_stylegan2")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
SIGMAS = (0.003, 0.01, 0.03, 0.1, 0.3)
NUM, DIRECTIONS = 64, 8


def discriminator(name: str) -> tuple[LayerStack, Tensor, Tensor]:
    """A recipe's, with images and labels."""
    recipe = load_recipe(shipped.recipe(name), [])
    network, data = build_network(recipe, "discriminator"), build_training_dataset(recipe.data)
    initialize(network, 3)
    images = torch.stack([torch.as_tensor(data[i][0]) for i in range(NUM)]).float() / 127.5 - 1
    labels = torch.arange(NUM) % max(recipe.data.num_classes, 1)
    with moving_state(network.stateful_layers(), True), torch.no_grad():
        for _ in range(5):
            network(images, labels)
    return network, images, labels


def to_tf32(x: Tensor) -> Tensor:
    """Round float32 to 10 bits after the point; its derivative is 1."""
    return x + (((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) - x.detach())


def rounding(convolution: Any) -> Any:
    """A convolution whose operands in float32 are rounded first."""

    def rounded(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        x, weight = (to_tf32(t) if t.dtype == torch.float32 else t for t in (x, weight))
        return convolution(x, weight, *rest, **options)

    return mock.patch.object(F, convolution.__name__, rounded)


@torch.no_grad()
def squares(d: LayerStack, x: Tensor, labels: Tensor, e: Tensor, sigma: float, antithetic: bool) -> Tensor:
    """Squared finite differences (NUM,)."""
    ends = (full(d(at, labels)) for at in (x + sigma * e, x - sigma * e if antithetic else x))
    return ((next(ends) - next(ends)) / (sigma * (1 + antithetic))).square()


def main(names: list[str]) -> None:
    """Print a table."""
    print("| recipe, type | | " + " | ".join(f"{sigma:g}" for sigma in SIGMAS) + " |")
    for name in names:
        whole, x, labels = discriminator(name)
        directions = torch.randn(DIRECTIONS, *x.shape, generator=torch.Generator().manual_seed(0))
        for dtype in TYPES:
            d = copy.deepcopy(whole)
            for parameter in d.parameters():
                parameter.data = parameter.data.to(dtype)
            images = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(full(d(images, labels)).sum() * 2.0**10, images)
            g = g.float() / 2**10
            norms, exact = g.square().sum(dim=(1, 2, 3)), (g * directions).sum(dim=(2, 3, 4)).square().mean()
            for antithetic in (False, True):
                cells = []
                for sigma in SIGMAS:
                    found = torch.stack([squares(d, x, labels, e, sigma, antithetic) for e in directions])
                    one = float(found.var(0).mean().sqrt() / norms.mean())
                    two = float(found.view(DIRECTIONS // 2, 2, NUM).mean(1).var(0).mean().sqrt() / norms.mean())
                    cells.append(f"{float(found.mean() / exact):.2f} ({one:.1f}, {two:.1f})")
                form = "both sides" if antithetic else "one side"
                print(f"| `{name}`, {str(dtype)[6:]} | {form} | " + " | ".join(cells) + " |", flush=True)
    print(f"Of an exact slope the spread is {math.sqrt(2):.2f} where all |g| are equal.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=SHOWN)
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        for convolution in (F.conv2d, F.conv_transpose2d) if options.tf32 else ():
            stack.enter_context(rounding(convolution))
        main(options.recipes)
