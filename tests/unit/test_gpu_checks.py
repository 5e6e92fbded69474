"""The list of checks on a GPU, and how it is gone through."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from bigsgan import cli, shipped
from bigsgan.doctor import registry
from tests import REPOSITORY
from tests.gpu import __main__ as checks
from tests.gpu.__main__ import CHECKS, Check

PYTHON = [sys.executable, "-c"]


def test_the_checks_take_40_minutes_and_are_there():
    assert sum(check.seconds for check in CHECKS) <= 40 * 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        for word in check.command:
            assert not word.startswith("tests/") or (REPOSITORY / word).is_file(), word
        if "--config" in check.command:
            assert check.command[check.command.index("--config") + 1] in shipped.recipe_names()


@pytest.mark.slow
def test_what_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    found = [
        Check("good", "that it prints", 60, [*PYTHON, "print('a figure')"]),
        Check("bad one", "that it fails", 60, [*PYTHON, "print('why'); raise SystemExit(3)"]),
        Check("slow", "that it ends", 1, [*PYTHON, "import time; time.sleep(60)"]),
        Check("shared", "its variable", 60, [*PYTHON, "import os; print(os.environ['TESTS_ON_GPU'])"], True),
    ]
    monkeypatch.setattr(checks, "CHECKS", found)
    assert checks.main(["--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "== good: that it prints\na figure\n" in printed
    assert [line.rpartition("  ")[0].rstrip() for line in printed.splitlines()[-4:]] == [
        "good     passed",
        "bad one  failed with status 3",
        "slow     ran out of time",
        "shared   passed",
    ]
    assert (tmp_path / "out" / "bad_one.log").read_text().endswith("why\n")
    assert "most recent call first" in (tmp_path / "out" / "slow.log").read_text()  # of stacks
    assert checks.main(["--only", "good,shared", "--out", str(tmp_path / "out")]) == 0
    assert checks.main(["--only", "unknown"]) == 2


COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]

result = []
for arguments in json.load(sys.stdin):
    collected = Collected()
    pytest.main(["--collect-only", "-qq", *arguments], plugins=[collected])
    result.append(collected.found)
print("\\n" + json.dumps(result))
"""


@pytest.mark.slow
def test_each_check_selects_tests_and_each_of_its_words_some():
    """A word of -k that selects nothing is a claim without a proof."""
    asked = []
    for check in CHECKS:
        if "pytest" in check.command:
            options = check.command[check.command.index("pytest") + 1 :]
            asked.append((check, options))
            if "-k" in options:
                at = options.index("-k") + 1
                words = re.split(" or | and ", options[at])
                asked += [(check, [*options[:at], word]) for word in words]
    assert len(asked) > len(CHECKS)
    arguments = json.dumps([options for _, options in asked])
    done = subprocess.run([*PYTHON, COLLECT], input=arguments, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    for (check, options), found in zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True):
        print(f"{check.name}: {len(found)} of {' '.join(options[6:])}")
        assert found, f"{check.name} selects nothing by {options}"


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if "doctor" in check.command], ids=lambda check: check.name
)
def test_the_doctor_takes_its_options(check, capsys):
    words = check.command[check.command.index("doctor") + 1 :]
    assert words[0] == "--only"
    assert words[1] in [each.name for each in registry.CHECKS]
    assert cli.main(["train", "--dry-run", *words[2:]]) == 0
