"""Memory that cannot be had, by whoever says so, is told from every other fault."""

import errno
import mmap
import os

import numpy as np
import pytest
import torch

from bigsgan import memory
from bigsgan.errors import UserError


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
    assert str(caught.value) == f"memory: ran out with 5 images: {cause}; take 4"


@pytest.mark.parametrize("error", OTHER_FAULTS, ids=str)
def test_other_faults_pass(error):
    with pytest.raises(type(error)) as caught, memory.naming_remedy("with 5 images", "take 4"):
        raise error
    assert caught.value is error
