"""Which ranks of a job are named, with what they hold, and which of them are seen to have ended."""

from __future__ import annotations

import subprocess

import pytest

from bigsgan.runtime import roster


@pytest.fixture
def members():
    """Takes note of ranks, until the end of the test."""
    yield roster.know
    roster.know(())


def test_ranks_are_named_with_what_they_hold(members):
    assert roster.named([1]) == "rank 1"
    assert roster.named([0, 2]) == "ranks 0, 2"
    members([roster.own("generator"), roster.own("generator"), *[roster.own("discriminator")] * 10])
    assert roster.named([1]) == "rank 1 (generator)"
    assert roster.named([0, 1]) == "ranks 0, 1 (generator)"
    assert roster.named([1, 2, 3]) == "ranks 1 (generator), 2, 3 (discriminator)"
    assert roster.named(list(range(2, 12))) == "ranks 2, 3, 4, 5, 6, 7, 8, 9, ... (discriminator)"


def test_a_process_that_was_killed_is_gone_before_its_launcher_takes_note(members):
    own = roster.own("generator")
    with subprocess.Popen(["sleep", "60"]) as killed, subprocess.Popen(["true"]) as ended:
        others = [own._replace(process=each.pid, holds="discriminator") for each in (killed, ended)]
        elsewhere = [others[0]._replace(host="another"), others[0]._replace(processes="pid:[1]")]
        members([own, *others, *elsewhere])
        killed.kill()
        while len(roster.gone_soon()) < 2:
            pass
        assert roster.gone() == [1, 2]
        assert roster.any_killed([1, 2])
        assert not roster.any_killed([2])
        killed.wait(), ended.wait()
        assert roster.gone() == [1, 2]  # not there any more
        assert not roster.any_killed([1, 2])  # which nobody can tell now
        assert roster.processes([1, 2]) == f"{killed.pid}, {ended.pid}"
