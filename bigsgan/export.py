"""`bigsgan export`: one network's consolidated float32 weights as a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bigsgan import memory
from bigsgan.atomic import replacing
from bigsgan.config.run_directory import refuse_output
from bigsgan.errors import UserError
from bigsgan.trained import open_trained


def main(run: Path, network: str, live: bool | None, out: Path, nimg: int | None) -> None:
    """Write parameters and buffers under their names in the network, with the recipe in the header.

    Args:
        run: Run directory.
        network: ``generator`` or ``discriminator``.
        live: The weights being trained instead of the average; None means the average where there is one.
        out: File to write.
        nimg: Which checkpoint; None for the newest.

    Raises:
        UserError: The run cannot be opened, the file cannot be written, or the discriminator's average is asked for.
    """
    if network == "discriminator" and live is False:
        raise UserError("--ema", None, "asks for an average, which only the generator has", "use --live")
    refuse_output(out)
    with memory.naming_remedy(f"while the {network} was exported", "use a machine with more memory"):
        _export(run, network, live, out, nimg)


def _export(run: Path, network: str, live: bool | None, out: Path, nimg: int | None) -> None:
    trained = open_trained(run, network, live is True, nimg, torch.device("cpu"))
    state = {name: tensor.contiguous() for name, tensor in trained.network.state_dict().items()}
    is_average = network == "generator" and live is not True
    header = {
        "network": network,
        "weights": "ema" if is_average else "live",
        "nimg": str(trained.nimg),
        "recipe": json.dumps(trained.recipe.model_dump()),
    }
    try:
        with replacing(out) as unfinished:
            save_file(state, unfinished, metadata=header)
    except (OSError, SafetensorError) as error:
        raise UserError("--out", str(out), f"cannot be written ({error})", "give a writable path") from None
    numel = sum(p.numel() for p in trained.network.parameters())
    print(f"{out}: {header['weights']} {network} at {trained.nimg} images seen, {numel / 1e6:.2f} M parameters")
