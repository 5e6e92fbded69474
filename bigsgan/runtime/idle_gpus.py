"""Refuses to train on the CPU of a machine whose GPUs this torch cannot use, unless the user asks for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bigsgan.errors import UserError
from bigsgan.runtime.gpus import nvidia_gpus


def refuse_idle_gpus(environment: Mapping[str, str]) -> None:
    """Call this after DeepSpeed has chosen the CPU, which it does, with a warning, if torch finds no device.

    The user asks for the CPU by DS_ACCELERATOR=cpu in ``environment``, or by a CUDA_VISIBLE_DEVICES without a device.

    Raises:
        UserError: There are NVIDIA GPUs that this process may open, and the user has not asked for the CPU.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if environment.get("DS_ACCELERATOR") or hidden or not nvidia_gpus():
        return
    if torch.version.cuda is None:
        problem, remedy = "is a build without CUDA", "install a build with CUDA"
    else:
        problem = f"needs a driver for CUDA {torch.version.cuda}, which is not installed"
        remedy = "update the driver (nvidia-smi shows its version), or install a build of torch for an older CUDA"
    problem += ", and this machine has NVIDIA GPUs"
    raise UserError("torch", torch.__version__, problem, f"{remedy}; or set DS_ACCELERATOR=cpu to train on the CPU")
