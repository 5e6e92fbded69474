"""Finds, verifies and loads the weight files of feature networks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from bigsgan.checkpoint.tags import checksum
from bigsgan.errors import UserError
from bigsgan.runtime.paths import check_stored

CHUNK = 32
"""Images that a feature network computes at a time, so that it needs less memory than a training step."""
DIGITS_OF_HASH = 16


def find_weights(given: str | None, names: list[str], url: str, digest: str) -> Path:
    """Return the file of weights: the given one, or one with these names in torch.hub's cache.

    The SHA-256 of a cached file must begin with ``digest``.

    Raises:
        UserError: There is no such file, or the cached one has another checksum.
    """
    if given is not None:
        if not os.path.isfile(given):
            problem = "must be a file" if os.path.exists(given) else "does not exist"
            raise UserError("weights", given, problem, f"download {url} and name that file")
        return Path(given)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    path = next((cache / name for name in names if (cache / name).is_file()), None)
    if path is None:
        remedy = f"download {url} to that place, or name the file by --weights (metrics.features.weights)"
        wanted = f"does not exist; its SHA-256 begins with {digest}"
        raise UserError("weights", str(cache / names[0]), wanted, remedy)
    if not checksum(path).startswith(digest):
        problem = f"must be a file whose SHA-256 begins with {digest}"
        raise UserError("weights", str(path), problem, f"download {url} again")
    return path


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a file that holds only tensors into a network, which may be on the meta device, and freeze the network.

    Raises:
        UserError: The file holds something else, or tensors of another network.
    """
    try:
        check_stored(path)
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), assign=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        what = next(iter(str(error).splitlines()), "it is damaged")  # as of an empty file
        if "weights_only" in str(error):  # torch's message recommends running the code
            what = "it contains code, which is not executed" if "GLOBAL" in str(error) else "it is damaged"
        problem = f"does not contain the network's weights: {what}"
        raise UserError("weights", str(path), problem, "download the file again") from None
    network.eval().requires_grad_(False)
