"""The doctor's command: what it lists, chooses, refuses and prints, and what an exception in a check becomes."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bigsgan.cli import main
from bigsgan.commands import doctor
from bigsgan.doctor import examine, registry
from bigsgan.doctor.checks import NEEDS, Check, Finding, Subject
from bigsgan.errors import UserError
from bigsgan.runtime import gpus
from tests import REPOSITORY
from tests.examined import Kept, alone
from tests.planted import good, plant


@pytest.fixture
def planted(monkeypatch):
    return lambda *names, faulty=0: monkeypatch.setattr(registry, "CHECKS", tuple(plant(list(names), faulty)))


def test_every_check_of_the_list_exists():
    assert len({check.name for check in registry.CHECKS}) == len(registry.CHECKS)
    for check in registry.CHECKS:
        module, _, name = check.run.partition(":")
        function = getattr(importlib.import_module(f"bigsgan.doctor.{module}"), name)
        inspect.signature(function).bind("subject", *check.words)
        assert function.__doc__
        assert set(check.needs) <= set(NEEDS)
        assert "." in check.name
    machine = [check for check in registry.CHECKS if not {"only", "config", "run"} & set(check.needs)]
    assert sum(check.seconds for check in machine) < 180


@pytest.mark.slow
def test_the_list_is_printed_without_torch():
    code = "import sys; from bigsgan.cli import main; main(['doctor', '--list']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [check.name for check in registry.CHECKS]
    needs = {line.split()[0]: line for line in lines[1:]}
    assert " --run " in needs["run.age"]


@pytest.mark.slow
def test_checks_of_the_host_need_no_torch():
    code = "import sys; from bigsgan.cli import main; main({}); assert 'torch' not in sys.modules"
    names = ("files", "shared", "cores", "paths", "locks", "alike")
    words = ["doctor", *(word for name in names for word in ("--only", f"environment.{name}"))]
    subprocess.run([sys.executable, "-c", code.format(words)], cwd=REPOSITORY, capture_output=True, check=True)


@pytest.mark.parametrize(
    "only, examines_run, names",
    [
        (["environment.files"], False, ["environment.files"]),
        (["run.age", "environment.files"], False, ["environment.files", "run.age"]),
        (["environment"], False, [check.name for check in registry.CHECKS if check.group == "environment"]),
        ([], True, [check.name for check in registry.CHECKS if check.name.startswith("run.")]),
        (["arithmetic"], False, [c.name for c in registry.CHECKS if c.group == "arithmetic" and "only" not in c.needs]),
        (["arithmetic.compiled"], False, ["arithmetic.compiled"]),
    ],
)
def test_the_choice(only, examines_run, names):
    assert [check.name for check in registry.chosen(only, examines_run)] == names


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "env"], "--only: must be the name of a check, or the part before its point, got 'env'; see"),
        (["--only", "environment.files.x"], "--only: must be the name of a check"),
        (["--run", "no/such"], "--run: must be a run directory, got 'no/such'"),
        (["--run", "/"], "--run: must be a run directory, got '/' (it has no config.yaml); give"),
        (["batch=3"], "argument: 'batch=3' needs a recipe; add --config, or remove it"),
        (["--run", ".", "--config", "digits"], "--config: cannot be combined with --run, which has a recipe"),
        (["--config", "digits", "batch=-3"], "batch: must be"),
        (["--config", "no_such.yaml"], "--config: "),
        (["--markdown"], "--markdown: unknown option of `bigsgan doctor`"),
    ],
)
def test_wrong_input(words, message, capsys):
    assert main(["doctor", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bigsgan: {message}")


def test_the_table(planted, capsys):
    planted("good", "fails", "is_not_for_some", "raises", faulty=0)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    table = [line.split(maxsplit=3) for line in lines if line.startswith("planted.")]
    assert [(name, result, said) for name, result, _, said in table] == [
        ("planted.good", "pass", "all is well"),
        ("planted.fails", "FAIL", "it is broken"),
        ("planted.is_not_for_some", "pass", "all is well"),
        ("planted.raises", "FAIL", "ValueError: a planted error"),
    ]
    assert "remedy: mend it" in lines[lines.index(next(line for line in lines if "it is broken" in line)) + 1]
    assert lines[-1] == "2 passed, 2 failed, 0 not applicable"


def test_the_check_that_runs_is_named_on_a_terminal(planted, monkeypatch, capsys):
    planted("good", "fails", faulty=0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.index("\nplanted.good ...\rplanted.good ") < out.index("\nplanted.fails ...\rplanted.fails ")


def test_json_alone_goes_to_standard_output(planted, capsys):
    planted("good", "fails", faulty=0)
    assert main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["failed"] == ["planted.fails"]
    assert [check["status"] for check in record["checks"]] == ["pass", "fail"]
    assert record["checks"][1]["remedy"] == "mend it"
    told = {"rank": 0, "status": "fail", "said": "it is broken", "numbers": {"number": 5}}
    assert record["checks"][1]["ranks"] == [told]
    assert "planted.good" in err


@pytest.mark.slow
def test_a_check_that_hangs_alone():
    code = "from tests import planted; from bigsgan.doctor import registry; from bigsgan.cli import main; "
    code += (
        "registry.CHECKS = tuple(planted.plant(['good', 'hangs', 'good'], 0, 1.0)); raise SystemExit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("bigsgan doctor")]
    said = "bigsgan doctor: planted.hangs: no answer within 1 s; the doctor ends here"
    assert line == f"{said}; `--only planted.hangs` runs this check alone"


def test_what_the_user_can_fix_fails_its_check(monkeypatch, tmp_path, capsys):
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--only", "environment.devices"]) == 1
    out = capsys.readouterr().out
    assert "this machine has NVIDIA GPUs" in out
    assert "DS_ACCELERATOR=cpu" in out


class Together:
    """Rank 0 of some ranks that all find what it finds."""

    def __init__(self, size):
        self.rank, self.size, self.hosts = 0, size, ["a"] * size

    def check(self, name, patience):
        return nullcontext()

    def collect(self, value):
        return [(rank, value) for rank in range(self.size)]

    def share(self, value):
        return value

    def is_lost(self, error):
        return False


def seen_by(size, monkeypatch, *functions):
    """What checks that need the connection, one after the other, come to on so many ranks."""
    monkeypatch.setattr(registry, "CHECKS", ())
    plant([], 0)
    for function in functions:
        monkeypatch.setattr(sys.modules["bigsgan.doctor.planted"], function.__name__, function, raising=False)
    checks = [Check(f"a.{each.__name__}", "", 0, f"planted:{each.__name__}", ("group",)) for each in functions]
    ranks, report = Together(size), Kept()
    examine.Examiner(Subject(ranks), report).examine(checks)
    return [(result.finding.status, result.finding.said) for result in report.results]


def test_a_check_that_raises_parts_several_ranks_and_not_one(monkeypatch):
    made = []
    monkeypatch.setattr(examine.Examiner, "_connect", lambda self: made.append(1))

    def raises(subject):
        raise MemoryError("no memory")

    def passes(subject):
        return Finding("pass", "all is well")

    one = seen_by(1, monkeypatch, raises, passes)
    assert one == [("fail", "MemoryError: no memory"), ("pass", "all is well")]
    many = seen_by(2, monkeypatch, raises, passes)
    said = "rank 0 on a (and 1 more rank): MemoryError: no memory"
    assert many == [("fail", said), ("not applicable", "the ranks have no connection since a.raises")]


def test_a_connection_that_a_rank_does_not_get_is_tried_once(monkeypatch):
    tried = []

    def connect(self):
        tried.append(1)
        raise UserError("LOCAL_SIZE", 2, "must be at most 1", "start one rank", "of this host")

    monkeypatch.setattr(examine.Examiner, "_connect", connect)
    first, second = seen_by(2, monkeypatch, good, good)
    assert first == ("fail", "rank 0 on a (and 1 more rank): LOCAL_SIZE: must be at most 1, got 2 (of this host)")
    assert second == ("not applicable", "the ranks have no connection since a.good")
    assert len(tried) == 1


def test_what_ranks_did_together_is_nobodys_fault(monkeypatch):
    monkeypatch.setattr(examine.Examiner, "_connect", lambda self: None)

    def compares(subject):
        return Finding("fail", "ZeRO 3 differs", of_all=True)

    assert seen_by(2, monkeypatch, compares) == [("fail", "ZeRO 3 differs")]


def test_what_lacks_is_said():
    examiner = examine.Examiner(Subject(SimpleNamespace(size=1, hosts=["a"])), None)
    assert os.environ.get("WORLD_SIZE", "1") == "1"
    for need, flag in (("config", "--config"), ("run", "--run")):
        assert examiner._lacking([need]) == f"needs {flag}"
    assert examiner._lacking(["ranks"]) == "needs several ranks"


def test_a_gpu_that_runs_do_not_use_lacks(monkeypatch):
    examiner = examine.Examiner(Subject(Together(1)), None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device, said in (("cuda", ""), ("cpu", "needs a GPU")):  # the latter by DS_ACCELERATOR=cpu
        monkeypatch.setattr("bigsgan.runtime.comm.device", lambda device=device: torch.device(device))
        assert examiner._lacking(["gpu"]) == said


def test_what_uses_the_device_of_a_rank_has_chosen_it():
    """Which is done where the connection is made."""
    needs = {check.name: check.needs for check in registry.CHECKS}
    for name in needs:
        if name.startswith(("arithmetic.", "layouts.")):
            assert "group" in needs[name], name


@pytest.mark.parametrize("name", ["feature_maps", "random_numbers"])
def test_kernels_that_are_not_used_are_no_fault(name):
    kernels = importlib.import_module("bigsgan.doctor.kernels")
    found = alone(getattr(kernels, name))
    said = "torch's own operations are used, as tensors are not on a GPU"
    assert (found.status, found.said) == ("not applicable", said)


def test_the_recipe_and_the_run_are_named():
    options = argparse.Namespace(config="a b.yaml", overrides=["batch=8"], run_directory=None)
    assert shlex.join(doctor._command(options)) == "bigsgan doctor --config 'a b.yaml' batch=8"
    options = argparse.Namespace(config=None, overrides=[], run_directory="runs/x")
    assert shlex.join(doctor._command(options)) == "bigsgan doctor --run runs/x"
