"""What is not finite takes no tag, and evicts none; an export names it."""

from __future__ import annotations

import math

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint.files import first_not_finite
from tests.single_process import entry, save
from tests.unit.test_checkpoint import assert_holds, names, on_ranks, rank_entries, save_one


@pytest.mark.parametrize("bad, background", [(math.inf, True), (-math.inf, True), (math.nan, False)])
def test_a_state_that_is_not_finite_evicts_no_good_tag(bad, background, tmp_path, caplog):
    assert save_one(tmp_path, 64, keep=1)
    state = {"generator": entry({"a": torch.tensor([1.0, bad]), "b": torch.tensor([2.0])})}
    assert not save(tmp_path, 128, state, keep=1, background=background)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("checkpoint at 128 images was not saved: generator/master/a@0: has non-finite values")
    assert names(tmp_path) == {"000000000064", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 64)
    assert save_one(tmp_path, 192, keep=1)
    assert names(tmp_path) == {"000000000192", "latest"}


def test_one_rank_that_is_not_finite_is_named_by_the_first(tmp_path, caplog):
    parts = rank_entries()
    parts[1]["average"] = entry({"c": torch.tensor([math.nan])})
    saved = on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), parts)
    assert saved == [False, False]
    assert names(tmp_path) == set()
    assert "(rank 1)" in caplog.text


def test_large_numbers_are_finite():
    most = torch.finfo(torch.float32).max
    assert first_not_finite({"a": torch.full((4,), most), "b": torch.tensor([1])}) is None
    assert first_not_finite({"a": torch.ones(2), "b": torch.tensor([most * 2])}) == "b"
    assert first_not_finite({"a": torch.tensor(1.0), "b": torch.tensor(torch.nan)}) == "b"  # without dimensions
