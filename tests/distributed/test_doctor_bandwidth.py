"""How fast ranks talk: on hosts that are made up, whose links are too."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from bigsgan.doctor import bandwidth
from bigsgan.doctor.checks import Subject
from bigsgan.doctor.links import Link
from bigsgan.runtime import comm


def found(hosts, rate=None, backend="gloo"):
    """What this rank finds, where it stands and between hosts, whose links have a rate."""
    ranks = SimpleNamespace(rank=comm.rank(), size=len(hosts), hosts=hosts)
    link = Link("InfiniBand", rate) if rate else None
    with (
        mock.patch.object(bandwidth, "SIZES", (1 << 12, 1 << 16)),
        mock.patch.object(bandwidth.links, "of_host", return_value=link),
        mock.patch.object(dist, "get_backend", return_value=backend),
    ):
        return bandwidth.collectives(Subject(ranks))


def groups(finding):
    return {each["group"]: each["ranks"] for each in finding.numbers["sizes"]}


def test_all_ranks_of_one_host(ranks):
    for each in ranks(2).run(found, ["a", "a"]):
        assert each.status == "pass"
        assert groups(each) == {"all ranks": [0, 1]}
        rows = each.numbers["sizes"]
        names = ["all-reduce", "all-gather", "reduce-scatter"]
        assert [(row["collective"], row["bytes"]) for row in rows] == [
            (n, size) for size in (1 << 12, 1 << 16) for n in names
        ]
        for row in rows:
            sent = row["bytes"] * (2 if row["collective"] == "all-reduce" else 1) // 2
            assert row["rate"] == pytest.approx(sent / row["seconds"])


def test_a_rank_on_each_of_two_hosts(ranks):
    each, _ = ranks(2).run(found, ["a", "b"])
    assert groups(each) == {"all ranks": [0, 1], "between hosts": [0, 1]}


@pytest.mark.slow
def test_hosts_with_unequal_numbers_of_ranks(ranks):
    by_rank = ranks(3).run(found, ["a", "a", "b"])
    assert [groups(each) for each in by_rank] == [
        {"all ranks": [0, 1, 2], "within a host": [0, 1], "between hosts": [0, 2]},
        {"all ranks": [0, 1, 2], "within a host": [0, 1]},
        {"all ranks": [0, 1, 2], "between hosts": [0, 2]},
    ]


@pytest.mark.parametrize(
    "rate, backend, status, note",
    [
        (1e3, "nccl", "pass", ""),
        (1e18, "nccl", "fail", "% of InfiniBand's rate; all ranks: "),
        (1e18, "gloo", "pass", "less than half of a"),
    ],
)
def test_the_share_of_a_link(ranks, rate, backend, status, note):
    for each in ranks(2).run(found, ["a", "b"], rate, backend):
        assert each.status == status
        assert note in each.said
        own = [row for row in each.numbers["sizes"] if row["group"] == "between hosts"]
        assert {(row["link"], row["expected_rate"]) for row in own} == {("InfiniBand", rate)}
