"""How far the gradient of exact R1 is from float64, by family, type and method.

    python -m tests.benchmarks.penalties [--seeds N]

Tiny discriminators with random weights, rounded to the type before; the distance is that of the gradient of all
parameters as one vector, over its length. With ``--seeds`` that of StyleGAN2 in bf16 over as many random weights, with
minibatch deviation and without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bigsgan.models.network import LayerStack
from tests.tiny import TINY_GAMES
from tests.unit.test_dual import by_double_backward, by_tangents, discriminator

SHOWN = (
    "biggan", "biggan_deep", "biggan_light", "stylegan2", "stylegan2_architectures", "r3gan", "gat", "cat", "dcgan",
    "dcgan_light", "dcgan_spectral", "pix2pix", "pix2pix_resnet", "mlp",
)  # fmt: skip
"""All discriminators of tests/tiny.py; others there differ in G or in the loss alone."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE, LOSS_SCALE = 2.0**10, 2.0**10  # the objective's, for fp16; fp16's own


def gradients(network: LayerStack, inputs: tuple[Tensor, ...], method: str) -> Tensor:
    """Of the penalty, by all parameters, in float64."""

    def half(squares: Tensor, logits: Tensor) -> Tensor:
        return LOSS_SCALE * squares.float().mean() / 2

    if method == "double backward":
        found, _ = by_double_backward(network, inputs, half, SCALE)
    else:
        _, grads = by_double_backward(network, inputs, half, SCALE)
        found = by_tangents(
            network, inputs, grads.float(), lambda tangents, _: LOSS_SCALE * tangents.sum() / len(tangents)
        )
    return torch.cat([grad.double().flatten() / LOSS_SCALE for grad in found])


def errors(overrides: Sequence[str], dtype: torch.dtype, seed: int = 3) -> list[float]:
    """Of a double backward and of forward mode."""
    network, inputs = discriminator(Path(tempfile.mkdtemp()), overrides, seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.to(dtype))
    exact = gradients(network, inputs, "double backward")
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in network.buffers():
        buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    low = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    found = [gradients(network, low, method) for method in ("double backward", "forward mode")]
    return [float((each - exact).norm() / exact.norm()) for each in found]


def print_seeds(num: int) -> None:
    """Print the range and the median of errors by a double backward."""
    for name, more in (("as it is", []), ("without minibatch deviation", ["discriminator.mbstd_channels=0"])):
        found = [errors([*TINY_GAMES["stylegan2"], *more], torch.bfloat16, seed)[0] for seed in range(num)]
        middle = statistics.median(found)
        print(f"StyleGAN2 in bf16, {name}: {min(found):.2g} to {max(found):.2g}, median {middle:.2g}", flush=True)


def main() -> None:
    """Print a table, or what seeds change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0, help="of StyleGAN2's weights")
    if num := parser.parse_args().seeds:
        print_seeds(num)
        return
    print("| family | " + " | ".join(f"{str(t)[6:]}, {m}" for t in TYPES for m in ("double", "forward")) + " |")
    for family in SHOWN:
        cells = [error for dtype in TYPES for error in errors(TINY_GAMES.get(family, []), dtype)]
        print(f"| {family} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
