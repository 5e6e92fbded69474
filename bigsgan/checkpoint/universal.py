"""Writes a network of a checkpoint as DeepSpeed's universal checkpoint, which an engine of any ZeRO stage loads.

    OUT/latest_universal                 text file: the tag's name; written last
    OUT/000000016384/zero/layers.3.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    OUT/000000016384/zero/optimizer_state.pt
    OUT/000000016384/mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt

torch.save writes the .pt files. The format is that of deepspeed 0.19.8 (checkpoint/ds_to_universal.py and
checkpoint/constants.py, version 0.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan.checkpoint.entries import BUFFER, MASTER, STEP, saved_buffers
from bigsgan.checkpoint.reader import Reader, SavedValues
from bigsgan.checkpoint.tags import Checkpoint
from bigsgan.errors import UserError
from bigsgan.runtime.atomic import fsync, write_text

_VERSION = 0.4


def write_universal(found: Checkpoint, entry: str, network: nn.Module, out: Path, told: Mapping[str, Any]) -> int:
    """Write an entry's master weights, optimizer state and buffers, with one parameter in memory at a time.

    An engine with one group of parameters loads them by ``engine.load_checkpoint``, with
    ``"checkpoint": {"load_universal": true}`` in its config, and keeps its own learning rate, betas and loss scale.
    DeepSpeed does not load buffers from such a checkpoint: they are in the client state under ``buffers``.

    Args:
        found: The checkpoint.
        entry: ``generator`` or ``discriminator``.
        network: That network, which may be on the meta device.
        out: The directory to make.
        told: Further keys of the client state.

    Returns:
        Bytes of master weights and optimizer state.

    Raises:
        UserError: The checkpoint lacks values or has others, or a file is damaged.
        OSError: The directory cannot be written.
    """
    reader = Reader(found)
    reader.refuse_others(entry, network)
    saved = reader.entry(entry)
    tag = out / found.path.name
    step = torch.tensor(float(saved.numbers[STEP])) if STEP in saved.numbers else None
    num_bytes = 0
    for name, parameter in network.named_parameters():
        directory = tag / "zero" / name
        directory.mkdir(parents=True)
        for file, value in _of_parameter(saved, name, parameter):
            if not value.isfinite().all():
                problem = f"has a {entry} at {found.nimg} images with non-finite values in {name}"
                raise UserError(str(found.path), None, problem, "choose an older checkpoint by --nimg")
            _save({"param": value}, directory / f"{file}.pt")
            num_bytes += value.nbytes
        if step is not None:
            _save(step, directory / "step.pt")
    version = metadata.version("deepspeed")
    # ZeRO 1 and 2 read the groups of the first level. ZeRO 3 reads the groups and the step of the second.
    state = {"state": {0: {"step": step}}, "param_groups": [{}]}
    optimizer = {"ds_version": version, "param_groups": [{}], "optimizer_state_dict": state}
    _save(optimizer, tag / "zero" / "optimizer_state.pt")
    model = {
        "module": {},
        "buffers": {name: _whole(saved, BUFFER, name, buffer) for name, buffer in saved_buffers(network).items()},
        "lr_scheduler": None,
        "global_steps": 0 if step is None else int(step),
        "global_samples": found.nimg,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version,
        "universal_checkpoint_info": {"universal_checkpoint_version": _VERSION},
        **told,
    }
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO 1 and 2; 3
        _save(model, tag / name)
    write_text(out / "latest_universal", found.path.name)
    return num_bytes


def _of_parameter(saved: SavedValues, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield DeepSpeed's files for a parameter, and their values, one at a time."""
    kinds = {MASTER: "fp32"} | {kind: kind for kind in sorted(saved.kinds - {MASTER, BUFFER})}
    if "exp_avg_sq" in kinds:
        kinds["exp_avg"] = "exp_avg"  # DeepSpeed reads it; with beta1 of 0 it is not saved here
    for kind, file in kinds.items():
        yield file, _whole(saved, kind, name, parameter)


def _save(value: Any, path: Path) -> None:
    """Write a value by torch.save, and wait until it is on the disk.

    Raises:
        OSError: It cannot be written. Given a path, torch.save would raise a RuntimeError that does not say why.
    """
    with path.open("wb") as file:
        torch.save(value, file)
    fsync(path)


def _whole(saved: SavedValues, kind: str, name: str, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=like.dtype if kind == BUFFER else torch.float32)
    if kind in (MASTER, BUFFER) or saved.has(kind, name):  # untrained parameters have no optimizer state
        saved.read(kind, name, 0, flat)
    return flat.view(like.shape)
