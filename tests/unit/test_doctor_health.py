"""The doctor finds what is wrong with a run's files, and nothing in a healthy run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time

import pytest
import torch

from bigsgan.config import plan_run
from bigsgan.config.run_directory import write_recipe
from bigsgan.doctor import health
from bigsgan.doctor.registry import chosen
from tests.examined import alone, examined
from tests.single_process import entry, save
from tests.tiny import tiny_recipe

HEALTHY = {
    "accuracy/real": 0.7, "accuracy/fake": 0.6, "grad_norm/generator": 1.0, "grad_norm/discriminator": 2.0,
    "skipped/generator": 0, "skipped/discriminator": 0, "loss_scale/generator": 1.0, "loss_scale/discriminator": 1.0,
    "images_per_second": 100.0, "data_wait": 0.01, "diversity/ema": 0.9,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run with 40 reports of 80 images each, and two checkpoints."""
    out = tmp_path / "run"
    recipe = tiny_recipe(tmp_path, "report_nimg=80")
    write_recipe(recipe, out, plan_run(recipe, 1, tmp_path).engines)
    for nimg in (1600, 3200):
        save(out / "checkpoints", nimg, {"one": entry({"value": torch.arange(1000.0)})})
    report(out)
    return out


def report(out, latest=1, one=None, **changes):
    """Write the reports; the ``latest`` have other values of some names, and one of a number has values of its own."""
    rows = [{"nimg": 80 * (i + 1), **HEALTHY, **(changes if i >= 40 - latest else {})} for i in range(40)]
    for number, own in (one or {}).items():
        rows[number].update(own)
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def look(name, run):
    return alone(getattr(health, name), run=run, out=run)


def test_a_healthy_run(run):
    names = [check.run.partition(":")[2] for check in chosen([], examines_run=True)]
    assert len(names) == 4
    assert {name: look(name, run).status for name in names} == dict.fromkeys(names, "pass")
    assert look("age", run).said.startswith("is stopped at 3200 of 1000000 images")
    assert look("checkpoints", run).numbers["complete"] == [3200, 1600]


def test_a_run_that_begins(run):
    (run / "metrics.jsonl").unlink()
    for name in ("alarms", "skips", "age"):
        assert look(name, run).status == "not applicable"


def test_a_changed_byte(run):
    (path,) = (run / "checkpoints").glob("*3200/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = look("checkpoints", run)
    said = f"{path.parent}: the checksum of {path.name} differs from the manifest's"
    assert (found.status, found.said) == ("fail", said)


def test_a_checkpoint_that_is_too_large_to_verify_in_time(run, monkeypatch):
    (path,) = (run / "checkpoints").glob("*3200/*.safetensors")
    assert look("checkpoints", run).numbers["verified_bytes"] == path.stat().st_size
    monkeypatch.setattr(health, "VERIFYING_SECONDS", -1.0)
    found = look("checkpoints", run)
    assert (found.status, found.numbers["verified_bytes"]) == ("pass", 0)
    assert found.said.endswith(", 0 bytes of them verified")


def test_a_checkpoint_that_the_run_removes_while_it_is_verified(run, monkeypatch):
    def verify(checkpoint):
        shutil.rmtree(checkpoint.path)
        return "one cannot be read: No such file or directory", 0

    monkeypatch.setattr(health, "_verified", verify)
    assert look("checkpoints", run).status == "pass"


@pytest.mark.parametrize("nimg", ["000000001600", "000000003200"])
def test_a_file_that_is_cut(run, nimg):
    (path,) = (run / "checkpoints" / nimg).glob("*.safetensors")
    os.truncate(path, 100)
    found = look("checkpoints", run)
    assert (found.status, found.said) == ("fail", f"{path.parent}: its files differ from its manifest")
    assert len(found.numbers["complete"]) == 1


def test_a_manifest_that_is_gone(run):
    (run / "checkpoints" / "000000003200" / "manifest.json").unlink()
    assert "it is not complete" in look("checkpoints", run).said


def test_a_checkpoint_that_the_run_removes_meanwhile(run, monkeypatch):
    gone, real = run / "checkpoints" / "000000001600", health.tags._read_manifest

    def read(path):
        if path == gone:
            shutil.rmtree(gone)
        return real(path)

    monkeypatch.setattr(health.tags, "_read_manifest", read)
    found = look("checkpoints", run)
    assert (found.status, found.numbers["complete"]) == ("pass", [3200])


@pytest.mark.parametrize(
    "latest, changes, name, remedy",
    [
        (5, {"accuracy/real": 1.0, "accuracy/fake": 1.0}, "discriminator_wins", "objective.r1.weight"),
        (1, {"grad_norm/generator": 1e4}, "gradients_explode/generator", "lower optimizer.generator.lr"),
        (1, {"diversity/ema": 0.01}, "low_diversity", "resume from an older checkpoint"),
        (3, {"slope/r1": 1.3, "slope/r1_exact": 1.0}, "penalty_is_off/r1", "objective.r1.antithetic=true"),
    ],
)
def test_an_alarm(run, latest, changes, name, remedy):
    report(run, latest, **changes)
    found = look("alarms", run)
    assert found.status == "fail"
    assert found.said.startswith(f"{name} at 3200 images: ")
    assert remedy in found.remedy


def test_an_alarm_of_long_ago_is_over(run):
    report(run, one={10: {"diversity/ema": 0.01}})
    assert look("alarms", run).status == "pass"


@pytest.mark.parametrize(
    "skipped, scale, status",
    [
        (0, 1.0, "pass"),
        (1, 1.0, "fail"),  # without fp16 none is
        (10, 1024.0, "pass"),  # of 19 reports of 10 updates
        (30, 1024.0, "fail"),
    ],
)
def test_skipped_updates(run, skipped, scale, status):
    report(run, 40, {-1: {"skipped/generator": skipped}}, **{"loss_scale/generator": scale})
    found = look("skips", run)
    assert found.status == status
    assert found.numbers["skipped_share"]["generator"] == pytest.approx(skipped / 190)


@pytest.mark.parametrize("scale, status", [(32768.0, "pass"), (64.0, "fail")])
def test_a_loss_scale_that_falls(run, scale, status):
    report(run, 20, {-1: {"loss_scale/generator": scale}}, **{"loss_scale/generator": 65536.0})
    assert look("skips", run).status == status


def test_a_run_that_reports_no_more(run):
    long_ago = time.time() - 7200
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    assert look("age", run).status == "pass"  # nobody has it open
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = look("age", run)
        assert (found.status, found.said) == ("fail", "the newest report is 2 hours old, they usually take 1 s")
        os.utime(run / "metrics.jsonl")
        assert look("age", run).said.startswith("runs at 3200 of 1000000 images")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_stopped_run_where_locks_do_not_tell(run, monkeypatch, number):
    (run / ".lock").touch()
    long_ago = time.time() - 7200
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert look("age", run).status == "not applicable"


def test_one_rank_asks_for_the_lock_of_a_run(run, monkeypatch):
    asked = []
    monkeypatch.setattr(health, "is_held", lambda path: asked.append(path) or True)
    found = examined(health.age, ["a", "b"], run=run, out=run)
    assert [each.said[:4] for each in found] == ["runs", "runs"]
    assert asked == [run / ".lock"]
