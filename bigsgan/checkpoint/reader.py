"""Reads a checkpoint in any layout: each rank reads the shards that it needs, from the files that have them.

The parts of a run that are restored implement the protocol ``StateEntry``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bigsgan.checkpoint.entries import BUFFER, MASTER, ObjectCollectives, SavedEntry, StateShard, saved_buffers
from bigsgan.checkpoint.files import Moved, unnoticed
from bigsgan.checkpoint.tags import Checkpoint
from bigsgan.errors import UserError, counted

_READ_ELEMENTS = 1 << 24
"""Elements read at a time, so that no stretch needs a second copy of itself in memory."""


class _Stretch(NamedTuple):
    """Consecutive elements of a value, saved as one tensor of one file."""

    offset: int
    numel: int
    file: Any
    tensor: str


class Reader:
    """A checkpoint's files, each opened when a value is not in the files opened before.

    The manifest says which files hold some of a value. Shards are in the order of the ranks, however many ranks there
    are. So a rank begins with the files whose place among all files is about its own among all ranks: in the layout
    that saved, with its own file.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int = 0, world_size: int = 1, moved: Moved = unnoticed) -> None:
        self.checkpoint, self._moved = checkpoint, moved
        self._files, self._holders = sorted(checkpoint.manifest["files"]), checkpoint.manifest["holders"]
        self._near = rank * len(self._files) // world_size
        self._share = [name for i, name in enumerate(self._files) if i * world_size // len(self._files) == rank]
        self._unopened = set(self._files)
        self._stretches: dict[str, list[_Stretch]] = {}
        self.num_opened = 0

    def entry(self, name: str) -> SavedValues:
        """Return the saved values of one entry.

        Raises:
            UserError: The checkpoint does not have the entry.
        """
        numbers = self.checkpoint.manifest["numbers"].get(name)
        if numbers is None:
            problem = f"has no {name}, which this run's recipe needs"
            remedy = "train the run first" if self.checkpoint.is_imported else "resume with the recipe that saved it"
            raise UserError(str(self.checkpoint.path), None, problem, remedy)
        return SavedValues(self, name, numbers, frozenset(self.checkpoint.manifest["kinds"].get(name, ())))

    def fill(self, value: str, offset: int, out: Tensor) -> None:
        """Fill ``out`` with a value's elements from ``offset`` on."""
        missing = out.numel()
        for stretch in self._overlapping(value, offset, offset + out.numel()):
            first, last = max(offset, stretch.offset), min(offset + out.numel(), stretch.offset + stretch.numel)
            with self._blamed(stretch.tensor):
                saved = stretch.file.get_slice(stretch.tensor)
                for start in range(first, last, _READ_ELEMENTS):
                    end = min(last, start + _READ_ELEMENTS)
                    out[start - offset : end - offset].copy_(saved[start - stretch.offset : end - stretch.offset])
                    self._moved((end - start) * out.element_size())
            missing -= last - first
            if missing <= 0:
                return
        if missing:
            problem = f"lacks {counted(missing, 'element')} of {value}, which this run's recipe needs"
            raise UserError(str(self.checkpoint.path), None, problem, "use another checkpoint")

    def refuse_others(self, entry: str, network: torch.nn.Module) -> None:
        """Refuse values of an entry for which a network has no place, in this rank's share of the files.

        The ranks' shares together are all files. The network may be on the meta device. Layers before its own, such as
        augmentation, may differ.

        Raises:
            UserError: A saved parameter or buffer is not in the network, or has more elements than there.
        """
        for name in self._share:
            if name in self._unopened:
                self._open(name)
        # Parameters first: a message about their sizes is easier to relate to the recipe than one about buffers.
        for kind, named in ((MASTER, network.named_parameters()), (BUFFER, saved_buffers(network).items())):
            wanted = {value_name(entry, kind, name): each.numel() for name, each in named}
            own, before = value_name(entry, kind, ""), value_name(entry, kind, "layers.-")
            for value in sorted(each for each in self._stretches if each.startswith(own)):
                saved = max(stretch.offset + stretch.numel for stretch in self._stretches[value])
                if value.startswith(before) or saved <= wanted.get(value, -1):
                    continue
                problem = f"has {value}, which the network of this run's recipe does not have"
                if value in wanted:
                    problem = f"must have {wanted[value]} elements of {value} with this run's recipe, got {saved}"
                remedy = "use another checkpoint, or the version of bigsgan that saved it"
                raise UserError(str(self.checkpoint.path), None, problem, remedy)

    def has(self, value: str) -> bool:
        """Return whether any element of a value was saved."""
        return value in self._holders

    def _overlapping(self, value: str, start: int, end: int) -> Iterator[_Stretch]:
        """Yield stretches of a value that overlap [start, end), opening files as long as the caller wants more."""
        seen = 0
        for _ in chain((None,), self._opened(value)):
            found = self._stretches.get(value, [])
            for stretch in found[seen:]:
                if stretch.offset < end and start < stretch.offset + stretch.numel:
                    yield stretch
            seen = len(found)

    def _opened(self, value: str) -> Iterator[None]:
        """Open one more file at each turn, of those that may hold some of a value."""
        for number in sorted(numbered(self._holders.get(value, "")), key=lambda number: abs(number - self._near)):
            if self._files[number] in self._unopened:
                self._open(self._files[number])
                yield

    def _open(self, name: str) -> None:
        self._unopened.remove(name)
        with self._blamed(name):
            file = safe_open(self.checkpoint.path / name, framework="pt")
            for tensor in file.keys():  # noqa: SIM118 - safe_open's own method
                value, _, offset = tensor.rpartition("@")
                (numel,) = file.get_slice(tensor).get_shape()
                self._stretches.setdefault(value, []).append(_Stretch(int(offset), numel, file, tensor))
        self.num_opened += 1

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """Turn errors of reading inside the block into a message that the checkpoint is damaged."""
        try:
            yield
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            problem = f"is damaged: {what}: {type(error).__name__}: {error}"
            remedy = "remove that directory to use an older checkpoint"
            raise UserError(str(self.checkpoint.path), None, problem, remedy) from error


class Source(Protocol):
    """What has the values of entries."""

    def fill(self, value: str, offset: int, out: Tensor) -> None:
        """Fill ``out`` with a value's elements from ``offset`` on."""

    def has(self, value: str) -> bool:
        """Return whether any element of a value is there."""

    def refuse_others(self, entry: str, network: torch.nn.Module) -> None:
        """Refuse values of an entry for which a network has no place."""


class SavedValues:
    """The saved values of one entry, whatever the layout of the ranks that saved them.

    Attributes:
        numbers: What ``SavedEntry.numbers`` returned.
        kinds: The kinds of all shards of all ranks.
    """

    def __init__(self, reader: Source, entry: str, numbers: Mapping[str, float], kinds: frozenset[str]) -> None:
        self._reader, self._entry = reader, entry
        self.numbers, self.kinds = numbers, kinds

    def read(self, kind: str, name: str, offset: int, out: Tensor) -> None:
        """Fill the one-dimensional ``out`` with the elements from ``offset`` on, in place.

        A parameter may be there as a buffer, and a buffer as a parameter, if one of the runs has frozen it.

        Raises:
            UserError: The elements were not saved, or a file is damaged.
        """
        other = {MASTER: BUFFER, BUFFER: MASTER}.get(kind)
        if other is not None and not self.has(kind, name) and self.has(other, name):
            kind = other
        self._reader.fill(value_name(self._entry, kind, name), offset, out)

    def has(self, kind: str, name: str) -> bool:
        """Return whether any element of that value was saved."""
        return self._reader.has(value_name(self._entry, kind, name))

    @torch.no_grad()
    def read_network(self, network: torch.nn.Module) -> None:
        """Fill all parameters and buffers of a network that is whole in this process.

        Raises:
            UserError: The checkpoint lacks values or has others, or a file is damaged.
        """
        self._reader.refuse_others(self._entry, network)
        self.read_into(MASTER, dict(network.named_parameters()))
        self.read_into(BUFFER, saved_buffers(network))

    @torch.no_grad()
    def read_into(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, on any device, with whole values of one kind, by name.

        Raises:
            UserError: A value was not saved, or a file is damaged.
        """
        for name, tensor in tensors.items():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
            self.read(kind, name, 0, flat)
            tensor.copy_(flat.view(tensor.shape))


class StateEntry(SavedEntry, Protocol):
    """One named entry of a run's state, which can be saved and loaded; see training/state.py."""

    def load(self, saved: SavedValues) -> None:
        """Restore the values of ``parts`` and ``numbers``, in this rank's own layout."""


@runtime_checkable
class NewEntry(Protocol):
    """A StateEntry that some checkpoints do not have, such as those of an import."""

    def forget(self) -> None:
        """Begin anew, without a saved state."""


class SharedState(ABC):
    """A StateEntry of tensors that are the same on all ranks."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name, live and contiguous."""

    def parts(self) -> list[StateShard]:
        """Return all tensors, which one rank writes."""
        return [StateShard("state", name, 0, tensor.view(-1), everywhere=True) for name, tensor in self.state().items()]

    def numbers(self) -> dict[str, float]:
        """Return none."""
        return {}

    def load(self, saved: SavedValues) -> None:
        """Restore all tensors in place."""
        saved.read_into("state", self.state())


def files_with(checkpoint: Checkpoint, entry: str) -> list[str]:
    """Return the names of files that hold values of an entry."""
    files, holders = sorted(checkpoint.manifest["files"]), checkpoint.manifest["holders"]
    held = (numbered(text) for value, text in holders.items() if value.startswith(f"{entry}/"))
    return [files[number] for number in sorted(set().union(*held))]


def intervals(numbers: Sequence[int]) -> str:
    """Write ascending numbers as a text such as "0-7 9"."""
    parts = []
    for _, found in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        own = [number for _, number in found]
        parts.append(f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}")
    return " ".join(parts)


def numbered(text: str) -> list[int]:
    """Return the numbers that ``intervals`` wrote."""
    bounds = (part.split("-") for part in text.split())
    return [number for own in bounds for number in range(int(own[0]), int(own[-1]) + 1)]


def restore(
    checkpoint: Checkpoint,
    entries: Mapping[str, StateEntry],
    ranks: ObjectCollectives,
    moved: Moved = unnoticed,
    networks: Mapping[str, torch.nn.Module] = MappingProxyType({}),
) -> None:
    """Let each entry of a run's state load the values that this rank's layout needs.

    ``networks`` maps entries to their whole networks, which may be on the meta device. Values of these entries that
    have no place in the network are refused.

    Raises:
        UserError: A value is missing, a saved value has no place, or a file is damaged.
    """
    reader = Reader(checkpoint, ranks.rank(), ranks.world_size(), moved)
    for name, network in networks.items():
        reader.refuse_others(name, network)
    for name, entry in entries.items():
        if name not in checkpoint.entries and isinstance(entry, NewEntry):
            entry.forget()
        else:
            entry.load(reader.entry(name))


def value_name(entry: str, kind: str, name: str) -> str:
    """Return the name of a flat value in the files; in a tensor's name ``@`` and the stretch's offset follow it."""
    return f"{entry}/{kind}/{name}"


def tensor_name(entry: str, part: StateShard) -> str:
    """Return the name of a stretch among a file's tensors."""
    return f"{value_name(entry, part.kind, part.name)}@{part.offset}"
