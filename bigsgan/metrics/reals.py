"""Features of the real images, computed by the ranks that measure together or read from the cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.loader import Batch, CorruptImages, next_batch, read_batches
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.codec import encode
from bigsgan.metrics import real_cache
from bigsgan.metrics.features import Features
from bigsgan.metrics.impressions import Impressions
from bigsgan.runtime import comm

_log = logging.getLogger(__name__)


def see_reals(
    dataset: ImageDataset,
    data: Data,
    features: Features,
    rows_limit: int,
    batch: int,
    cache: Path,
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Impressions | None:
    """Return features of all real images, with their number as the one limit, or None if stopped. A collective.

    ``stopped`` is called before each batch on all ranks, with the same answer: whether to give up. Features
    of ``rows_limit`` images are kept as rows, some on each rank. The ranks share the directory ``cache``; if they do
    not see each other's files, it is not used.
    """
    rows_limit = min(rows_limit, len(dataset))
    tell("real images: cache")
    about = {
        "kind": data.kind,
        "root": data.root,
        **({"arguments": repr(data.arguments)} if data.is_outside else {}),
        "fingerprint": dataset.fingerprint()._asdict(),
        "resolution": data.resolution.value,
        **({} if data.fit == "crop" else {"fit": data.fit}),
        "num_classes": data.num_classes,
        "features": features.name,
        "features_sha256": features.hash,
        "resizer": features.resizer,
    }
    place = cache / f"reals-{comm.from_rank_zero(real_cache.key(dataset, about) if comm.rank() == 0 else None)}"
    cached = real_cache.load(place, features, num_labels(data), rows_limit)
    if cached is not None:
        return cached
    num = len(dataset)
    found = Impressions(features, num, num_labels(data), [num], rows_limit)
    for read in each_real(dataset, data, num, batch, tell, stopped):
        if read is None:
            return None
        images, positions, labels = read
        found.add(features(images), positions, labels)
    found.over_ranks()
    tell("real images: writing the cache")
    real_cache.save(found, place, about)
    return found


def each_real(
    dataset: ImageDataset,
    data: Data,
    num: int,
    batch: int,
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Iterator[tuple[Tensor, Tensor, Tensor] | None]:
    """Yield this rank's share of the first ``num`` images in an order that is always the same. A collective.

    Yields:
        Images (n, C, H, W) uint8 on the device, of pairs the targets; their positions (n,) in that order; and their
        classes (n,). None if ``stopped``, which is called before each batch on all ranks, and nothing more.
    """
    total, rank = len(dataset), comm.rank()
    order = order_of_images(total)
    positions = [torch.arange(first, min(first + batch, num)) for first in range(0, num, batch)]
    own = positions[rank :: comm.world_size()]
    corrupt = CorruptImages(data, dataset.num_files, rank)
    batches = zip(own, _read(dataset, data, [order[part.numpy()] for part in own]), strict=True)
    for _ in positions[:: comm.world_size()]:
        if stopped():
            yield None
            return
        for part, read in itertools.islice(batches, 1):  # ranks may have one fewer
            tell(f"real image {int(part[0])} of {num}")
            corrupt.count(read)
            images = read.images[:, -data.image_channels :]  # the target of a pair, and of two domains the second
            images = encode(images) if images.is_floating_point() else images
            classes = torch.zeros(len(part), dtype=torch.int64) if data.has_vectors else read.labels
            yield images.to(comm.device()), part, classes


def order_of_images(num: int) -> np.ndarray:
    """Return an order of ``num`` images, (num,) int64, that is always the same; the first images are of all kinds."""
    return Draws(seed=0).permutation("metrics/reals", (), num)


def num_labels(data: Data) -> int:
    """Number of classes of a data set; 1 if its images do not have one each."""
    return 1 if data.has_vectors else max(data.num_classes, 1)


def _read(dataset: ImageDataset, data: Data, indices: Sequence[np.ndarray]) -> Iterator[Batch]:
    """Read these images, and if loading processes fail, the rest in this process: training's may fill /dev/shm."""
    num_read = 0
    try:
        batches = read_batches(dataset, data, (each.tolist() for each in indices), pin_memory=False)
        while num_read < len(indices):
            yield next_batch(batches, data)
            num_read += 1
        return
    except UserError as error:
        if error.field != "data.num_workers":
            raise
        _log.warning("%s. The metrics read the remaining real images without loading processes.", error)
    unshared = data.model_copy(update={"num_workers": 0})
    yield from read_batches(dataset, unshared, (each.tolist() for each in indices[num_read:]), pin_memory=False)
