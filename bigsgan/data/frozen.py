"""Programs that are never trained, whose features terms compare. No engine contains one, nor does a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from bigsgan.data.autoencoders import check_readable, load_program
from bigsgan.errors import UserError

_NEAR = 1e-2
"""Difference of features from rounding, relative to the largest: kernels may change between two calls."""


def load_frozen(path: Path, field: str, device: torch.device) -> Any:
    """Return a program of torch.export (.pt2) or TorchScript, without gradients of its parameters.

    Raises:
        UserError: The file that ``field`` names cannot be read.
    """
    program = _load_export(path, field, device) if path.suffix == ".pt2" else load_program(path, field, device)
    for parameter in program.parameters():
        parameter.requires_grad_(False)
    return program


@torch.no_grad()
def refuse_moving(tensors: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]], field: str, path: str) -> None:
    """Refuse a program that computes something else of the same images again, or changes its parameters and buffers.

    Args:
        tensors: Its parameters and buffers.
        compute: Computes features of some images.
        field: The key that named it.
        path: Its file.

    Raises:
        UserError: It is so, as if it was exported in training mode.
    """
    before, found = [each.clone() for each in tensors], compute()
    if any(each.is_meta for each in found):
        return
    pairs = zip(found, compute(), strict=True)
    far = any((first - again).abs().max() > _NEAR * first.abs().max() for first, again in pairs)
    if far or not all(map(torch.equal, before, tensors)):
        problem = "is not frozen: the same images give other features, or change it"
        raise UserError(field, path, problem, "export it after .eval()")


def _load_export(path: Path, field: str, device: torch.device) -> Any:
    check_readable([path], field)
    log = logging.getLogger("torch.export")
    was_disabled, log.disabled = log.disabled, True  # torch 2.14 prints the traceback of what it then raises
    try:
        program = torch.export.load(path)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        return program.module()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from zipfile, json or torch
        detail = next(iter(str(error).splitlines()), "")
        remedy = "save it with torch.export.save"
        raise UserError(field, str(path), "must be a program of torch.export", remedy, detail) from None
    finally:
        log.disabled = was_disabled
