"""Parts of a state, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan import checkpoint
from bigsgan.config.sections import Checkpoints


class Entry:
    """A state entry that is told what this rank writes, and remembers what it was given."""

    def __init__(self, parts: list[checkpoint.StateShard], numbers: dict[str, float] | None = None) -> None:
        self._parts, self._numbers = parts, numbers or {}
        self.loaded: tuple[dict[str, Tensor], dict[str, float]] = ({}, {})

    def parts(self) -> list[checkpoint.StateShard]:
        return self._parts

    def numbers(self) -> dict[str, float]:
        return self._numbers

    def load(self, saved: checkpoint.SavedValues) -> None:
        tensors = {}
        for part in self._parts:
            tensors[part.name] = torch.full_like(part.values, -1)
            saved.read(part.kind, part.name, part.offset, tensors[part.name])
        self.loaded = tensors, dict(saved.numbers)


def entry(tensors: dict[str, Tensor], numbers: dict[str, float] | None = None, kind: str = "master") -> Entry:
    """An entry of whole flat values on this rank."""
    return Entry([checkpoint.StateShard(kind, name, 0, value) for name, value in tensors.items()], numbers)


def whole(network: nn.Module) -> Entry:
    """A network's state as an engine on one rank saves it."""
    masters = [checkpoint.StateShard("master", n, 0, p.detach().flatten()) for n, p in network.named_parameters()]
    return Entry(
        masters
        + [
            checkpoint.StateShard("buffer", n, 0, b.clone().flatten())
            for n, b in checkpoint.saved_buffers(network).items()
        ]
    )


def save(
    directory: Path,
    nimg: int,
    entries: Any,
    ranks: checkpoint.ObjectCollectives | None = None,
    *,
    recipe: Any = None,
    layout: Any = None,
    **section: Any,
) -> bool:
    """Save one tag; complete when this returns."""
    saver = checkpoint.Saver(directory, ranks or checkpoint.SingleProcess(), Checkpoints(**section))
    description = checkpoint.Description(recipe or {}, layout or {}, {})
    return saver.save(nimg, entries, description) and saver.finish()
