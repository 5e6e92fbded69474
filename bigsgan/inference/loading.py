"""Opens an exported file as a plain module: no run directory, no DeepSpeed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bigsgan.config import NETWORKS, Recipe, parse_recipe
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.precision import compute_as_suits
from bigsgan.models.stylegan2 import Mapping as StyleMapping
from bigsgan.runtime.paths import check_regular

_MOST_LETTERS = 1 << 20
"""Of a recipe."""


class ExportedNetwork(nn.Module):
    """A network with the weights of an exported file, in evaluation mode.

    A plain module: its backward is the derivative of its forward, and no forward moves a buffer, in training mode too.

    Attributes:
        recipe: Of the run that it was trained in.
        network: The layers; a generator's or a discriminator's.
        header: What the file says of itself.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, header: dict[str, str]) -> None:
        super().__init__()
        self.recipe, self.network, self.header = recipe, network, header

    def forward(self, first: Tensor, labels: Tensor | None = None, *rest: Tensor) -> Tensor:
        """Make images, or judge them.

        Args:
            first: Latents (N, Z) or input images of a generator; images (N, C, R, R) in [-1, 1] of a discriminator.
            labels: Classes (N,) int64; None for class 0.
            rest: Seeds (N,) int64 of a network that draws noise, by default 0, 1, ...; a paired discriminator's inputs.

        Returns:
            Images (N, C, R, R) in [-1, 1], or logits (N, ...).
        """
        if labels is None:
            labels = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        if not rest and getattr(self.recipe, self.header["network"]).draws:
            rest = (torch.arange(len(first), device=first.device),)
        return self.network(first, labels, *rest)


def load(path: str | Path, device: torch.device | str = "cpu") -> ExportedNetwork:
    """Open what `bigsgan export` wrote; what is opened on a CPU computes in float32.

    Raises:
        UserError: The file cannot be read, or was not exported by this project.
        RuntimeError: torch has no such device, or it has no memory left.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        recipe = _recipe(header)
        state = {name: value for name, value in state.items() if not name.startswith("layers.-")}
        _check_sizes(recipe, header["network"], state)
        network = build_network(recipe, header["network"])
        network.checkpointing = False
        for spectral in network.spectral_layers():
            spectral.orthogonal = 0.0  # belongs to training: its gradient would be added to every backward
        network.load_state_dict(state)
        psi = float(header.get("truncation", 1.0))
        if not math.isfinite(psi):
            raise ValueError("its truncation is not finite")
        for layer in network.modules():
            if isinstance(layer, StyleMapping):
                layer.truncation_psi = psi
    except MemoryError:
        raise
    except Exception as error:  # headers of others lead to whatever error they like
        cause = next(iter(str(error).splitlines()), "")
        problem = f"must be an exported network: {type(error).__name__}: {cause}"
        raise UserError(str(path), None, problem, "give a file that `bigsgan export` wrote") from None
    compute_as_suits(network, device)
    return ExportedNetwork(recipe, network, header).to(device).eval()


def _recipe(header: Mapping[str, str]) -> Recipe:
    if header["network"] not in NETWORKS or len(header["recipe"]) > _MOST_LETTERS:
        raise ValueError("its header is that of another program")
    tree = dict(json.loads(header["recipe"]))
    tree["augmentation"] = None  # belongs to training
    return parse_recipe(tree)


def _check_sizes(recipe: Recipe, network: str, state: Mapping[str, Tensor]) -> None:
    """Compare with the network that the header describes, before memory is taken for one of any size."""
    with torch.device("meta"):
        wanted = build_network(recipe, network).state_dict()
    if {name: value.shape for name, value in wanted.items()} != {name: value.shape for name, value in state.items()}:
        raise ValueError("its tensors are not those of the network that its header describes")
