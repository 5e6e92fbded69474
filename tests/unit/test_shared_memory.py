"""A small /dev/shm, such as a container's: loading processes hand images over through it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bigsgan.config.sections import Data
from bigsgan.data import loader
from bigsgan.data.datasets import SyntheticImages
from bigsgan.errors import UserError

IN_A_SMALL_ONE = """
mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"
"""
READ = """
import itertools
from bigsgan.config.sections import Data
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
        for batch in range(3):
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
    with pytest.raises(UserError) as caught:
        read(num_workers=1)
    assert str(caught.value) == (
        "data.num_workers: 1 loading processes, each with 3 micro-batches, need 96 MiB in /dev/shm (it has 64 MiB "
        "free); lower data.num_workers or data.prefetch, or give the container more (docker run --shm-size)"
    )
    read(num_workers=0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=4 * batch, f_frsize=1))
    read(num_workers=1)
    with pytest.raises(UserError, match=r"need 168 MiB in /dev/shm \(it has 96 MiB free"):
        read(num_workers=2)


def test_an_unknown_size_is_no_hindrance(monkeypatch):
    def fail(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", fail)
    assert loader._free_shared_memory() is None


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root mounts")
def test_a_full_one_ends_the_run_at_once():
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_A_SMALL_ONE, sys.executable, READ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in found.stderr or "mount" in found.stderr:
        pytest.skip("no namespaces here")
    assert found.returncode == 0, found.stderr
    known, met = found.stdout.splitlines()
    assert "data.num_workers: 2 loading processes, each with 2 micro-batches, need 2 MiB" in known
    assert "need 2 MiB in /dev/shm (it has 1 MiB free)" in known
    assert met == (
        "data.num_workers: 2 loading processes have filled /dev/shm, which passes images between processes; lower "
        "data.num_workers or data.prefetch, or give the container more (docker run --shm-size)"
    )
    assert "Traceback" not in found.stderr
