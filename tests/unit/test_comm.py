"""What a rank asks of its process group and of its host."""

import os

import pytest
import torch
import torch.distributed as dist

from bigsgan.runtime import comm


@pytest.mark.parametrize(
    "asked, local_size, expected", [(None, 4, 4), ("1", 4, 4), ("3", 4, 3), ("2,1", 8, 2), ("", 32, 1), (None, 1, 16)]
)
def test_a_rank_computes_on_its_part_of_the_cores(monkeypatch, asked, local_size, expected):
    """deepspeed sets no number of threads, torchrun 1; a user's own number counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert comm._num_threads(local_size) == expected


@pytest.mark.parametrize("backend, expected", [("nccl", [3]), ("gloo", None)])
def test_a_barrier_names_the_rank_s_own_device(monkeypatch, backend, expected):
    """NCCL would guess it from the rank."""
    seen = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: seen.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    comm.barrier()
    assert seen == [expected]
