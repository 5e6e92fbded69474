"""The doctor finds faults of a host that are planted where it looks, and nothing without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigsgan.config import load_recipe, plan_run
from bigsgan.config.data import Data
from bigsgan.doctor import devices, host, same_hosts, versions
from bigsgan.errors import UserError
from bigsgan.runtime import gpus
from tests import REPOSITORY
from tests.examined import alone, examined, small_disk
from tests.tiny import tiny_recipe


def statuses(findings):
    return [finding.status for finding in findings]


@pytest.mark.slow
@pytest.mark.parametrize("hard, soft, status, result", [(300, 300, 1, "fail"), (4096, 520, 0, "pass")])
def test_a_low_limit_of_open_files(hard, soft, status, result):
    """The soft limit is raised as far as the hard one allows."""
    code = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (300, {hard})); from bigsgan.cli import main; "
    code += "raise SystemExit(main(['doctor', '--only', 'environment.files', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == status
    record = json.loads(done.stdout)
    (check,) = record["checks"]
    assert (check["name"], check["status"]) == ("environment.files", result)
    assert check["ranks"][0]["numbers"] == {"soft": soft, "hard": hard, "least": 520}
    assert record["failed"] == (["environment.files"] if status else [])
    if status:
        assert "remedy: ask the administrator for a `nofile` of 520 or more in limits.conf" in done.stderr
        assert check["command"] == "bigsgan doctor --only environment.files"


def test_shared_memory_of_a_container(monkeypatch, tmp_path):
    """A file system of 64 MiB, as Docker's /dev/shm."""
    plan, place = plan_run(tiny_recipe(tmp_path), 1), tmp_path / "shm"
    monkeypatch.setattr(host, "SHARED_MEMORY", place)
    with small_disk(place, "64m"):
        assert alone(host.shared_memory).said.startswith(f"64 MiB of {place} are free; what one rank needs")
        found, _ = examined(host.shared_memory, ["a", "a"])
        assert (found.status, found.said) == ("fail", f"64 MiB of {place} are free, 512 MiB are needed")
        assert "docker run --shm-size" in found.remedy
        # 4 x 4 micro-batches of 8 and one that is taken, of 16 x 16 pixels: 34 KiB.
        fits = alone(host.shared_memory, plan=plan)
        assert (fits.status, fits.numbers["needed_bytes"]) == ("pass", 17 * 8 * 256)
        (place / "taken").write_bytes(bytes((64 << 20) - (36 << 10)))
        assert alone(host.shared_memory, plan=plan).status == "pass"
        (place / "more").write_bytes(bytes(8 << 10))
        assert alone(host.shared_memory, plan=plan).status == "fail"
        # Latents are floats, and have a deviation beside each: 2 x 4 x 8 x 8 numbers, where the image has 3 x 64 x 64.
        codec = {"kind": "diffusers", "path": "x"}
        latents = Data(kind="latents", root="y", resolution=64, image_channels=3, num_classes=2, codec=codec)
        recipe = plan.recipe.model_copy(update={"data": latents})
        needed = alone(host.shared_memory, plan=replace(plan, recipe=recipe)).numbers["needed_bytes"]
        assert needed == 17 * 8 * 2 * 4 * 8 * 8 * 4


def test_cores_of_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "QUOTA", tmp_path / "none")

    def found(*by_rank):
        sets = iter(by_rank)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: next(sets))
        return examined(host.cores, hosts=["a"] * len(by_rank))

    assert statuses(found({0, 1}, {0, 1})) == ["pass", "pass"]
    assert statuses(found({0, 1}, {2, 3})) == ["pass", "pass"]
    both = found({0}, {0})
    assert statuses(both) == ["fail", "fail"]
    assert both[0].said == "2 ranks share 1 core"
    crossing = found({0, 1, 2, 3}, {2, 3, 4, 5})
    assert statuses(crossing) == ["fail", "fail"]
    assert {finding.said[:23] for finding in crossing} == {"shares 2 cores (2-3) wi"}


@pytest.mark.parametrize(
    "text, num, said",
    [
        ("max 100000\n", 2, ""),
        ("200000 100000\n", 2, ""),
        ("150000 100000\n", 2, "2 ranks share 1.5 cores"),
        ("50000 100000\n", 1, "1 rank has 0.5 cores"),
    ],
)
def test_a_container_with_less_time_than_cores(monkeypatch, tmp_path, text, num, said):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(host, "QUOTA", tmp_path / "cpu.max")
    host.QUOTA.write_text(text)
    found = examined(host.cores, hosts=["a"] * num)
    assert statuses(found) == ["fail" if said else "pass"] * num
    if said:
        assert found[0].said == said
        assert "docker run --cpus, or" in found[0].remedy
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    host.QUOTA.write_text("max 100000\n")
    assert "docker run --cpuset-cpus" in examined(host.cores, hosts=["a"] * 2)[0].remedy


def test_ranks_of_other_hosts_have_other_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert statuses(examined(host.cores, hosts=["a", "b"])) == ["pass", "pass"]


@pytest.mark.parametrize(
    "name, number, said",
    [
        ("torch", "2.7.1", "torch 2.7.1 is older than 2.8"),
        ("torch", "2.8.0+cu126", ""),
        ("deepspeed", "0.19.7", "deepspeed 0.19.7 is older than 0.19.8"),
        ("deepspeed", "0.19.12", ""),
        ("deepspeed", None, "deepspeed is not installed"),
    ],
)
def test_versions(monkeypatch, name, number, said):
    real = versions.packages()
    monkeypatch.setattr(versions, "packages", lambda: {k: v for k, v in {**real, name: number}.items() if v})
    found = alone(versions.versions)
    assert (found.status, found.said) == ("fail", said) if said else found.status == "pass"
    assert said or f"{name} {number}" in found.said


def test_the_oldest_versions_are_those_of_the_package():
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert f'requires-python = ">={versions.OLDEST["Python"]},' in text
    assert f'"torch>={versions.OLDEST["torch"]}"' in text
    assert f'"deepspeed>={versions.OLDEST["deepspeed"]},' in text


def test_gpus_that_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    assert alone(devices.devices).status == "not applicable"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(UserError, match="this machine has NVIDIA GPUs"):  # a fail; see test_doctor_frame.py
        alone(devices.devices)


def plant_gpus(monkeypatch, uuids, free=0.99, total=2**30):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (int(free * total), total))
    real = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, **device: real(size, value))


def test_ranks_with_gpus(monkeypatch):
    ranks = [{"local_rank": 0}, {"local_rank": 1}]
    plant_gpus(monkeypatch, ["x", "y"])
    assert statuses(examined(devices.devices, ["a", "a"], ranks)) == ["pass", "pass"]
    plant_gpus(monkeypatch, ["x", "x"])  # as two tasks that are each shown the same one
    found = examined(devices.devices, ["a", "a"], ranks)
    assert [(f.status, f.said) for f in found] == [("fail", "GPU x is rank 1's too"), ("fail", "GPU x is rank 0's too")]
    plant_gpus(monkeypatch, ["x"])
    first, second = examined(devices.devices, ["a", "a"], ranks)
    assert (first.status, second.said) == ("pass", "local rank 1 has none of the 1 GPUs that it sees")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert alone(devices.devices).said == "DS_ACCELERATOR is cpu; a run computes on the CPU"
    monkeypatch.delenv("DS_ACCELERATOR")
    plant_gpus(monkeypatch, ["x"], free=0.5, total=2**31)  # as a desktop takes
    assert alone(devices.devices).status == "pass"
    plant_gpus(monkeypatch, ["x"], free=0.5, total=2**33)
    assert alone(devices.devices).said == "50% of the memory of a GPU is in use"
    plant_gpus(monkeypatch, ["x"], free=0.95, total=80 * 2**30)
    assert alone(devices.devices).status == "pass"


def test_files_that_differ(monkeypatch, tmp_path):
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        (place / "room").mkdir(parents=True)
        (place / "room" / "one.py").write_text("1\n")

    def found():
        class Package:
            def rglob(self, pattern):
                return own().rglob(pattern)

        def own():
            frame = sys._getframe()
            while "subject" not in frame.f_locals:
                frame = frame.f_back
            return places[frame.f_locals["subject"].ranks.rank]

        monkeypatch.setattr(same_hosts, "PACKAGE", Package())
        monkeypatch.setattr(Path, "relative_to", lambda self, other: "/".join(self.parts[-2:]))
        return examined(same_hosts.same_files, ["a", "b"])

    assert statuses(found()) == ["pass", "pass"]
    (places[1] / "room" / "one.py").write_text("2\n")
    first, second = found()
    assert (first.status, second.status) == ("pass", "fail")
    assert second.said == "differs from rank 0 in bigsgan/room/one.py"


def test_recipes_that_differ(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, bucket in zip(paths, (1000, 2000), strict=True):
        path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": bucket}}))

    def plans(*overrides):
        by_rank = []
        for own in overrides:
            recipe = load_recipe(REPOSITORY / "launch" / "recipes" / "digits.yaml", own)
            by_rank.append({"plan": plan_run(recipe, 2, tmp_path)})
        return examined(same_hosts.same_files, ["a", "b"], by_rank)

    assert statuses(plans(["data.num_workers=1"], ["data.num_workers=2"])) == ["pass", "pass"]
    said = plans([], ["seed=5"])[1].said
    assert said == "differs from rank 0 in seed: 5, 0 there"
    names = [[f"engines.generator.ds_config={path}"] for path in paths]
    assert plans(*names)[1].said.startswith("differs from rank 0 in engines.generator.ds_config: ")
