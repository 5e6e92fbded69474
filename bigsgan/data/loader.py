"""Real images on the device, in the order of order.py, read ahead by loading processes.

Shapes: n images of one micro-batch on this rank, C channels, R pixels a side.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from bigsgan.config.sections import Data
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.images import CorruptImage
from bigsgan.data.order import EpochOrder, Slice, Stretch, horizontal_flips, phase_start, random_crops
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.signals import kept_from_children

_SHARED_MEMORY = "/dev/shm"
_MORE_SHARED_MEMORY = "lower data.num_workers or data.prefetch, or give the machine more (docker run --shm-size)"

_log = logging.getLogger(__name__)


class LabelledImages(NamedTuple):
    """A micro-batch of real images on the device."""

    images: Tensor
    """float32 (n, C, R, R) in [-1, 1]."""
    labels: Tensor
    """int64 (n,), all 0 where ``data.num_classes`` is 0."""


class RealImages:
    """This rank's share of the real images, phase by phase.

    Its only state is ``position``: what a phase holds is a function of where it begins, so a run that resumes builds
    it anew from there. Loading starts here, ahead of the first ``next_phase``.

    Attributes:
        waited_seconds: How long this rank has waited for images so far.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        data: Data,
        draws: Draws,
        part: Slice,
        device: torch.device,
        *,
        position: int = 0,
        skipped: Sequence[Stretch] = (),
        reads: bool = True,
    ) -> None:
        """Take this replica's part of every micro-batch.

        Args:
            dataset: The images, as ``build_training_dataset`` opens them.
            data: The recipe's section: loading processes, crops, flips, tolerated corrupt images.
            draws: The source of the order, the crops and the flips.
            part: What the replica takes.
            device: Where the images go. A CUDA device has to be the current one.
            position: Images of the order that come before the first ``next_phase``.
            skipped: Stretches of the order that are passed over, ascending.
            reads: Whether this rank is the one of its replica that reads images; the others load none.
        """
        self.data, self.draws, self.device = data, draws, device
        self._part = part
        self.reads = reads
        self._dataset = dataset
        self._corrupt = CorruptImages(data.max_corrupt, part.replica)
        self._batches: Iterator[Batch] = iter(())
        self.waited_seconds = 0.0
        self.rewind(position, skipped)

    def rewind(self, position: int, skipped: Sequence[Stretch] = ()) -> None:
        """Have the next ``next_phase`` begin at another position, where ``skipped`` are passed over."""
        self.close()
        self._position, self._skipped = position, skipped
        if self.reads:
            phases = map(self._positions, self._starts(position))
            indices = _endless_indices(EpochOrder(self.draws, len(self._dataset)), phases)
            self._batches = read_batches(self._dataset, self.data, indices, pin_memory=self.device.type == "cuda")

    @property
    def position(self) -> int:
        """Images of the order that come before what ``next_phase`` returns, skipped ones among them."""
        return self._position

    def next_phase(self) -> list[LabelledImages]:
        """Return this rank's micro-batches of the next phase, and advance.

        An image that cannot be read is replaced by the next readable one of the data set and logged once.

        Raises:
            UserError: More than ``data.max_corrupt`` different images could not be read, on this rank since it
                started; a label is outside ``data.num_classes``; or a loading process died.
        """
        start = next(self._starts(self._position))
        self._position = start + self._part.batch
        return [self._next_micro_batch(positions) for positions in self._positions(start)]

    def close(self) -> None:
        """End the loading processes. No phase can be taken afterwards, but after ``rewind``."""
        _end_workers(self._batches)
        self._batches = iter(())

    def _starts(self, position: int) -> Iterator[int]:
        """Where each phase begins, from a position on."""
        while True:
            start = phase_start(position, self._part.batch, self._skipped)
            yield start
            position = start + self._part.batch

    def _positions(self, start: int) -> list[range]:
        """Of this replica's micro-batches, in the phase that begins at ``start``."""
        return [self._part.positions(j, start) for j in range(self._part.accumulation)]

    def _next_micro_batch(self, positions: range) -> LabelledImages:
        start = time.perf_counter()
        batch = next_batch(self._batches, self.data)
        self.waited_seconds += time.perf_counter() - start
        self._corrupt.count(batch)
        images = self._to_device(batch.images)
        if self.data.crop_from is not None:
            margin = self.data.crop_from - self.data.resolution
            offsets = self._to_device(torch.from_numpy(random_crops(self.draws, positions, margin)))
            images = _crop(images, offsets, self.data.resolution)
        if self.data.horizontal_flip:
            mirrored = self._to_device(torch.from_numpy(horizontal_flips(self.draws, positions)))
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        # Bytes travel; float32 appears on the device alone. 127.5 maps 0 .. 255 onto -1 .. 1 with both ends exact.
        images = images.to(torch.float32).div_(127.5).sub_(1.0)
        return LabelledImages(images, self._to_device(batch.labels))

    def _to_device(self, tensor: Tensor) -> Tensor:
        # From pageable memory CUDA waits for all queued work before it copies; from pinned memory it does not.
        if self.device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def next_batch(batches: Iterator[Batch], data: Data) -> Batch:
    """Take the next batch of ``read_batches``.

    Raises:
        UserError: A label is outside ``data.num_classes``, a loading process died, or /dev/shm is full.
        StopIteration: There is none.
    """
    try:
        batch = next(batches)
    except _SharedMemoryFullError as error:
        problem = f"loading processes filled {_SHARED_MEMORY}, through which they hand images over"
        raise UserError("data.num_workers", data.num_workers, problem, _MORE_SHARED_MEMORY) from error
    except RuntimeError as error:
        if not re.match(r"DataLoader worker \(pid", str(error)):  # torch has no type of its own for it
            raise
        raise UserError(
            "data.num_workers",
            data.num_workers,
            f"but a loading process died: {str(error).splitlines()[0]}",
            "lower data.num_workers or data.prefetch, or give the machine more memory (/dev/shm in a container)",
        ) from error
    # While they are on the CPU: on a GPU a label out of range ends in an assertion that names nothing.
    num_classes, lowest, highest = data.num_classes, int(batch.labels.min()), int(batch.labels.max())
    if num_classes and not 0 <= lowest <= highest < num_classes:
        raise UserError(
            "data.num_classes",
            num_classes,
            f"but the data has the labels {lowest} and {highest}",
            f"classes count from 0; set data.num_classes to {highest + 1} or more",
        )
    return batch


class CorruptImages:
    """Images that could not be read, each logged once; too many of them end the run."""

    def __init__(self, tolerated: int, rank: int) -> None:
        """Begin with none.

        Args:
            tolerated: ``data.max_corrupt``.
            rank: Index of this data-parallel rank, for the message.
        """
        self._tolerated, self._rank = tolerated, rank
        self._paths: set[str] = set()

    def count(self, batch: Batch) -> None:
        """Log those that were met on the way to a batch.

        Raises:
            UserError: They are too many, or some sample could not be replaced.
        """
        for path, reason in batch.corrupt:
            if path not in self._paths:
                self._paths.add(path)
                _log.warning("skipped an image that cannot be read: %s: %s", path, reason)
        too_many = len(self._paths) > self._tolerated
        if batch.complete and not too_many:
            return
        path, reason = batch.corrupt[-1]
        raise UserError(
            "data.max_corrupt",
            self._tolerated,
            f"but {len(self._paths)} images could not be read on data-parallel rank {self._rank}, "
            f"the last {path} ({reason})",
            "repair or remove the images that the log names" + (", or raise data.max_corrupt" if too_many else ""),
        )


def _crop(images: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Squares of ``size`` whose top left corners are at ``offsets`` (n, 2): (n, C, R, R) -> (n, C, size, size)."""
    n, channels, *_ = images.shape
    reach = torch.arange(size, device=images.device)
    rows, columns = (offsets[:, :, None] + reach).unbind(1)  # (n, size) each
    image, channel = (torch.arange(num, device=images.device) for num in (n, channels))
    return images[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def _end_workers(batches: Iterator[Batch] | None) -> None:
    """End loading processes now. They end with the last reference too, but a traceback may hold one."""
    if batches is not None and hasattr(batches, "_shutdown_workers"):  # torch 2.8 to 2.15; there is no public name
        batches._shutdown_workers()


class Batch(NamedTuple):
    """What a loading process sends: one micro-batch, and the images that it met and could not read.

    Attributes:
        images: uint8 (n, C, R, R).
        labels: int64 (n,).
        corrupt: Path and reason of each image that another one stands in for.
        complete: False where no readable image was found for some sample.
    """

    images: Tensor
    labels: Tensor
    corrupt: list[tuple[str, str]]
    complete: bool


class _Sample(NamedTuple):
    image: Tensor | None
    label: int
    corrupt: list[tuple[str, str]]


class _Readable:
    """A data set whose every sample is readable: a corrupt one becomes the next that is not."""

    def __init__(self, dataset: ImageDataset, max_corrupt: int) -> None:
        self.dataset, self.attempts = dataset, min(len(dataset), max_corrupt + 1)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Sample:
        corrupt: list[tuple[str, str]] = []
        for step in range(self.attempts):
            try:
                image, label = self.dataset[(index + step) % len(self.dataset)]
                return _Sample(image, label, corrupt)
            except CorruptImage as error:
                corrupt.append((error.path, error.reason))
        return _Sample(None, 0, corrupt)


def _collate(samples: list[_Sample]) -> Batch:
    images = [sample.image for sample in samples if sample.image is not None]
    labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
    corrupt = [report for sample in samples for report in sample.corrupt]
    stacked = torch.stack(images) if images else torch.empty(0, dtype=torch.uint8)
    if get_worker_info() is not None:
        try:
            stacked.share_memory_(), labels.share_memory_()
        except RuntimeError as error:
            # The thread that would share them otherwise loses the batch, for which the rank then waits for ever.
            raise _SharedMemoryFullError(str(error)) from None
    return Batch(stacked, labels, corrupt, len(images) == len(samples))


def _endless_indices(order: EpochOrder, phases: Iterator[list[range]]) -> Iterator[list[int]]:
    for micro_batches in phases:
        for positions in micro_batches:
            yield order.indices(positions).tolist()


class _SharedMemoryFullError(RuntimeError):
    """A loading process has no place to put a batch."""


def _check_shared_memory(data: Data, indices: Iterator[list[int]]) -> Iterator[list[int]]:
    """Refuse more micro-batches ahead than fit into /dev/shm; return the indices unchanged.

    Other ranks of the host fill it too, but may be done with it: what all need together is not known here.
    """
    first = list(itertools.islice(indices, 1))
    pixels = (data.crop_from or data.resolution) ** 2 * (data.image_channels + data.paired * data.input_channels)
    # With the one that the rank holds.
    needed, free = (data.num_workers * data.prefetch + 1) * sum(map(len, first)) * pixels, _free_shared_memory()
    if free is not None and needed > free:
        problem = (
            f"loading processes prepare {data.prefetch} micro-batches each, for which {_SHARED_MEMORY} needs "
            f"{math.ceil(needed / 2**20)} MiB and has {free // 2**20} MiB free"
        )
        raise UserError("data.num_workers", data.num_workers, problem, _MORE_SHARED_MEMORY)
    return itertools.chain(first, indices)


def _free_shared_memory() -> int | None:
    """Bytes, or None where the machine does not say."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def read_batches(dataset: ImageDataset, data: Data, indices: Iterator[list[int]], pin_memory: bool) -> Iterator[Batch]:
    """Read batches in the given order, in this process or ahead of it in ``data.num_workers`` others.

    Args:
        dataset: The images.
        data: The recipe's section.
        indices: Images of each batch.
        pin_memory: Whether batches shall lie in pinned memory, for copies to a GPU that nothing waits for.

    Raises:
        UserError: What those processes prepare does not fit into /dev/shm.
    """
    readable = _Readable(dataset, data.max_corrupt)
    if dataset.in_memory or not data.num_workers:
        return (_collate([readable[index] for index in batch]) for batch in indices)
    indices = _check_shared_memory(data, indices)
    loader: DataLoader = DataLoader(
        readable,  # type: ignore[arg-type]
        batch_sampler=indices,  # type: ignore[arg-type]
        num_workers=data.num_workers,  # torch gives each a single thread
        prefetch_factor=data.prefetch,
        collate_fn=_collate,
        pin_memory=pin_memory,
        # The processes' seed, which nothing here uses, would else be drawn from torch's global state.
        generator=torch.Generator(),
    )
    with kept_from_children():
        batches = iter(loader)
    # At exit multiprocessing would wait for ever for processes that no signal ends.
    found = weakref.ref(batches)
    atexit.register(lambda: _end_workers(found()))
    return batches
