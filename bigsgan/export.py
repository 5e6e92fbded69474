"""`bigsgan export`: one network's consolidated float32 weights as a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bigsgan.checkpoint.files import first_not_finite
from bigsgan.config.run_directory import refuse_output
from bigsgan.errors import UserError, reason
from bigsgan.inference.trained import TrainedNetwork, best_device, open_trained
from bigsgan.runtime import memory
from bigsgan.runtime.atomic import replacing
from bigsgan.training.sampling import check_batch, check_truncation, smaller_batch, stand_statistics, standing_batches


def main(
    run: Path,
    network: str,
    live: bool | None,
    width: float | None,
    out: Path,
    nimg: int | None,
    standing: bool | None,
    truncation: float | None,
    batch: int,
) -> None:
    """Write parameters and buffers under their names in the network, with the recipe in the header.

    Args:
        run: Run directory.
        network: ``generator`` or ``discriminator``.
        live: Use the live weights instead of the EMA; None means the EMA if there is one.
        width: Relative width of the EMA, which is made of snapshots; None for the EMA of the checkpoint.
        out: File to write.
        nimg: Which checkpoint; None for the newest.
        standing: Give the generator the standing statistics that ``bigsgan sample`` uses, so that it makes the same
            images in evaluation mode; None means yes. Otherwise its buffers are as training left them.
        truncation: Threshold of the latents of standing statistics, or psi of a generator with styles; None for none.
        batch: Images computed at a time for standing statistics.

    Raises:
        UserError: The run cannot be opened, the file cannot be written, memory runs out, or an option does not fit.
    """
    if network == "discriminator" and live is False:
        raise UserError("--ema", None, "needs an EMA, which only the generator has", "use --live")
    if network == "discriminator" and standing:
        raise UserError("--standing", None, "needs the generator, which alone has statistics", "remove the option")
    standing = network == "generator" and standing is not False
    if truncation is not None and not standing:
        raise UserError("--truncation", None, "needs standing statistics", "remove the option, or add --standing")
    check_batch(batch)
    refuse_output(out)
    remedy = f"{smaller_batch(batch)}, or none (--no-standing)" if standing else "use a machine with more memory"
    with memory.naming_remedy(f"while the {network} was exported", remedy):
        device = best_device() if standing else torch.device("cpu")
        trained = open_trained(run, network, live is True, nimg, device, width)
        if truncation is not None:
            check_truncation(trained.recipe, truncation)
        header = {
            "network": network,
            "weights": "ema" if network == "generator" and live is not True else "live",
            "statistics": "standing" if standing else "as trained",
            **({} if width is None else {"ema_width": str(width)}),
            "nimg": str(trained.nimg),
            "recipe": json.dumps(trained.recipe.model_dump()),
        }
        if standing:
            stand_statistics(
                trained.network, trained.infer, standing_batches(trained.recipe, truncation, batch, device)
            )
            header.update({} if truncation is None else {"truncation": str(truncation)})
        _write(_finite_state(trained, network, run), header, out)
    numel = sum(p.numel() for p in trained.network.parameters())
    about = f"{header['weights']} {network} at {trained.nimg} images seen"
    print(f"{out}: {about}, {numel / 1e6:.2f} M parameters, statistics {header['statistics']}")


def _finite_state(trained: TrainedNetwork, network: str, run: Path) -> dict[str, Tensor]:
    state = {name: tensor.cpu().contiguous() for name, tensor in trained.network.state_dict().items()}
    if name := first_not_finite(state):
        problem = f"has a {network} at {trained.nimg} images with non-finite values in {name}"
        raise UserError("--run", str(run), problem, "choose an older checkpoint by --nimg")
    return state


def _write(state: dict[str, Tensor], header: dict[str, str], out: Path) -> None:
    try:
        with replacing(out) as unfinished:
            save_file(state, unfinished, metadata=header)
    except (OSError, SafetensorError) as error:
        raise UserError("--out", str(out), f"cannot be written: {reason(error, out)}", "give a writable path") from None
