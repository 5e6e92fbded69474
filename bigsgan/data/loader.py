"""Real images on the device, in the order of order.py, prefetched by loading processes.

Shapes: n images of one micro-batch on this rank, C channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from bigsgan.config.data import Data
from bigsgan.data.codecs import build_codec
from bigsgan.data.conditions import without
from bigsgan.data.datasets import ImageDataset, Label
from bigsgan.data.latents import LatentFiles, check_images
from bigsgan.data.order import (
    EpochOrder,
    Slice,
    Stretch,
    drops_condition,
    horizontal_flips,
    phase_start,
    posterior_noise,
    random_crops,
)
from bigsgan.draws import Draws
from bigsgan.errors import UserError, at_end, counted
from bigsgan.images.codec import decode, images_of
from bigsgan.images.reading import CorruptImage
from bigsgan.images.size import Size
from bigsgan.runtime.signals import kept_from_children

warnings.filterwarnings("ignore", "This DataLoader will create")  # more processes than cores: most wait for a disk

_SHARED_MEMORY = "/dev/shm"
_MORE_SHARED_MEMORY = "lower data.num_workers or data.prefetch, or give the container more (docker run --shm-size)"

_log = logging.getLogger(__name__)


class LabelledImages(NamedTuple):
    """A micro-batch of real images on the device."""

    images: Tensor  # float32 (n, C, H, W): images in [-1, 1], or a codec's latents
    labels: Tensor  # int64 (n,), all 0 without conditions; or float32 (n, K) or (n, T, W + 1)


class ShownImages(LabelledImages):
    """A micro-batch with the images that a teacher sees, as ``images`` may be latents."""

    pixels: Tensor  # float32 (n, C, H, W) in [-1, 1]


class RealImages:
    """This rank's share of the real images, phase by phase.

    Its only state is ``position``: the images of a phase are a function of its first position, from which a resumed run
    builds this object. Loading starts when it is built, before the first ``next_phase``.

    Attributes:
        position: Position of the next phase's first image, before intervals are skipped.
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
        start: tuple[int, Sequence[Stretch]] = (0, ()),
        reads: bool = True,
        shows: bool = False,
    ) -> None:
        """Take this replica's part of every micro-batch.

        Args:
            dataset: The images, from ``build_training_dataset``.
            data: The recipe's section: loading processes, crops, flips, tolerated corrupt images.
            draws: The source of the order, the crops and the flips.
            part: The part of each batch that the replica takes.
            device: The device of the images. A CUDA device must be the current one.
            start: Position of the first image of the first ``next_phase``; intervals of positions to skip, ascending.
            reads: Whether this rank reads images; other ranks of its replica load none.
            shows: Whether a teacher sees the images too, which are then kept with latents.

        Raises:
            UserError: Some latents have no image that could be shown.
        """
        if shows:
            check_images(dataset, data)
        self._shows = shows
        self.data, self.draws, self.device, self._codec = data, draws, device, build_codec(data, device)
        self._part = part
        self.reads = reads
        self._dataset = dataset
        self._corrupt = CorruptImages(data, dataset.num_files, part.replica)
        self._batches: Iterator[Batch] = iter(())
        self.waited_seconds = 0.0
        self.rewind(*start)

    def rewind(self, position: int, skipped: Sequence[Stretch] = ()) -> None:
        """Make the next ``next_phase`` begin at another position, and skip other intervals."""
        self.close()
        self.position, self._skipped = position, skipped
        if self.reads:
            order, phases = EpochOrder(self.draws, len(self._dataset)), map(self._positions, self._starts(position))
            indices = (order.indices(positions).tolist() for micro_batches in phases for positions in micro_batches)
            pins = self.device.type == "cuda"
            self._batches = read_batches(self._dataset, self.data, indices, pins, self._shows)

    def next_phase(self) -> list[LabelledImages]:
        """Return this rank's micro-batches of the next phase, and advance.

        An unreadable image is replaced by the next readable one of the data set, and logged once.

        Raises:
            UserError: This rank has met more than ``data.max_corrupt`` unreadable images since it started; a label is
                outside ``data.num_classes``; or a loading process died.
        """
        start = next(self._starts(self.position))
        self.position = start + self._part.batch
        return [self._next_micro_batch(positions) for positions in self._positions(start)]

    def close(self) -> None:
        """End the loading processes. Only ``rewind`` makes further phases possible."""
        _end_workers(self._batches)
        self._batches = iter(())

    def _starts(self, position: int) -> Iterator[int]:
        """Yield the first position of each phase, beginning at ``position``."""
        while True:
            start = phase_start(position, self._part.batch, self._skipped)
            yield start
            position = start + self._part.batch

    def _positions(self, start: int) -> list[range]:
        """Return the positions of this replica's micro-batches, in the phase that begins at ``start``."""
        return [self._part.positions(j, start) for j in range(self._part.accumulation)]

    def _next_micro_batch(self, positions: range) -> LabelledImages:
        start = time.perf_counter()
        batch = next_batch(self._batches, self.data)
        self.waited_seconds += time.perf_counter() - start
        self._corrupt.count(batch)
        images = self._to_device(batch.images)
        if self.data.crop_from is not None:
            size, whole = self.data.resolution, self.data.crop_from
            margins = Size(whole.height - size.height, whole.width - size.width)
            offsets = self._to_device(torch.from_numpy(random_crops(self.draws, positions, margins)))
            images = _crop(images, offsets, size)
        if self.data.horizontal_flip:
            mirrored = self._to_device(torch.from_numpy(horizontal_flips(self.draws, positions)))
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if self.data.kind == "latents":
            noise = self._to_device(torch.from_numpy(posterior_noise(self.draws, positions, images[0].numel() // 2)))
            means, stds = images.chunk(2, dim=1)
            images = means + stds * noise.view_as(means)
        else:
            images = images_of(images)
        labels = batch.labels
        if probability := self.data.condition_dropout:
            labels = without(labels, drops_condition(self.draws, positions, probability))
        found = self._codec.encode(images), self._to_device(labels)
        if not self._shows:
            return LabelledImages(*found)
        shown = ShownImages(*found)
        shown.pixels = images if batch.pixels is None else decode(self._to_device(batch.pixels))
        return shown

    def _to_device(self, tensor: Tensor) -> Tensor:
        # A copy from pageable memory waits for all queued work on the GPU; one from pinned memory does not.
        if self.device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def next_batch(batches: Iterator[Batch], data: Data) -> Batch:
    """Take the next batch of ``read_batches``.

    Raises:
        UserError: A label is outside ``data.num_classes``, a loading process died, or /dev/shm is full.
        StopIteration: There are no more batches.
    """
    try:
        batch = next(batches)
    except _SharedMemoryFullError as error:
        problem = f"is too many: {_SHARED_MEMORY}, which passes images between processes, is full"
        raise UserError("data.num_workers", data.num_workers, problem, _MORE_SHARED_MEMORY) from error
    except RuntimeError as error:
        if not re.match(r"DataLoader worker \(pid", str(error)):  # torch has no special type for it
            raise
        problem, detail = "fails: a loading process died", str(error).splitlines()[0]
        remedy = "lower data.num_workers or data.prefetch, or give the machine more memory (/dev/shm in a container)"
        raise UserError("data.num_workers", data.num_workers, problem, remedy, detail) from error
    # Checked on the CPU: on a GPU, a label out of range fails an assertion that does not name the label.
    num_classes = data.num_classes
    if data.has_vectors or not batch.complete:  # vectors are checked where they are read
        return batch
    lowest, highest = int(batch.labels.min()), int(batch.labels.max())
    if num_classes and not 0 <= lowest <= highest < num_classes:
        problem, remedy = f"must be at least {highest + 1}", f"set data.num_classes={highest + 1} or more"
        detail = f"the data has the labels {lowest} and {highest}, and classes count from 0"
        if lowest < 0:
            problem, remedy = "must be 0 with this data", "set data.num_classes=0 to train without classes"
            detail = f"an image has the label {lowest}, and classes count from 0"
        raise UserError("data.num_classes", num_classes, problem, remedy, detail)
    return batch


class CorruptImages:
    """Counts unreadable images and logs each once; too many of them end the run."""

    def __init__(self, data: Data, num_files: int, rank: int) -> None:
        """Start with none of the files, of which the data-parallel ``rank`` counts its own."""
        self._tolerated, self._rank = data.most_corrupt(num_files), rank
        self._root = data.root if data.root and os.path.exists(data.root) else None
        self._paths: set[str] = set()

    def count(self, batch: Batch) -> None:
        """Log the unreadable images of a batch.

        Raises:
            UserError: There are too many, a sample could not be replaced, or the data has gone.
        """
        if batch.corrupt and self._root and not os.path.exists(self._root):
            raise UserError("data.root", self._root, "does not exist any more", "put it back, and resume")
        for path, reason in batch.corrupt:
            if path not in self._paths:
                self._paths.add(path)
                _log.warning("skipped an unreadable image: %s: %s", path, reason)
        too_many = len(self._paths) > self._tolerated
        if batch.complete and not too_many:
            return
        path, reason = batch.corrupt[-1]
        num, rank = len(self._paths), f"data-parallel rank {self._rank}"
        remedy = "repair or remove the images that the log names"
        if too_many:
            problem = f"is less than the number of unreadable images that {rank} has found, {num}"
            remedy += ", or raise data.max_corrupt"
        else:
            problem = f"does not help, as {rank} finds no readable image in place of an unreadable one"
        raise UserError("data.max_corrupt", self._tolerated, problem, remedy, f"the last is {path}: {reason}")


def _crop(images: Tensor, offsets: Tensor, size: Size) -> Tensor:
    """Cut out ``size`` with top left corners ``offsets`` (n, 2): (n, C, H, W) -> (n, C, *size)."""
    n, channels, *_ = images.shape
    rows, columns = (  # (n, height) and (n, width)
        offsets[:, axis, None] + torch.arange(side, device=images.device) for axis, side in enumerate(size)
    )
    image, channel = (torch.arange(num, device=images.device) for num in (n, channels))
    return images[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def _end_workers(batches: Iterator[Batch] | None) -> None:
    """End loading processes now. They would end with the last reference, but a traceback may hold one."""
    if batches is not None and hasattr(batches, "_shutdown_workers"):  # torch 2.8 to 2.15 have no public name
        batches._shutdown_workers()


class Batch(NamedTuple):
    """One micro-batch from a loading process, and the unreadable images among its samples."""

    images: Tensor  # uint8 (n, C, H, W), or float32: latents, or images of ``data.range``
    labels: Tensor  # int64 (n,), or float32 (n, K)
    corrupt: list[tuple[str, str]]  # path and reason of each unreadable image, which another image replaces
    complete: bool  # False if no readable image was found for some sample
    pixels: Tensor | None = None  # uint8 (n, C, H, W), the images of latents if they are wanted


class _Sample(NamedTuple):
    image: Tensor | None
    label: Label
    corrupt: list[tuple[str, str]]
    pixels: Tensor | None = None


class _ReadableImages:
    """A data set in which the next readable image replaces a corrupt one; ``shown`` returns the images of latents."""

    def __init__(
        self, dataset: ImageDataset, max_corrupt: int, shown: Callable[[int], Tensor | None] | None = None
    ) -> None:
        self.dataset, self.attempts = dataset, min(len(dataset), max_corrupt + 1)
        self.shown = shown

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Sample:
        corrupt: list[tuple[str, str]] = []
        for step in range(self.attempts):
            try:
                place = (index + step) % len(self.dataset)
                image, label = self.dataset[place]
                return _Sample(image, label, corrupt, self.shown(place) if self.shown else None)
            except CorruptImage as error:
                corrupt.append((error.path, error.reason))
        return _Sample(None, 0, corrupt)


def _collate(samples: list[_Sample]) -> Batch:
    images = [sample.image for sample in samples if sample.image is not None]
    labels = torch.from_numpy(np.array([sample.label for sample in samples if sample.image is not None]))
    corrupt = [report for sample in samples for report in sample.corrupt]
    stacked = torch.stack(images) if images else torch.empty(0, dtype=torch.uint8)
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    shown = torch.stack(pixels) if pixels else None
    if get_worker_info() is not None:
        try:
            stacked.share_memory_(), labels.share_memory_()
            if shown is not None:
                shown.share_memory_()
        except RuntimeError as error:
            # Otherwise torch's queue thread fails to share them and drops the batch, and the rank waits forever.
            raise _SharedMemoryFullError(str(error)) from None
    return Batch(stacked, labels, corrupt, len(images) == len(samples), shown)


class _SharedMemoryFullError(RuntimeError):
    """A loading process found no shared memory for a batch."""


def _check_shared_memory(data: Data, indices: Iterator[list[int]], keeps_images: bool) -> Iterator[list[int]]:
    """Refuse to prefetch more micro-batches than fit into /dev/shm; return the indices unchanged.

    The host's other ranks use it too, but their needs are not known here.
    """
    first = list(itertools.islice(indices, 1))
    needed, free = data.shared_bytes(sum(map(len, first)), keeps_images), _free_shared_memory()
    if free is not None and needed > free:
        needs, has = f"{math.ceil(needed / 2**20)} MiB", f"{free // 2**20} MiB free"
        problem = (
            f"needs {needs} in {_SHARED_MEMORY}, with {counted(data.prefetch, 'micro-batch')} in each loading process"
        )
        raise UserError("data.num_workers", data.num_workers, problem, _MORE_SHARED_MEMORY, f"it has {has}")
    return itertools.chain(first, indices)


def _free_shared_memory() -> int | None:
    """Return the free bytes, or None if the system does not say."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def read_batches(
    dataset: ImageDataset, data: Data, indices: Iterator[list[int]], pin_memory: bool, shows: bool = False
) -> Iterator[Batch]:
    """Read batches in the given order, in this process or ahead of time in ``data.num_workers`` others.

    ``indices`` are the images of each batch. Pinned memory is for asynchronous copies to a GPU. ``shows`` adds the
    images that were kept with latents.

    Raises:
        UserError: The prefetched batches do not fit into /dev/shm.
    """
    shown = dataset.image if shows and isinstance(dataset, LatentFiles) else None
    readable = _ReadableImages(dataset, data.most_corrupt(dataset.num_files), shown)
    if dataset.in_memory or not data.num_workers:
        return (_collate([readable[index] for index in batch]) for batch in indices)
    indices = _check_shared_memory(data, indices, shown is not None)
    loader: DataLoader = DataLoader(
        readable,  # type: ignore[arg-type]
        batch_sampler=indices,  # type: ignore[arg-type]
        num_workers=data.num_workers,  # torch gives each a single thread
        prefetch_factor=data.prefetch,
        collate_fn=_collate,
        pin_memory=pin_memory,
        # Otherwise the processes' seed, which is not used, would be drawn from torch's global generator.
        generator=torch.Generator(),
    )
    with kept_from_children():
        batches = iter(loader)
    # At exit multiprocessing would wait forever for processes that ignore signals.
    found = weakref.ref(batches)
    at_end(lambda: _end_workers(found()))
    return batches
