"""Selects torch's kernels: the fastest, or deterministic ones. Compiled networks follow (engines/compiling.py)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigsgan.runtime import comm

_log = logging.getLogger(__name__)


def choose_kernels(deterministic: bool, searches: bool = True) -> None:
    """Set torch's switches for this process, before it computes anything.

    ``deterministic`` kernels sum in the same order in every run, so that a resumed run on a GPU equals an
    uninterrupted one bit for bit; if an operation has no such kernel, torch raises RuntimeError. Otherwise cuDNN
    measures some of its algorithms (torch.backends.cudnn.benchmark_limit) when it meets a new shape, and takes the
    fastest: two runs may take different ones. It waits for the device as it does so, and for messages under way there:
    without ``searches`` cuDNN takes what it holds for the fastest.
    """
    debugging: Any = torch.utils.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it, and torch checks it
    torch.use_deterministic_algorithms(deterministic)
    debugging.fill_uninitialized_memory = not deterministic  # filling would cost a kernel for each new tensor
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = searches and not deterministic and comm.device().type == "cuda"
    if deterministic:
        _log.info("kernels: deterministic in torch, cuDNN, cuBLAS and torch.compile")
    elif torch.backends.cudnn.benchmark:
        _log.info("kernels: cuDNN takes the fastest of %d algorithms", torch.backends.cudnn.benchmark_limit)
    elif comm.device().type == "cuda":
        _log.info("kernels: cuDNN takes what it holds for the fastest, as a search would wait for messages under way")


@contextmanager
def kernels(deterministic: bool, searches: bool = True) -> Iterator[None]:
    """Choose kernels for the block only."""
    before = torch.are_deterministic_algorithms_enabled()
    choose_kernels(deterministic, searches)
    try:
        yield
    finally:
        choose_kernels(before)
