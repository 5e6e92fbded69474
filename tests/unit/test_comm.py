"""What a rank asks of its process group and of its host."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from bigsgan.runtime import comm


@pytest.mark.parametrize(
    "asked, by_torchrun, num_cores, local_size, expected",
    [
        (None, False, 16, 4, 4),
        (None, False, 16, 32, 1),
        ("1", True, 16, 4, 4),
        ("1", False, 16, 4, None),
        ("3", True, 16, 4, None),
        (None, False, 4, 4, None),  # as Slurm binds it
    ],
)
def test_threads(monkeypatch, asked, by_torchrun, num_cores, local_size, expected):
    """A part of the cores, unless the user has chosen, or the launcher has divided them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    monkeypatch.setenv("LOCAL_SIZE", "1")  # a rank that sees a GPU of its own divides the cores nevertheless
    monkeypatch.setenv("WORLD_SIZE", "8")
    variables = {"OMP_NUM_THREADS": asked, "TORCHELASTIC_RUN_ID": "none" if by_torchrun else None}
    variables |= {"SLURM_STEP_NUM_TASKS": "8" if num_cores < 16 else None, "SLURM_CPUS_ON_NODE": None}
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert comm._num_threads() == expected


@pytest.mark.slow
def test_a_rank_on_a_cpu_has_the_threads_that_were_asked_for():
    code = "import torch; from bigsgan.runtime import comm; comm.initialize(); print(torch.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[-1:] == ["1"], done.stderr


@pytest.mark.parametrize(
    "tasks, cpus, expected",
    [("8", "16", 4), ("8", "4", 1), ("2", "16", 1), (None, None, 1)],
    ids=["bound by Slurm", "Slurm, not bound", "agents on Slurm", "in a container"],
)
def test_cores_of_one_of_4_ranks_that_sees_4_of_16(monkeypatch, tasks, cpus, expected):
    """Slurm may give each of its tasks cores of its own; whatever else limits them limits all ranks of the host."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    slurm = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_CPUS_ON_NODE": cpus}
    for name, value in {**slurm, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert comm.num_cores() == expected


@pytest.mark.parametrize(
    "device, backend, expected", [("cuda:3", "nccl", [3]), ("cuda:3", "gloo", None), ("cpu", "gloo", None)]
)
def test_a_barrier_names_the_rank_s_own_device(monkeypatch, device, backend, expected):
    """NCCL would guess it from the rank."""
    seen = []
    monkeypatch.setattr(comm, "device", lambda: torch.device(device))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: seen.append(device_ids))
    comm.barrier()
    assert seen == [expected]


@pytest.mark.slow
def test_a_process_that_left_its_group_joins_another():
    """DeepSpeed keeps a copy of the group of all ranks, which ends with that group."""
    program = """
from bigsgan.runtime import comm
from deepspeed.utils import groups
for _ in range(2):
    comm.initialize()
    assert groups._get_broadcast_src_rank() == 0
    comm.leave()
"""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
