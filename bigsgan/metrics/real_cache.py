"""Caches features of real images: one file of sums, and one file of rows for each rank that wrote the entry."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bigsgan.data.datasets import ImageDataset
from bigsgan.images.reading import CorruptImage
from bigsgan.metrics.features import Features
from bigsgan.metrics.impressions import Impressions, Rows, join_rows
from bigsgan.runtime import comm
from bigsgan.runtime.atomic import replacing

FORMAT = 2
PRINTED_IMAGES = 32
"""Number of images, spread over a data set, in its fingerprint."""

_SUMS, _CONTENT, _ABOUT = "sums.safetensors", "content", "about"

_log = logging.getLogger(__name__)


def directory() -> Path:
    """The cache's directory: BIGSGAN_CACHE, or ~/.cache/bigsgan."""
    chosen = os.environ.get("BIGSGAN_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bigsgan"


def key(dataset: ImageDataset, about: Mapping[str, Any]) -> str:
    """Name of a cache entry: a hash of ``about`` and of some images with their classes, after cropping and resizing."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **about}, sort_keys=True).encode())
    for i in range(PRINTED_IMAGES):
        try:
            image, label = dataset[i * len(dataset) // PRINTED_IMAGES]
            digest.update(image.numpy().tobytes() + str(label).encode())
        except CorruptImage:
            digest.update(b"corrupt")
    return digest.hexdigest()[:32]


def save(found: Impressions, place: Path, about: Mapping[str, Any]) -> None:
    """Cache the statistics of all images: sums over all ranks, and this rank's rows. A collective.

    ``found`` has one limit, the number of images. A failure is a warning. ``about`` is for people who read the file.
    """
    rows = found.rows
    name, problem = None, None
    if len(rows.positions):
        name = f"rows-{uuid.uuid4().hex}.safetensors"  # unlike files of other or earlier writers
        tensors = {"features": rows.features, "positions": rows.positions, "labels": rows.labels}
        problem = _problem(place / name, tensors, {})
    gathered = comm.gather_objects((name, problem))
    if gathered is None:
        return
    problem = next((problem for _, problem in gathered if problem), None)
    parts = [name for name, _ in gathered if name]
    if problem is None:  # the sums are written last, as they make the entry complete
        content = json.dumps({"rows_limit": found.rows_limit, "parts": parts})
        metadata = {_CONTENT: content, _ABOUT: json.dumps(about)}
        (moments,) = found.moments.values()
        sums = {"num": torch.tensor(moments.num), "total": moments.total, "products": moments.products}
        sums["labels"] = found.labels
        for scores in found.scores.values():
            sums.update({f"scores.{name}": tensor for name, tensor in vars(scores).items()})
        problem = _problem(place / _SUMS, sums, metadata)
    if problem:
        _log.warning("statistics of the real images cannot be cached: %s", problem)
        return
    for old in place.glob("rows-*"):
        if old.name not in parts:
            old.unlink(missing_ok=True)


def load(place: Path, features: Features, num_labels: int, rows_limit: int) -> Impressions | None:
    """Return an entry that has at least ``rows_limit`` rows, with this rank's share of them, or None. A collective."""
    try:
        found = _read(place, features, num_labels, rows_limit)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError):  # none yet, incomplete, damaged
        found = None
    if comm.any_rank(found is None) or found is None:
        return None
    return found if comm.total(len(found.rows.positions)) == rows_limit else None


def _read(place: Path, features: Features, num_labels: int, rows_limit: int) -> Impressions | None:
    with safe_open(place / _SUMS, "pt") as file:
        content = json.loads(file.metadata()[_CONTENT])
        sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if content["rows_limit"] < rows_limit:
        return None
    num = int(sums.pop("num"))
    found = Impressions(features, num, num_labels, [num], rows_limit)
    (moments,) = found.moments.values()
    moments.num, moments.total, moments.products = num, sums.pop("total"), sums.pop("products")
    found.labels = sums.pop("labels")
    for name, tensor in sums.items():
        (scores,) = found.scores.values()
        setattr(scores, name.removeprefix("scores."), tensor)
    rank, num_ranks = comm.rank(), comm.world_size()
    parts = []
    for name in content["parts"] if rows_limit else []:
        with safe_open(place / name, "pt") as file:
            total = file.get_slice("positions").get_shape()[0]
            own = slice(total * rank // num_ranks, total * (rank + 1) // num_ranks)
            rows = [file.get_slice(kind)[own] for kind in ("features", "positions", "labels")]
            asked = rows[1] < rows_limit
            parts.append(Rows(*(row[asked] for row in rows)))
    found.rows = join_rows(parts, features.width)
    return found


def _problem(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> str | None:
    """Write a file; return the problem, if any."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
    except (OSError, SafetensorError) as error:
        return f"{path}: {error}"
    return None
