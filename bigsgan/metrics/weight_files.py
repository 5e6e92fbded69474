"""Weight files of feature networks: their path, their checksum, and how they are loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from bigsgan.checkpoint.tags import checksum
from bigsgan.errors import UserError
from bigsgan.runtime.paths import check_stored


def find_weights(given: str | None, names: list[str], url: str, digest: str) -> Path:
    """Return the file of weights: the one that was given, or one of these names in torch.hub's cache.

    The SHA-256 of the latter must begin with ``digest``.

    Raises:
        UserError: There is none, or the cached one is another file.
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
    """Give a network, which may be on the meta device, the tensors of a file that holds nothing else, and freeze it.

    Raises:
        UserError: It is none, or of another network.
    """
    try:
        check_stored(path)
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), assign=True)
    except Exception as error:  # pickle, zip and torch each have their own
        what = str(error).splitlines()[0]
        if "weights_only" in str(error):  # torch's text advises to run the code
            what = "it contains code, which is not executed" if "GLOBAL" in str(error) else "it is damaged"
        problem = f"does not contain the network's weights: {what}"
        raise UserError("weights", str(path), problem, "download the file again") from None
    network.eval().requires_grad_(False)
