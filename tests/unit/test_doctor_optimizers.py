"""The doctor's check of optimizers passes, and sees each kind that is a little wrong."""

from __future__ import annotations

import pytest
import torch

from bigsgan.doctor import optimizers
from bigsgan.engines import muon
from bigsgan.engines import optimizer as engine
from tests.examined import alone


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(optimizers.comm, "device", lambda: torch.device("cpu"))


def test_they_follow_their_equations():
    found = alone(optimizers.optimizers)
    assert found.status == "pass", found.said
    assert found.numbers.keys() == optimizers.KINDS.keys()


def wrong(monkeypatch, owner, name, **changed):
    """Make a class of torch forget or change an option."""
    original = getattr(owner, name)

    def build(*arguments, **options):
        return original(*arguments, **{**options, **{key: options[key] * by for key, by in changed.items()}})

    monkeypatch.setattr(owner, name, build)


@pytest.mark.parametrize(
    "owner, name, changed, said",
    [
        (torch.optim, "Adam", {"eps": 1e4}, "Adam: 4 steps"),
        (torch.optim, "AdamW", {"weight_decay": 1.001}, "AdamW: 4 steps"),
        (torch.optim, "SGD", {"momentum": 1.001}, "SGD with momentum: 4 steps"),
        (engine, "AdamWithoutMomentum", {"lr": 1.0001}, "Adam without momentum (and 1 of 7 others): 4 steps"),
    ],
)
def test_what_is_a_little_wrong_is_seen(monkeypatch, owner, name, changed, said):
    wrong(monkeypatch, owner, name, **changed)
    found = alone(optimizers.optimizers)
    assert found.status == "fail"
    assert found.said.startswith(said)


def test_a_muon_that_is_a_little_wrong_is_seen(monkeypatch):
    """A scale that is 5 % off; what is seen of other kinds is finer, as bf16 is coarse."""
    monkeypatch.setattr(
        muon, "orthogonalized", lambda matrix, section, made=muon.orthogonalized: 0.95 * made(matrix, section)
    )
    found = alone(optimizers.optimizers)
    assert found.status == "fail"
    assert found.said.startswith("Muon: 4 steps")
