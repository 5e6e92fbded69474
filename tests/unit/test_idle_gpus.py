"""A machine with GPUs that torch cannot use does not train on its CPU unless it is told to."""

import os
from unittest import mock

import pytest
import torch

from bigsgan.errors import UserError
from bigsgan.runtime import comm, idle_gpus
from bigsgan.runtime import gpus as machine


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    with mock.patch.dict(os.environ):  # in which a start writes the ranks
        yield


@pytest.mark.parametrize(
    "cuda, parts", [(None, ["a build without CUDA"]), ("13.0", ["a driver for CUDA 13.0", "older CUDA"])]
)
def test_it_is_refused_before_ranks_join(gpus, monkeypatch, cuda, parts):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError) as caught:
        comm.initialize()
    assert all(part in str(caught.value) for part in [torch.__version__, "DS_ACCELERATOR=cpu", *parts])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "environment", [{"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}]
)
def test_the_cpu_may_be_asked_for(gpus, environment):
    idle_gpus.refuse_idle_gpus(environment)


def test_gpus_of_others_do_not_count(gpus, tmp_path, monkeypatch):
    def no(path, flags):
        raise PermissionError(path)

    monkeypatch.setattr(machine.os, "open", no)
    idle_gpus.refuse_idle_gpus({})


def test_a_driver_without_a_gpu_does_not_count(gpus, tmp_path):
    for path in tmp_path.glob("nvidia[0-9]"):
        path.unlink()
    idle_gpus.refuse_idle_gpus({})
