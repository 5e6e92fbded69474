"""The doctor runs the commands of the tests' own lists."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from bigsgan.cli import main
from bigsgan.doctor import clone, examine, registry
from tests.examined import examined
from tests.gpu import __main__ as gpu
from tests.stand_in import checks as stand_in

ALONE = "import os; assert not {'RANK', 'WORLD_SIZE', 'LOCAL_SIZE', 'MASTER_ADDR'} & os.environ.keys(); "
COMMANDS = {
    "good one": (60, f"{ALONE}print('a figure'); print('3 passed in 1.0s')"),
    "bad": (60, "print('why'); raise SystemExit(3)"),
    "slow": (1, "import time; time.sleep(60)"),
}


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Commands in the place of the GPU's list, on a machine that has one."""
    python = [sys.executable, "-c"]
    entries = [gpu.Check(name, f"what {name} shows", each, [*python, code]) for name, (each, code) in COMMANDS.items()]
    skips = tmp_path / "test_skips.py"
    skips.write_text("import pytest\n@pytest.mark.skip(reason='no second GPU')\ndef test(): pass\n")
    words = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    entries.append(gpu.Check("skips", "nothing", 60, [*words, str(skips)]))
    monkeypatch.setattr(gpu, "CHECKS", entries)
    monkeypatch.setattr(examine, "_is_on_gpu", lambda: True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_lists_are_those_of_the_tests():
    found = [(check.group, check.proves, check.seconds, check.needs) for check in clone.checks()]
    expected = [("gpu", each.proves, each.seconds, ("gpu", "only")) for each in gpu.CHECKS]
    expected += [("stand_in", each.proves, each.seconds, ("only",)) for each in stand_in.CHECKS]
    assert found == expected
    assert len({check.name for check in registry.listed()}) == len(registry.listed())
    assert not {"gpu", "stand_in"} & {check.group for check in registry.chosen([], False)}


@pytest.mark.slow
def test_a_group_of_commands_is_gone_through(planted, capsys):
    assert main(["doctor", "--json", "--only", "gpu"]) == 1
    record = json.loads(capsys.readouterr().out)
    logs = planted / "doctor_logs"
    assert [(check["name"], check["status"], check["said"]) for check in record["checks"][:3]] == [
        ("gpu.good_one", "pass", "3 passed in 1.0s"),
        ("gpu.bad", "fail", "failed with status 3: why"),
        ("gpu.slow", "fail", 'ran out of time: File "<string>", line 1 in <module>'),  # of its stacks
    ]
    assert record["checks"][1]["remedy"] == f"read {logs / 'gpu.bad.log'}; see CONTRIBUTING.md for what the test shows"
    assert "a figure\n" in (logs / "gpu.good_one.log").read_text()
    skips = record["checks"][3]
    assert (skips["status"], skips["said"][:39]) == ("not applicable", "its tests do not run here: 1 skipped in")


def test_one_is_run_by_its_name_and_on_a_gpu_alone(planted, capsys, monkeypatch):
    assert main(["doctor", "--only", "gpu.good_one"]) == 0
    assert "1 passed, 0 failed, 0 not applicable" in capsys.readouterr().out
    monkeypatch.setattr(examine, "_is_on_gpu", lambda: False)
    assert main(["doctor", "--only", "gpu.good_one"]) == 0
    assert "n/a" in capsys.readouterr().out


def test_rank_0_runs_it_as_a_rank_of_nothing(planted, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    first, second = examined(lambda subject: clone.test(subject, "gpu", "good one"), ["a", "b"])
    assert (first.status, first.said) == ("pass", "3 passed in 1.0s")
    assert (second.said, second.severity) == ("rank 0 runs it", -1)
    assert {name: os.environ[name] for name in variables} == variables


def test_an_installation_without_the_tests_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(clone, "REPOSITORY", tmp_path)
    assert [check.name for check in clone.checks()] == ["gpu.tests", "stand_in.tests"]
    assert main(["doctor", "--only", "stand_in"]) == 0
    assert "needs a clone of the repository, whose tests are run" in capsys.readouterr().out
    assert clone.test(SimpleNamespace(), "gpu", "nccl").status == "not applicable"
