"""Opens an exported file as a plain module: no run directory, no DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bigsgan.config import Recipe
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.stylegan2 import Mapping


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
    """Open what `bigsgan export` wrote.

    Raises:
        UserError: The file cannot be read, or was not exported by this project.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tree: Any = json.loads(header["recipe"])
        tree["augmentation"] = None  # belongs to training
        recipe = Recipe.model_validate(tree)
        network = build_network(recipe, header["network"])
        network.checkpointing = False
        for spectral in network.spectral_layers():
            spectral.orthogonal = 0.0  # belongs to training: its gradient would be added to every backward
        network.load_state_dict({name: value for name, value in state.items() if not name.startswith("layers.-")})
    except (OSError, SafetensorError, KeyError, ValueError, ValidationError, RuntimeError) as error:
        cause = next(iter(str(error).splitlines()), "")
        problem = f"is no exported network ({type(error).__name__}: {cause})"
        raise UserError(str(path), None, problem, "give a file that `bigsgan export` wrote") from None
    for layer in network.modules():
        if isinstance(layer, Mapping) and "truncation" in header:
            layer.truncation_psi = float(header["truncation"])
    return ExportedNetwork(recipe, network, header).to(device).eval()
