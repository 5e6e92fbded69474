"""Checks of the doctor on new ranks: what hangs or crashes there is a fail of one check."""

from __future__ import annotations

import json
import sys

import pytest

from bigsgan.doctor import new_ranks, topology
from bigsgan.doctor.registry import CHECKS, chosen
from tests.examined import examined

RECORD = {
    "checks": [
        {"name": "a.b", "status": "pass", "said": "as it should", "ranks": [{"numbers": {"x": r}} for r in (0, 1)]}
    ]
}
PRINTS = "import os, sys; print(os.environ['RANK'] == '0' and {!r} or '')"


@pytest.fixture(autouse=True)
def ranks(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def found(monkeypatch, code, *names, **limits):
    monkeypatch.setattr(new_ranks, "COMMAND", [sys.executable, "-c", code])
    for name, value in limits.items():
        monkeypatch.setattr(new_ranks, name, value)
    return examined(lambda subject: new_ranks.checks(subject, *(names or ("layouts.zero",))), hosts=("a", "a"))


def test_what_new_ranks_find_is_found(monkeypatch):
    first, second = found(monkeypatch, PRINTS.format(json.dumps(RECORD)))
    assert (first.status, first.said) == (second.status, second.said) == ("pass", "as it should")
    assert (first.numbers, second.numbers) == ({"x": 0}, {"x": 1})


def test_the_worst_of_several_is(monkeypatch):
    bad = {**RECORD["checks"][0], "name": "a.c", "status": "fail", "said": "bad", "remedy": "mend it"}
    record = {"checks": [*RECORD["checks"], bad]}
    first, _ = found(monkeypatch, PRINTS.format(json.dumps(record)))
    assert (first.status, first.said, first.remedy) == ("fail", "bad", "mend it")
    assert list(first.numbers) == ["a.b", "a.c"]


CRASH = "import os, sys; print('bigsgan: no route', file=sys.stderr); sys.exit(3 * (os.environ['RANK'] == '1'))"
HANG = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    "code, said", [(CRASH, "rank 1 ended with status 3: bigsgan: no route"), (HANG, "rank 0 did not end in time: ")]
)
def test_a_crash_and_a_hang_are_fails(monkeypatch, code, said):
    limits = {} if code == CRASH else {"STARTING_SECONDS": 0.0, "PATIENCE_SECONDS": -29.5}
    for finding in found(monkeypatch, code, **limits):
        assert finding.status == "fail"
        assert finding.said == said


def test_new_ranks_meet_elsewhere(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    code = """
import json, os
names = ("MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
ranks = [{"numbers": {name: os.environ.get(name) for name in names}}] * 2
print(json.dumps({"checks": [{"name": "a.b", "status": "pass", "said": "", "ranks": ranks}]}))
"""
    first, second = found(monkeypatch, code)
    assert first.numbers == second.numbers
    assert (first.numbers["RANK"], first.numbers["WORLD_SIZE"]) == ("0", "2")
    assert first.numbers["MASTER_PORT"] != "1"
    assert first.numbers["TORCHELASTIC_USE_AGENT_STORE"] is None


def test_the_group_is_chosen_by_its_name_alone():
    names = [check.name for check in chosen(["nccl"], examines_run=False)]
    assert names == [check.name for check in CHECKS if check.group == "nccl"]
    assert {"nccl.links", "nccl.zero", "nccl.pipelines", "nccl.killed", "nccl.rates", "nccl.speed"} <= set(names)
    for check in CHECKS:
        assert not check.words or chosen(check.words, examines_run=False), check.name
    assert not any(check.group == "nccl" for check in chosen([], examines_run=False))


def test_facts_are_told_once_for_each_host(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    first, second, third = examined(topology.facts, hosts=("a", "a", "b"))
    assert first.numbers["variables"]["NCCL_DEBUG"] == second.numbers["variables"]["NCCL_DEBUG"] == "WARN"
    assert [("interfaces" in each.numbers) for each in (first, second, third)] == [True, False, True]
    assert first.said.endswith("2 hosts")
