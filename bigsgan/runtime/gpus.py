"""Finds the NVIDIA GPUs of this machine by its device files and the environment, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bigsgan.runtime import launched

DEVICES = Path("/dev")


def nvidia_gpus() -> list[Path]:
    """Return the device files that this process may open; schedulers keep jobs from opening those of others."""
    return [path for path in DEVICES.glob("nvidia[0-9]*") if _opens(path)]


def own_device(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a rank sees only the GPU of its LOCAL_RANK, as number 0.

    They are empty if its host has one rank, or fewer GPUs than ranks. Set them before torch looks for devices.
    Code in torch.compile's cache holds the device's number, so with equal numbers ranks find what another compiled.
    NCCL reaches GPUs that a process does not see (since CUDA 10.1; p2pCanConnect in its transport/p2p.cc).
    """
    if not environment.get("RANK") or environment.get("DS_ACCELERATOR") not in (None, "", "cuda"):
        return {}
    gpus, listed = nvidia_gpus(), environment.get("CUDA_VISIBLE_DEVICES")
    visible = [str(number) for number in range(len(gpus))] if listed is None else listed.split(",")
    local_rank = int(environment.get("LOCAL_RANK") or 0)
    num_sharing = launched.num_sharing(environment)
    if not (gpus and local_rank < num_sharing <= len(visible)) or num_sharing == 1:
        return {}
    own = {"CUDA_VISIBLE_DEVICES": visible[local_rank].strip(), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    return {**own, "LOCAL_WORLD_SIZE": str(launched.local_size(environment))}  # ranks divide the host's cores


def launch_order(has_messages: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for CUDA and NCCL that are not set yet. Set them before the process uses CUDA.

    Args:
        has_messages: Whether ranks compute different tasks and send each other messages. A message under way holds up
            the first use of a kernel, which loads it: all are loaded at the start then. Otherwise the hosts of all
            ranks make the same collectives in the same order, and NCCL may keep to it over all communicators; so none
            waits for another one that was begun after it elsewhere. Ignored before NCCL 2.26.
        environment: Of this process.
    """
    chosen = {"CUDA_MODULE_LOADING": "EAGER"} if has_messages else {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    is_one = environment.get("WORLD_SIZE", "1") == "1"
    return {} if is_one else {name: value for name, value in chosen.items() if not environment.get(name)}


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True
