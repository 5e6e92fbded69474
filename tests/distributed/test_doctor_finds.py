"""The doctor finds faults that are planted in the product, and none where there is none."""

from __future__ import annotations

import pytest

from tests.distributed import faults

FOUND = [  # fault, check, what it says
    ("sum_without_average", "layouts.zero", "ZeRO 0: generator."),
    ("a_rank_left_out", "layouts.collectives", "sum of 1 x float32: off by"),
    ("noise_in_a_sum", "layouts.repeats", "a sum over ranks has other bits"),
    ("stale_gather", "layouts.zero", "ZeRO 3"),
    (
        "own_statistics",
        "layouts.hand_overs",
        "shared images (and 3 of 3 others): generator.layers.1.norm1.statistics.running_mean differs",
    ),
    ("inexact_kernel", "arithmetic.float64", "biggan generator (and"),
    ("another_seed", "layouts.hand_overs", "shared images (and"),
    ("swapped_hand_over", "layouts.pipelines", "D in stages: generator."),
    ("heavier_penalty", "layouts.zero", "ZeRO 0 (and 4 of 4 others): discriminator."),
    ("average_that_stays", "layouts.zero", "ZeRO 0 (and 4 of 4 others): average."),
    ("changed_bit", "layouts.checkpoints", "differs in 1 bit: read in layout ZeRO 3, saved in ZeRO 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault, check, said", FOUND, ids=[fault for fault, *_ in FOUND])
def test_a_planted_fault_is_found(ranks, tmp_path, fault, check, said):
    found, _ = ranks(2).run(faults.examined, fault, [check], tmp_path)
    print(found)
    status, text, _, _ = found[check]
    assert status == "fail"
    assert said in text


@pytest.mark.slow
def test_nothing_is_found_where_there_is_no_fault(ranks, tmp_path):
    found, _ = ranks(2).run(faults.examined, "", ["arithmetic", "layouts"], tmp_path)
    print(found)
    skipped = {name for name, (status, *_) in found.items() if status == "not applicable"}
    assert {name: said for name, (status, said, *_) in found.items() if status == "fail"} == {}
    assert skipped <= {"arithmetic.tensor_cores", "arithmetic.kernels", "arithmetic.draws"}


def test_collectives_are_right(ranks, tmp_path):
    found, _ = ranks(2).run(faults.examined, "", ["layouts.collectives"], tmp_path)
    status, said, numbers, _ = found["layouts.collectives"]
    assert (status, said) == ("pass", "66 collectives of 2 ranks give the computed values")
    assert set(numbers["errors"].values()) == {0.0}
