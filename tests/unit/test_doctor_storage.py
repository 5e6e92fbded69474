"""The doctor finds faults of file systems, and of what a recipe needs, that are planted where it looks."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bigsgan.config import NETWORKS, load_recipe, plan_run
from bigsgan.doctor import recipes, saving, storage
from bigsgan.models.build import build_network
from bigsgan.runtime.memory import size
from tests import REPOSITORY
from tests.examined import alone, examined, small_disk
from tests.tiny import tiny_recipe

NFS = """
import fcntl, os
real = fcntl.flock
def flock(file, how, fcntl=fcntl, os=os, real=real):
    if how & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    real(file, how)
fcntl.flock = flock
"""
"""Whoever wants a lock for himself has to open the file for writing."""


def plan_of(directory, *overrides):
    return plan_run(tiny_recipe(directory, *overrides), 1, directory)


def is_empty(directory):
    return list(directory.iterdir()) == []


def test_a_healthy_directory(tmp_path):
    for check in (storage.paths, storage.locks):
        found = examined(check, ["a", "a"], out=tmp_path / "not" / "yet")
        assert [finding.status for finding in found] == ["pass", "pass"]
        assert found[0].numbers["directory"] == str(tmp_path)
        assert is_empty(tmp_path)


def test_a_directory_that_hosts_do_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "SHARED_SECONDS", 0.3)
    real = Path.read_text

    def read(self, *arguments):
        if sys._getframe(2).f_locals["me"] == 1:
            raise FileNotFoundError(errno.ENOENT, "", str(self))
        return real(self, *arguments)

    monkeypatch.setattr(Path, "read_text", read)
    first, second = examined(storage.paths, ["a", "b"], out=tmp_path)
    assert (first.status, second.status) == ("pass", "fail")
    assert second.said == f"{tmp_path} does not have what rank 0 writes there"
    assert is_empty(tmp_path)


def test_data_that_a_host_lacks(tmp_path):
    (tmp_path / "here").mkdir()
    overrides = ["data.kind=folder", "data.resolution=16"]
    plans = [{"plan": plan_of(tmp_path, *overrides, f"data.root={tmp_path / name}")} for name in ("here", "gone")]
    first, second = examined(storage.paths, ["a", "b"], plans, out=tmp_path)
    assert (first.status, second.said) == ("pass", f"data.root ({tmp_path / 'gone'}) does not exist")


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(self, text):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    found = alone(storage.paths, out=tmp_path)
    assert found.status == "fail"
    assert found.said.startswith(f"{tmp_path} cannot be written: Read-only file system")


def test_a_file_system_whose_locks_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)  # here alone: a second process asks the kernel
    found = alone(storage.locks, out=tmp_path)
    assert (found.status, found.said) == ("fail", f"a second process got a lock in {tmp_path} that is held")
    assert is_empty(tmp_path)


def test_locks_as_nfs_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)  # back in place afterwards
    exec(NFS)
    monkeypatch.setattr(storage, "_ASK", NFS + storage._ASK)
    found = examined(storage.locks, ["a", "b"], out=tmp_path)
    assert [(each.status, each.said) for each in found] == [
        ("pass", f"a lock in {tmp_path} keeps a second process out")
    ] * 2


def test_a_lock_that_cannot_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_ASK", "raise ValueError")
    found = alone(storage.locks, out=tmp_path)
    assert (found.status, found.said) == ("fail", f"could not ask for a lock in {tmp_path}")
    assert is_empty(tmp_path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = alone(storage.locks, out=tmp_path)
    assert (found.status, found.said) == ("fail", f"{tmp_path} keeps no locks: No locks available")
    assert is_empty(tmp_path)


def test_room_for_checkpoints(tmp_path):
    plan = plan_of(tmp_path, "checkpoints.keep=2")
    each = recipes.checkpoint_bytes(plan)
    with small_disk(tmp_path / "disk", 1 << 20):
        out = tmp_path / "disk" / "run"
        found = alone(recipes.room, plan=plan, out=out)
        assert (found.status, found.numbers["checkpoints"]) == ("pass", 3)
        (tmp_path / "disk" / "other").write_bytes(bytes((1 << 20) - 2 * each // 4096 * 4096 - 4096))
        found = alone(recipes.room, plan=plan, out=out)
        assert found.status == "fail"
        assert found.numbers["free_bytes"] < 3 * each == found.numbers["needed_bytes"]
        assert found.said.endswith(f" need {size(3 * each - found.numbers['free_bytes'])} more")
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["other"]


def test_each_power_average_is_another_generator(tmp_path):
    plan, more = plan_of(tmp_path), plan_of(tmp_path, "ema.power={snapshot_nimg: 1000, widths: [0.05, 0.1, 0.2]}")
    generator = sum(parameter.numel() for parameter in build_network(plan.recipe, "generator").parameters())
    assert recipes.checkpoint_bytes(more) - recipes.checkpoint_bytes(plan) == 3 * 4 * generator


MUON = [f"optimizer.{network}={{kind: muon, lr: 1e-3, betas: [0.5, 0.9]}}" for network in NETWORKS]


@pytest.mark.slow
@pytest.mark.parametrize("name, overrides", [("digits", []), ("digits_gat", MUON)])
def test_the_size_of_a_checkpoint(tmp_path, name, overrides):
    """Of a run of this recipe, without the header of its file and the ranks' sums of a report."""
    code = "from bigsgan.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "train", "--config", name, f"out={tmp_path / 'run'}", *overrides]
    subprocess.run([*command, "total_nimg=64", "metrics=null"], cwd=REPOSITORY, check=True, capture_output=True)
    (written,) = (tmp_path / "run" / "checkpoints").glob("*/*.safetensors")
    content = written.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    spans = [entry["data_offsets"] for key, entry in header.items() if not key.startswith(("__metadata__", "reports/"))]
    plan = plan_run(load_recipe(REPOSITORY / "launch" / "recipes" / f"{name}.yaml", overrides), 1)
    assert sum(end - begin for begin, end in spans) == recipes.checkpoint_bytes(plan)


def test_ranks_hear_at_once_of_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".doctor-x"))

    monkeypatch.setattr(saving.tempfile, "mkdtemp", refuse)

    def raised(subject):
        with pytest.raises(OSError, match=f"{tmp_path} cannot be written: Read-only file system"):
            saving._shared_directory(subject)

    examined(raised, ["a", "b"], out=tmp_path)


@pytest.mark.slow
def test_compilers(tmp_path, monkeypatch):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"zero_force_ds_cpu_optimizer": True, "zero_optimization": zero}
    (tmp_path / "offload.json").write_text(json.dumps(content))
    asks = ["optimizer.generator={kind: adam, lr: 0.001}", f"engines.generator.ds_config={tmp_path / 'offload.json'}"]
    compiled = plan_of(tmp_path, "engines.generator.compile=whole")
    assert alone(recipes.compilers, plan=plan_of(tmp_path)).status == "not applicable"
    good = alone(recipes.compilers, plan=compiled)
    assert (good.status, good.said) == ("pass", "g++ compiles, for torch.compile")
    bad = tmp_path / "bad++"
    bad.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2; exit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CXX", str(bad))
    found = alone(recipes.compilers, plan=compiled)
    assert found.said == f"{bad} does not compile: fatal error: Python.h: No such file"
    monkeypatch.delenv("CXX")
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else real(name))
    found = alone(recipes.compilers, plan=plan_of(tmp_path, *asks))
    assert found.said == "no ninja, which DeepSpeed builds cpu_adam with"
