"""Which of its kernels torch takes: the fastest that it finds, or those that give the same sums in every run."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch._inductor import config as inductor

from bigsgan import comm

_log = logging.getLogger(__name__)


def choose_kernels(deterministic: bool) -> None:
    """Set torch's switches for this process, before it computes anything.

    Args:
        deterministic: Take kernels whose sums have the same order in every run, and raise RuntimeError where there is
            none, so that a resumed run on a GPU equals an uninterrupted one bit for bit. Otherwise cuDNN measures some
            of its algorithms (torch.backends.cudnn.benchmark_limit) when it meets a shape, and takes the fastest: two
            runs may take different ones.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, and torch checks
        torch.use_deterministic_algorithms(True)
        debugging: Any = torch.utils.deterministic
        debugging.fill_uninitialized_memory = False  # a kernel for each tensor
        torch.backends.cudnn.deterministic = True
        if hasattr(inductor, "deterministic"):  # since torch 2.10
            inductor.deterministic = True
        _log.info("kernels: deterministic")
    elif comm.device().type == "cuda":
        torch.backends.cudnn.benchmark = True
        _log.info("kernels: cuDNN takes the fastest of %d algorithms", torch.backends.cudnn.benchmark_limit)
