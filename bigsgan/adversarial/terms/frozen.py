"""Programs that are never trained, whose features terms compare. No engine contains one, nor does a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from bigsgan.data.autoencoders import check_readable, load_program
from bigsgan.errors import UserError


def load_frozen(path: Path, field: str, device: torch.device) -> Any:
    """Return a program of torch.export (.pt2) or TorchScript, without gradients of its parameters.

    Raises:
        UserError: The file that ``field`` names cannot be read.
    """
    program = _load_export(path, field, device) if path.suffix == ".pt2" else load_program(path, field, device)
    for parameter in program.parameters():
        parameter.requires_grad_(False)
    return program


def _load_export(path: Path, field: str, device: torch.device) -> Any:
    check_readable([path], field)
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
