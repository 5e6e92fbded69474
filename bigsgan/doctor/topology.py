"""Collects what is known of the links between ranks, for a report that others read. No torch here."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from bigsgan.doctor.checks import Finding, Subject, passed
from bigsgan.errors import counted
from bigsgan.runtime.gpus import nvidia_gpus

_SECONDS = 20
_ASKED = "index,name,uuid,driver_version,pci.bus_id,memory.total,mig.mode.current,ecc.mode.current,compute_mode"
_COMMANDS = {
    "gpus": ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "peer_to_peer": ["nvidia-smi", "topo", "-p2p", "r"],
    "nvlinks": ["nvidia-smi", "nvlink", "-s"],
}
_NAMES = ("NCCL_", "CUDA_", "GLOO_", "UCX_", "TORCH_NCCL_", "DS_ACCELERATOR", "OMP_NUM_THREADS")


def facts(subject: Subject) -> Finding:
    """Tell GPUs, the links between them as the driver sees them, InfiniBand, interfaces, and variables of this rank."""
    numbers: dict[str, object] = {"variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(_NAMES)}}
    hosts = subject.ranks.hosts
    if hosts.index(hosts[subject.ranks.rank]) == subject.ranks.rank:  # once for each host
        for name, command in _COMMANDS.items() if nvidia_gpus() else ():
            with suppress(OSError, subprocess.SubprocessError):
                said = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
                numbers[name] = (said.stdout or said.stderr).splitlines()
        ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
        numbers["infiniband"] = {str(port): _read(port / "rate") or "?" for port in ports}
        numbers["interfaces"] = {each.name: _read(each / "speed") for each in sorted(Path("/sys/class/net").glob("*"))}
        numbers["cores"], numbers["kernel"] = os.cpu_count(), os.uname().release
    subject.ranks.gather(None)
    gpus = len(nvidia_gpus())
    kind = f"{counted(gpus, 'GPU')} on {socket.gethostname()}" if gpus else "no GPU here: ranks talk over gloo"
    return passed(f"{kind}; {counted(len(set(hosts)), 'host')}", numbers)


def _read(path: os.PathLike[str]) -> str:
    with suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
