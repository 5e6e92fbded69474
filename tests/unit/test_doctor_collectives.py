"""What the doctor expects of collectives, and how much each rank holds of it; faults are in test_doctor_finds.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bigsgan.doctor import collectives
from bigsgan.runtime import comm
from tests.examined import alone

RANK = 3


def number(rank, numel, start=0):
    """Of rank r, the i-th is (5 i + 2 r) mod 9 - 4."""
    return (5 * np.arange(start, start + numel) + 2 * rank) % 9 - 4.0


def before(own):
    """What the rank before this one sends."""
    return torch.from_numpy(number(RANK - 1, own.numel())).float()


@pytest.mark.parametrize(
    "name, dtype, error, status",
    [
        ("mean", torch.float32, 2.0**-23, "pass"),
        ("mean", torch.float32, 2.0**-21, "fail"),
        ("mean", torch.bfloat16, 2.0**-8, "pass"),
        ("mean", torch.bfloat16, 2.0**-6, "fail"),
        ("sum", torch.float32, 2.0**-23, "fail"),
        ("mean", torch.float32, float("nan"), "fail"),
    ],
)
def test_a_mean_may_be_rounded_and_a_sum_may_not(monkeypatch, name, dtype, error, status):
    expected = torch.tensor([1.0, -3.0], dtype=torch.float64)
    found = expected * (1 + error)  # in float64, which holds it
    monkeypatch.setattr(collectives, "DTYPES", (dtype,))
    monkeypatch.setattr(collectives, "_cases", lambda *_: iter([(name, found, expected)]))
    assert alone(collectives.collectives).status == status


def test_bf16_is_left_out_where_it_does_not_hold_the_sums(monkeypatch):
    asked = []
    monkeypatch.setattr(collectives, "_Ring", lambda num: before)
    monkeypatch.setattr(collectives, "_cases", lambda rank, num, numel, dtype, _: asked.append(dtype) or iter([]))
    for num, has_bf16 in ((200, True), (201, False)):
        asked.clear()
        monkeypatch.setattr(comm, "world_size", lambda num=num: num)
        assert alone(collectives.collectives).status == "pass"
        assert (torch.bfloat16 in asked) == has_bf16
        assert torch.int64 in asked
    most = np.maximum(sum(np.maximum(number(each, 9), 0) for each in range(200)), 0).max()
    assert most <= 256  # of all orders, the one that adds the positive ones first


def test_a_rank_that_finds_a_difference_plays_on(monkeypatch):
    """Others may not have found it, and would wait for it."""
    played, bits = [], iter([1, 2, 3])
    monkeypatch.setattr(collectives, "_bits", lambda tensor: next(bits))
    monkeypatch.setattr(collectives, "played", lambda game: played.append(game.name) or [{"generator": {}}])
    monkeypatch.setattr(comm, "device", lambda: torch.device("cpu"))
    found = alone(collectives.repeats)
    assert (found.status, found.said) == ("fail", "a sum over ranks has other bits when it is made again")
    assert played == ["ZeRO 0", "ZeRO 0", "ZeRO 3", "ZeRO 3"]
