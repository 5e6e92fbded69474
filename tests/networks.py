"""What tests of several families count and check of networks, and the widths that both BigGANs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan.models.network import LayerStack, initialize

# Brock et al. 2019, appendix B, in units of ``ch``; 16 is this project's own. G coarse to fine, D fine to coarse.
G_WIDTHS = {
    16: [4, 4, 4],
    32: [4, 4, 4, 4],
    64: [16, 16, 8, 4, 2],
    128: [16, 16, 8, 4, 2, 1],
    256: [16, 16, 8, 8, 4, 2, 1],
    512: [16, 16, 8, 8, 4, 2, 1, 1],
}
D_WIDTHS = {
    16: [4, 4, 4],
    32: [4, 4, 4, 4],
    64: [1, 2, 4, 8, 16],
    128: [1, 2, 4, 8, 16, 16],
    256: [1, 2, 4, 8, 8, 16, 16],
    512: [1, 1, 2, 4, 8, 8, 16, 16],
}
# Feature maps that attention can follow.
G_MAPS = {r: [8 * 2**i for i in range(len(w) - 1)] for r, w in G_WIDTHS.items()}
D_MAPS = {16: [8, 4], 32: [16, 8], **{r: [r >> i for i in range(1, len(D_WIDTHS[r]))] for r in (64, 128, 256, 512)}}
RESOLUTIONS = list(G_WIDTHS)


def numel(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def attention_numel(channels: int) -> int:
    return channels * (2 * (channels // 8) + 2 * (channels // 2)) + 1


def carried(network: LayerStack, *carry: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What a network returns, and the floats that its layers send, which keep their gradients; the rest is int64."""
    sent: list[Tensor] = []
    for layer in network.layers.values():
        carry = layer(*carry)
        assert isinstance(carry, tuple)
        for entry in carry:
            if entry.is_floating_point():
                assert entry.requires_grad
                entry.retain_grad()
                sent.append(entry)
            else:
                assert entry.dtype == torch.int64
    assert len(sent) >= len(network.layers)
    (output,) = carry
    return output, sent


@torch.no_grad()
def filled(network: Any, seed: int = 0) -> Any:
    """Initialize, and give what begins at 0 other values."""
    initialize(network, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name.endswith(("bias", "noise_strength")):
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return network


def part(record: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of a record whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


def derivatives(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of squares, and those of their squared norm."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    first = torch.autograd.grad((weights * y * y).sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]
