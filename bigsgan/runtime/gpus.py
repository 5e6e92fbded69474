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


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True
