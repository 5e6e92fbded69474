"""How far the gradient of exact R1 is from float64, by family, type and method: `python -m tests.benchmarks.penalties`.

Tiny discriminators with random weights, rounded to the type before; the distance is that of the gradient of all
parameters as one vector, over its length.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from bigsgan.models.network import LayerStack
from tests.tiny import FAMILIES
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


def main() -> None:
    """Print a table."""
    print("| family | " + " | ".join(f"{str(t)[6:]}, {m}" for t in TYPES for m in ("double", "forward")) + " |")
    for family in SHOWN:
        cells = []
        for dtype in TYPES:
            network, inputs = discriminator(Path(tempfile.mkdtemp()), FAMILIES.get(family, []))
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.copy_(parameter.to(dtype))
            exact = gradients(network, inputs, "double backward")
            for parameter in network.parameters():
                parameter.data = parameter.data.to(dtype)
            for buffer in network.buffers():
                buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
            low = tuple(x.float() if x.is_floating_point() else x for x in inputs)
            for method in ("double backward", "forward mode"):
                cells.append(float((gradients(network, low, method) - exact).norm() / exact.norm()))
        print(f"| {family} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
