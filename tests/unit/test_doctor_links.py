"""What links should give is read where the kernel and the driver tell it; here from files of the same form."""

from __future__ import annotations

import subprocess

import pytest

from bigsgan.doctor import links

SMI = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Writes files below the kernel's directories, and makes nvidia-smi say something."""
    for name in ("PCI", "INFINIBAND", "INTERFACES"):
        monkeypatch.setattr(links, name, tmp_path / name)
    said = {"smi": ""}

    def run(command, **_):
        assert command == ["nvidia-smi", "nvlink", "-s", "-i", "0000:1b:00.0"]
        return subprocess.CompletedProcess(command, 0, said["smi"])

    monkeypatch.setattr(links.subprocess, "run", run)

    def write(where, **contents):
        directory = tmp_path / where
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_text(f"{content}\n")

    return write, said


@pytest.mark.parametrize(
    "speed, width, name, rate",
    [
        ("16.0 GT/s PCIe", 16, "PCIe x16", 31.5e9),
        ("5.0 GT/s PCIe", 8, "PCIe x8", 4e9),
        ("32.0 GT/s", 4, "PCIe x4", 15.75e9),
    ],
)
def test_a_gpu_on_its_bus(machine, speed, width, name, rate):
    write, _ = machine
    assert links.of_gpu("0000:1b:00.0") is None
    write("PCI/0000:1b:00.0", current_link_speed=speed, current_link_width=width)
    link = links.of_gpu("0000:1b:00.0")
    assert (link.name, link.rate) == (name, pytest.approx(rate, rel=1e-3))
    write("PCI/0000:1b:00.0", current_link_speed="Unknown")
    assert links.of_gpu("0000:1b:00.0") is None


def test_nvlink_comes_before_the_bus(machine):
    write, said = machine
    write("PCI/0000:1b:00.0", current_link_speed="16.0 GT/s PCIe", current_link_width=16)
    said["smi"] = SMI
    link = links.of_gpu("0000:1b:00.0")
    assert (link.name, link.rate) == ("2 NVLinks", pytest.approx(53.124e9))


def test_hosts_by_infiniband_or_ethernet(machine):
    write, _ = machine
    assert links.of_host("nccl", {}) is None
    for name, speed, state in (("eth0", 25_000, "up"), ("eth1", 100_000, "up"), ("eth2", 200_000, "down")):
        write(f"INTERFACES/{name}", speed=speed, operstate=state)
        write(f"INTERFACES/{name}/device")
    write("INTERFACES/docker0", speed=1_000_000, operstate="up")  # which is not a device
    assert links.of_host("nccl", {}) == ("Ethernet", 12.5e9)
    assert links.of_host("gloo", {"GLOO_SOCKET_IFNAME": "eth0"}) == ("Ethernet", 3.125e9)
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        write(f"INFINIBAND/mlx5_{number}/ports/1", rate="400 Gb/sec (4X NDR)", state=state)
    assert links.of_host("nccl", {}) == ("InfiniBand", 100e9)
    assert links.of_host("nccl", {"NCCL_IB_DISABLE": "1"}) == ("Ethernet", 12.5e9)
    assert links.of_host("gloo", {}) == ("Ethernet", 12.5e9)


def test_an_interface_that_does_not_know_its_speed(machine):
    write, _ = machine
    write("INTERFACES/eth0", speed=-1, operstate="up")
    write("INTERFACES/eth0/device")
    assert links.of_host("gloo", {}) is None
