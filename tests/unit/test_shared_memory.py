"""A small /dev/shm, such as a container's: loading processes hand images over through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bigsgan.config.data import Data
from bigsgan.data import loader
from bigsgan.data.datasets import SyntheticImages
from bigsgan.errors import UserError
from bigsgan.metrics import reals

PARTS = [np.array(part) for part in ([3, 1], [0, 2], [7], [4, 5])]
IN_A_SMALL_ONE = """
mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"
"""
READ = """
import itertools
from bigsgan.config.data import Data
from bigsgan.data import loader
from bigsgan.data.datasets import SyntheticImages
from bigsgan.errors import UserError

class Images(SyntheticImages):
    in_memory = False

data = Data(kind="synthetic", resolution=128, image_channels=3, num_classes=0, num_workers=2, prefetch=2)
free = loader._free_shared_memory
for known in (free, lambda: None):  # as where another process fills it up afterwards
    loader._free_shared_memory = known
    try:
        batches = loader.read_batches(Images(data), data, itertools.repeat([0, 1, 2, 3, 4, 5, 6, 7]), False)
        for batch in range(100):  # a reader that is ahead of the loading processes frees what they fill
            loader.next_batch(batches, data)
    except UserError as error:
        print(error, flush=True)
"""


def read(num_workers: int) -> None:
    data = Data(kind="synthetic", resolution=512, image_channels=3, num_classes=0, num_workers=num_workers, prefetch=3)
    dataset = SyntheticImages(data)
    dataset.in_memory = False
    loader.read_batches(dataset, data, iter([list(range(32))] * 100), pin_memory=False)


def test_what_loading_processes_prepare_has_to_fit(monkeypatch):
    batch = 32 * 3 * 512**2  # bytes of 32 images: 24 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=64 * 2**20 // 4096, f_frsize=4096))
    monkeypatch.setattr(loader, "DataLoader", lambda *arguments, **settings: (batch for batch in ()))
    assert 4 * batch > 64 * 2**20
    with pytest.raises(UserError, match=r"^data\.num_workers: 1 needs 96 MiB in .*, with 3 .* has 64 MiB free\)"):
        read(num_workers=1)
    read(num_workers=0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=4 * batch, f_frsize=1))
    read(num_workers=1)
    with pytest.raises(UserError, match=r"needs 168 MiB in /dev/shm, .* \(it has 96 MiB free"):
        read(num_workers=2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root mounts")
def test_a_full_one_ends_the_run_at_once():
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_A_SMALL_ONE, sys.executable, READ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in found.stderr or "mount" in found.stderr:
        pytest.skip("no namespaces here")
    assert found.returncode == 0, found.stderr
    known, met = found.stdout.splitlines()
    assert "data.num_workers: 2 needs 2 MiB in /dev/shm, with 2 micro-batches in each loading process (it has" in known
    assert "(it has 1 MiB free)" in known
    assert met == (
        "data.num_workers: 2 is too many: /dev/shm, which passes images between processes, is full; lower "
        "data.num_workers or data.prefetch, or give the container more (docker run --shm-size)"
    )
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("num_before", [0, 2])
def test_metrics_read_on_alone_where_training_has_filled_it(num_before, monkeypatch, caplog):
    """It is full when the loading processes are to start, or fills up when they have read two batches."""
    data = Data(kind="synthetic", resolution=16, image_channels=3, num_classes=0, num_workers=1, prefetch=1)
    dataset = SyntheticImages(data)
    expected = [torch.stack([dataset[i][0] for i in part]) for part in PARTS]
    dataset.in_memory = False

    def full_later(batches: Iterator[loader.Batch], data: Data) -> loader.Batch:
        if num_read == num_before and data.num_workers:
            raise UserError("data.num_workers", 1, "are full", "lower it")
        return next(batches)

    monkeypatch.setattr(loader, "_free_shared_memory", lambda: None if num_before else 0)
    monkeypatch.setattr(reals, "next_batch", full_later)
    num_read = 0
    for batch, images in zip(reals._read(dataset, data, PARTS), expected, strict=True):
        assert torch.equal(batch.images, images)
        num_read += 1
    assert num_read == len(PARTS)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("data.num_workers: ")
    assert line.endswith("The metrics read the remaining real images without loading processes.")


def test_metrics_pass_on_what_is_wrong_with_the_data(monkeypatch):
    data = Data(kind="synthetic", resolution=16, image_channels=3, num_classes=2)

    def refuse(batches: Iterator[loader.Batch], data: Data) -> loader.Batch:
        raise UserError("data.num_classes", 2, "must be at least 3", "set 3")

    monkeypatch.setattr(reals, "next_batch", refuse)
    with pytest.raises(UserError, match="num_classes"):
        list(reals._read(SyntheticImages(data), data, PARTS))
