"""The doctor finds faults that are planted in the product, and none where there is none."""

from __future__ import annotations

import os
import time

import pytest

from bigsgan.doctor import registry
from tests.distributed import faults

FOUND = [  # fault, check, what it says
    ("sum_without_average", "layouts.zero", "ZeRO 0: generator."),
    ("a_rank_left_out", "layouts.collectives", "sum of 1 x float32: off by"),
    ("noise_in_a_sum", "layouts.repeats", "a sum over ranks has other bits"),
    ("stale_gather", "layouts.zero", "ZeRO 3"),
    (
        "own_statistics",
        "layouts.hand_overs",
        "shared images (and 4 of 4 others): generator.layers.1.norm1.statistics.running_mean differs",
    ),
    ("inexact_kernel", "arithmetic.float64", "biggan generator (and"),
    ("another_seed", "layouts.hand_overs", "shared images (and"),
    ("swapped_hand_over", "layouts.pipelines", "D in stages: generator."),
    ("swapped_hand_over", "layouts.separate_ranks", "apart (and 1 of 3 others): generator."),
    ("heavier_penalty", "layouts.zero", "ZeRO 0 (and 4 of 4 others): discriminator."),
    ("ema_that_stays", "layouts.zero", "ZeRO 0 (and 4 of 4 others): average."),
    ("changed_bit", "layouts.checkpoints", "differs in 1 bit: read in layout ZeRO 3, saved in ZeRO 1"),
    ("stale_statistic", "layouts.zero", "norm1.statistics.running_mean differs between ranks 0 and 1"),
    ("stale_power_iteration", "layouts.zero", "differs between ranks 0 and 1"),
    # Of one rank's host; see host_faults.py.
    (
        "locks_that_keep_nobody_out",
        "environment.locks",
        "(and 1 more rank): a second process got a lock in {out} that is held",
    ),
    ("old_library", "environment.versions", "rank 1 on {host}: deepspeed 0.18.2 is older than 0.19.8"),
    ("another_version", "environment.alike", "rank 1 on {host}: differs from rank 0 in version of torch: '2.8.0', "),
    ("another_file", "environment.alike", "rank 1 on {host}: differs from rank 0 in bigsgan/draws.py"),
    ("few_open_files", "environment.files", "rank 1 on {host}: 300 files may be open at once, 528 are needed"),
    ("ranks_on_one_core", "environment.cores", "rank 0 on {host} (and 1 more rank): 2 ranks share 1 core"),
    ("small_shared_memory", "environment.shared", "64 MiB of /dev/shm are free, 512 MiB are needed"),
    ("directory_of_its_own", "environment.paths", "rank 1 on {host}: {out} does not have what rank 0 writes there"),
]
NIGHTLY = ("another_seed", "heavier_penalty", "ema_that_stays", "stale_power_iteration")
"""Faults that CI leaves to the night, as it plants others that the same check finds."""

MOST_SECONDS = 180
"""Of all checks that need neither a recipe nor a run, on two ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, check, said",
    [
        pytest.param(*each, id="-".join(each[:2]), marks=[pytest.mark.nightly] if each[0] in NIGHTLY else [])
        for each in FOUND
    ],
)
def test_a_planted_fault_is_found(ranks, tmp_path, fault, check, said):
    found, _ = ranks(2).run(faults.examined, fault, [check], tmp_path)
    print(found)
    status, text, _, _ = found[check]
    assert status == "fail"
    assert said.format(host=os.uname().nodename, out=tmp_path) in text


@pytest.mark.slow
def test_nothing_is_found_where_there_is_no_fault(ranks, tmp_path):
    """In all that `bigsgan doctor` examines by itself, within its time."""
    start = time.monotonic()
    found, _ = ranks(2).run(faults.examined, "", [], tmp_path, timeout=2 * MOST_SECONDS)
    seconds = time.monotonic() - start
    print(f"{seconds:.0f} s in all", {name: round(each[-1], 1) for name, each in found.items()})
    skipped = {name for name, (status, *_) in found.items() if status == "not applicable"}
    assert {name: said for name, (status, said, *_) in found.items() if status == "fail"} == {}
    assert list(found) == [check.name for check in registry.chosen([], False)]
    elsewhere = {check.name for check in registry.CHECKS if {"gpu", "hosts", "config"} & set(check.needs)}
    assert skipped <= elsewhere | {"environment.devices"}
    busy = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # others' processes slow it down
    assert seconds < MOST_SECONDS * busy


@pytest.mark.slow
@pytest.mark.parametrize("fault, status", [("small_networks", "pass"), ("inexact_compilation", "fail")])
def test_compiled_networks(ranks, tmp_path, fault, status):
    (found,) = ranks(1).run(faults.examined, fault, ["arithmetic.compiled"], tmp_path)
    print(found)
    assert found["arithmetic.compiled"][0] == status
    games = found["arithmetic.compiled"][2]
    assert {"compiled whole", "compiled layers"} <= games.keys()


@pytest.mark.slow
def test_collectives_are_right(ranks, tmp_path):
    found, _ = ranks(2).run(faults.examined, "", ["layouts.collectives"], tmp_path)
    status, said, numbers, _ = found["layouts.collectives"]
    assert (status, said) == ("pass", "60 collectives of 2 ranks give the computed values")
    assert set(numbers["errors"].values()) == {0.0}
