"""Records of networks that are too wide for a file: their weights are drawn, and their gradients kept in part.

The file's metadata has the seed and shape of each network's weights. Of a gradient it has a few hundred numbers, evenly
spaced. What it leaves out is NaN where the record is read.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bigsgan.models import noise

KEPT = 256
"""Numbers of a gradient, at least, that are kept if it has so many."""
FIXED = ("pos_embed", "feat_rope", "w_avg")
"""Parts of a published state dict that are not weights, and neither drawn nor kept."""


def every(numel: int) -> int:
    """The distance of kept numbers; it is odd, so that they lie in all columns of a matrix of even width."""
    return (numel // KEPT) | 1


def kept(grad: Tensor) -> Tensor:
    return grad.flatten()[:: every(grad.numel())].clone()


def drawn(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    """Weights of GAT's public classes, as wide as their layers begin, but away from 0 and 1 everywhere."""
    return {name: _drawn(name, tuple(shape), seed + i) for i, (name, shape) in enumerate(shapes.items())}


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    unit = 2 * noise.uniform(torch.tensor([seed]), 0, shape)[0] - 1
    if any(part in name for part in FIXED):
        return torch.zeros(shape)
    if name.endswith(".bias") or name == "cls_token":
        return 0.02 * unit
    if len(shape) == 1:
        return (0.1 if ".ls_" in name else 1.0) * (1 + 0.2 * unit)
    if "embedding_table" in name:
        return 2 * unit
    gain = 100.0 if "latent_embedder" in name else 0.1 if "adaLN" in name else 1.0
    return gain * math.sqrt(6 / (shape[0] + math.prod(shape[1:]))) * unit


def read(path: Path) -> dict[str, Tensor]:
    """A record of either kind."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        drawn_networks = json.loads((file.metadata() or {}).get("drawn", "{}"))
    for network, (seed, shapes) in drawn_networks.items():
        found |= {f"{network}.{name}": value for name, value in drawn(shapes, seed).items()}
        for name, shape in shapes.items():
            if (part := found.get(f"{network}_grad.{name}")) is not None:
                whole = torch.full((math.prod(shape),), math.nan)
                whole[:: every(len(whole))] = part
                found[f"{network}_grad.{name}"] = whole.view(shape)
    return found
