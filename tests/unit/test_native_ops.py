"""A killed build's lock is found; a running build is waited for."""

import fcntl
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension

from bigsgan.config import NETWORKS
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.engines.deepspeed import native_ops
from bigsgan.engines.deepspeed.native_ops import refuse_stale_lock
from bigsgan.errors import UserError


@pytest.fixture
def file_is_lock(monkeypatch):
    """As torch 2.8 has it."""
    monkeypatch.setattr(native_ops, "_FILE_IS_LOCK", True)


@pytest.fixture
def kernel_locks(monkeypatch):
    """As torch 2.15 has it."""
    monkeypatch.setattr(native_ops, "_FILE_IS_LOCK", False)


@pytest.mark.usefixtures("file_is_lock")
def test_a_killed_build_is_reported_with_its_remedy(tmp_path):
    (tmp_path / "lock").touch()
    with pytest.raises(UserError, match=r"is left over from a killed build, and every run would wait for it") as caught:
        refuse_stale_lock(tmp_path, grace_seconds=0.5)
    assert f"rm {tmp_path / 'lock'}" in str(caught.value)
    assert (tmp_path / "lock").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("file_is_lock")
def test_a_running_build_is_waited_for(tmp_path):
    """A process that works in the directory, as ninja does, outlasts the grace and then removes the lock."""
    (tmp_path / "lock").touch()
    with subprocess.Popen(["sh", "-c", "sleep 1.5; rm lock"], cwd=tmp_path) as builder:
        started = time.monotonic()
        refuse_stale_lock(tmp_path, grace_seconds=0.3)
        assert time.monotonic() - started > 1
        assert builder.wait() == 0


@pytest.mark.usefixtures("kernel_locks")
def test_a_file_that_nobody_holds_is_no_trouble(tmp_path):
    """It stays behind after every build, and refusing it would refuse all runs but the first."""
    (tmp_path / "lock").touch()
    started = time.monotonic()
    refuse_stale_lock(tmp_path, grace_seconds=0.1)
    assert time.monotonic() - started < 1


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_locks")
def test_a_lock_that_is_held_is_waited_for(tmp_path, caplog):
    (tmp_path / "lock").touch()
    with open(tmp_path / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timer = threading.Timer(1.0, fcntl.flock, (held, fcntl.LOCK_UN))
        started = time.monotonic()
        timer.start()
        refuse_stale_lock(tmp_path, grace_seconds=0.1)
        assert time.monotonic() - started > 0.9
        timer.join()
    assert f"waiting for another process that builds in {tmp_path}" in caplog.text


def test_torch_locks_as_is_assumed():
    """Fails first if a later torch has a third way to lock."""
    assert native_ops._FILE_IS_LOCK == hasattr(cpp_extension, "FileBaton") != hasattr(cpp_extension, "FileLock")


OFFLOADED = DeepSpeedFile(Path("ds.json"), {"zero_force_ds_cpu_optimizer": True}, 2, "fp32", "cpu", "none")
ON_DEVICE = DeepSpeedFile(Path("ds.json"), {}, 2, "fp32", "none", "none")


@pytest.mark.parametrize(
    "files, builders",
    [
        ((OFFLOADED, ON_DEVICE), [0]),
        ((ON_DEVICE, OFFLOADED), [2, 3]),
        ((OFFLOADED, OFFLOADED), [0, 3]),
        ((ON_DEVICE, ON_DEVICE), []),
    ],
    ids=["G's", "D's", "both", "none"],
)
def test_one_rank_of_each_host_builds_for_ranks_of_both_networks(files, builders, monkeypatch, tmp_path):
    """Ranks 0 and 1 hold G, 2 to 4 hold D, and the first three share a host: where both need it, it is built once."""
    by_network, hosts, loaded = dict(zip(NETWORKS, files, strict=True)), ["a", "a", "a", "b", "b"], []
    held = ["generator"] * 2 + ["discriminator"] * 3
    told = [host if native_ops.needs_cpu_adam(by_network[held[rank]]) else None for rank, host in enumerate(hosts)]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for rank, host in enumerate(hosts):
        barriers, asked = [], []

        def gather(own, rank=rank, asked=asked):
            asked.append(own)
            return told if len(asked) == 1 else [None] * 5

        monkeypatch.setattr(native_ops, "_built", set())
        monkeypatch.setattr(native_ops.socket, "gethostname", lambda host=host: host)
        for name, value in {
            "rank": lambda rank=rank: rank,
            "gather_objects": gather,
            "from_rank_zero": lambda value: value,
            "patient_barrier": lambda barriers=barriers: lambda: barriers.append("waited"),
        }.items():
            monkeypatch.setattr(native_ops.comm, name, value)
        builder = SimpleNamespace(load=lambda verbose, rank=rank: loaded.append(rank))
        monkeypatch.setattr(
            native_ops, "CPU_ADAM", native_ops.CPU_ADAM._replace(builder=lambda builder=builder: builder)
        )
        for _ in range(2):  # the second time when the engine is built, in its part alone
            native_ops.build_for_both(by_network, held[rank])
        assert barriers == ["waited"] * bool(builders)  # all ranks, whether they need it or not
        assert asked[:1] == [told[rank]] * bool(builders)
    assert loaded == builders


def test_all_ranks_hear_of_a_build_that_fails(monkeypatch, tmp_path):
    def load(verbose):
        raise RuntimeError("no compiler")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    told = []
    monkeypatch.setattr(native_ops.comm, "patient_barrier", lambda: lambda: told.append("waited"))
    monkeypatch.setattr(native_ops.comm, "gather_objects", lambda own: told.append(own) or [own])
    with pytest.raises(UserError, match="needs DeepSpeed's cpu_adam, which cannot be built here: no compiler; install"):
        native_ops._build(native_ops.CPU_ADAM._replace(builder=lambda: SimpleNamespace(load=load)), needed=True)
    assert told[1] == "waited"
    assert isinstance(told[2], UserError)
