"""Memory that cannot be had, by whoever says so, is told from every other fault."""

import errno
import mmap
import os

import numpy as np
import pytest
import torch

from bigsgan.errors import UserError
from bigsgan.runtime import memory


def fail(error):
    raise error


NO_MEMORY = {
    "torch": lambda: torch.empty(2**52),
    "numpy": lambda: np.empty(2**52),
    "python": lambda: bytearray(2**60),
    "the system": lambda: mmap.mmap(-1, 2**60),
    "a device": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "a device in use": lambda: fail(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")),
    "cuBLAS": lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
}

OTHER_FAULTS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ValueError("out of memory"),
    UserError("batch", 3, "is wrong", "mend it"),
]


@pytest.mark.parametrize("who", NO_MEMORY)
def test_running_out_is_a_message(who):
    with pytest.raises(UserError) as caught, memory.naming_remedy("with 5 images", "take 4"):
        NO_MEMORY[who]()
    cause = str(caught.value.__cause__).partition("\n")[0] or "MemoryError"
    assert str(caught.value) == f"memory: is not enough with 5 images: {cause}; take 4"


@pytest.mark.parametrize("error", OTHER_FAULTS, ids=str)
def test_other_faults_pass(error):
    with pytest.raises(type(error)) as caught, memory.naming_remedy("with 5 images", "take 4"):
        raise error
    assert caught.value is error


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 500 kB\n"}
V2 = "sys/fs/cgroup/slurm/job_7"
V1 = "sys/fs/cgroup/memory/docker"
GROUPS = {
    "the machine": (MACHINE, 500 * 1024),
    "nobody says": ({}, None),
    "no limit": (
        {
            **MACHINE, "proc/self/cgroup": "0::/slurm/job_7\n", f"{V2}/memory.max": "max\n",
            f"{V2}/memory.current": "5000\n", f"{V2}/memory.stat": "anon 5\ninactive_file 10\nactive_file 20\n",
        },
        500 * 1024,
    ),
    "a job's limit": (
        {
            **MACHINE, "proc/self/cgroup": "1:name=systemd:/x\n0::/slurm/job_7/step_0\n",
            f"{V2}/memory.max": "20000\n", f"{V2}/memory.current": "19000\n",
            f"{V2}/memory.stat": "anon 5\nfile 900\ninactive_file 300\nactive_file 400\n",
            f"{V2}/step_0/memory.max": "max\n",
        },
        20_000 - 19_000 + 700,
    ),
    "the older version, within a container": (
        {
            **MACHINE, "proc/self/cgroup": "5:cpu,cpuacct:/docker\n4:memory:/docker/abc\n",
            f"{V1}/memory.limit_in_bytes": "9000\n", f"{V1}/memory.usage_in_bytes": "9100\n",
            f"{V1}/memory.stat": "total_inactive_file 30\ntotal_active_file 20\ninactive_file 9\nactive_file 9\n",
        },
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_free_memory_is_what_machine_and_groups_leave(tmp_path, name):
    files, expected = GROUPS[name]
    assert memory.free_host_bytes(written(tmp_path, files)) == expected


def test_free_memory_of_this_machine():
    found = memory.free_host_bytes()
    assert found is not None
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_pinned_blocks_are_powers_of_two():
    sizes = [0, 1, 2, 3, 4096, 4097, 2**33, 2**33 + 1]
    assert [memory.pinned_bytes(size) for size in sizes] == [0, 1, 2, 4, 4096, 8192, 2**33, 2**34]
