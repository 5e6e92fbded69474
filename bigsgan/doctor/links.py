"""Rates of the links between ranks, as Linux and the driver report them: bytes a second one way. No torch here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PCI, INFINIBAND, INTERFACES = Path("/sys/bus/pci/devices"), Path("/sys/class/infiniband"), Path("/sys/class/net")

_ENCODED = 8.0
"""From this many GT/s on, PCIe sends 128 bits as 130 (PCI Express 3.0); slower links send 8 as 10."""

_SMI_SECONDS = 20


class Link(NamedTuple):
    """A GPU's or a host's links of one kind."""

    name: str  # common name
    rate: float  # bytes a second in one direction, over all of them


def of_gpu(place: str) -> Link | None:
    """Links from a GPU to the others of its host: NVLink if it has some, else PCI Express.

    Args:
        place: The GPU's address on the PCI bus, such as ``0000:1b:00.0``.
    """
    return _nvlink(place) or of_bus(place)


def of_host(backend: str, environment: Mapping[str, str]) -> Link | None:
    """Links from this host to others: InfiniBand if NCCL may use it, else Ethernet."""
    link = None
    if backend == "nccl" and environment.get("NCCL_IB_DISABLE", "0") != "1":
        link = _infiniband()
    return link or _ethernet(environment.get(f"{backend.upper()}_SOCKET_IFNAME", ""))


def of_bus(place: str) -> Link | None:
    """A device's PCI Express link at its present speed, which an idle GPU may have lowered."""
    with suppress(OSError, ValueError):
        speed = float((PCI / place / "current_link_speed").read_text().split()[0])  # 16.0 GT/s PCIe
        width = int((PCI / place / "current_link_width").read_text())
        coding = 128 / 130 if speed >= _ENCODED else 8 / 10
        return Link(f"PCIe x{width}", speed * 1e9 * width * coding / 8)
    return None


def _nvlink(place: str) -> Link | None:
    """The sum of the active links that nvidia-smi prints, such as ``Link 0: 26.562 GB/s``."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "nvlink", "-s", "-i", place]
        said = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS).stdout
        rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", said)]
        return Link(f"{len(rates)} NVLinks", sum(rates) * 1e9) if sum(rates) else None
    return None


def _infiniband() -> Link | None:
    """The sum of the active ports' rates, such as ``400 Gb/sec (4X NDR)``."""
    rates = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        with suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))
    return Link("InfiniBand", sum(rates) * 1e9 / 8) if rates else None


def _ethernet(named: str) -> Link | None:
    """The fastest interface that is up and a device; ``named`` is a backend's variable with the names' beginnings."""
    names = [name for name in named.lstrip("=").partition(":")[0].split(",") if name]
    rates = []
    for interface in sorted(INTERFACES.glob("*")):
        is_named = any(interface.name.startswith(name) for name in names) or not names or named.startswith("^")
        with suppress(OSError, ValueError):
            if is_named and (interface / "device").exists() and (interface / "operstate").read_text().strip() == "up":
                rates.append(int((interface / "speed").read_text()))  # Mb/s; -1 if unknown
    return Link("Ethernet", max(rates) * 1e6 / 8) if rates and max(rates) > 0 else None
