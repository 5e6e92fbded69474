"""Two ranks "on CUDA" without a GPU: no two streams race, and pipelines of every family wait where the docs say."""

import os

import pytest

from bigsgan.config import NETWORKS
from bigsgan.doctor.games import DMD2
from tests.stand_in import build, cells, matrix, sanitizing
from tests.stand_in.test_every_family import GATHERS

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

UPDATES = 2
MICRO_BATCHES = [*matrix.CLIPPED, "accumulation=2"]

IN_CI_OF = {2: matrix.IN_CI, 1: ["0-fp32-device", "2-bf16-optimizer", "3-bf16-all"]}
"""Layouts in which CI looks for races, by the number of ranks; alone, a rank has the streams of copies and gathers."""

IN_CI = "1-bf16-device"
PIPELINES = [
    pytest.param(n, marks=pytest.mark.slow if n == IN_CI else pytest.mark.nightly) for n in matrix.IN_PIPELINES
]

IN_PIPELINES = {
    "0-fp32-device": {"deepspeed_backed.py:_update": 1},
    "0-bf16-device": {"utils.py:is_invalid_grad_norm": 1, "utils.py:mask_nan_or_inf_with_val_inplace": 2},
    "1-fp32-device": {"utils.py:is_invalid_grad_norm": 1},
    "1-bf16-device": {"utils.py:is_invalid_grad_norm": 1},
    "1-fp16-device": {"utils.py:is_invalid_grad_norm": 1},
}
"""How often DeepSpeed asks in an update of one network, by layout and place."""


@pytest.mark.slow
def test_the_sanitizer_sees_a_race(on_ranks):
    """Which torch's own would see, of which parts are replaced."""
    assert on_ranks(2, sanitizing.race, True, sanitizer=True) == ""
    report = on_ranks(2, sanitizing.race, False, sanitizer=True)
    assert "possible data race" in report
    assert "in race" in report  # where the tensor was written


@pytest.mark.slow
def test_the_sanitizer_sees_a_race_of_stale_gathers(on_ranks):
    """Of weights that the last step may still be writing, where Prefetching does not let the gathers wait for it."""
    cell = ([*MICRO_BATCHES, matrix.R1], matrix.LAYOUTS["3-bf16-device"])
    with pytest.raises(RuntimeError, match=r"(?s)possible data race.*in all_gather.*_reassign_or_swap_out_partitioned"):
        on_ranks(2, cells.walk_with_stale_gathers, {"3-bf16-device": cell}, sanitizer=True)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", matrix.RUNS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_two_streams_race_in_any_family(on_ranks, num_ranks, layout):
    on_ranks(num_ranks, cells.walk, matrix.cells(layout, "accumulation=2"), False, sanitizer=True)


@pytest.mark.parametrize(
    "layout, every",
    [
        pytest.param(IN_CI, 3, marks=pytest.mark.slow),
        *(pytest.param(n, 1, marks=pytest.mark.nightly) for n in matrix.IN_PIPELINES),
    ],
)
def test_no_two_streams_race_in_pipelines_of_any_family(on_ranks, layout, every):
    games = {name: matrix.cells_in_pipelines(layout)[name] for name in matrix.PIPED[::every]}
    on_ranks(2, cells.walk, games, False, sanitizer=True)


@pytest.mark.parametrize("layout", PIPELINES)
def test_no_two_streams_race_in_pipelines(on_ranks, layout):
    cell = ([*matrix.PIPELINES, *MICRO_BATCHES, matrix.R1], matrix.LAYOUTS[layout])
    on_ranks(2, cells.walk, {layout: cell}, layout in matrix.SHOWN, sanitizer=True)


_OF_TEACHER = "engines.discriminator.frozen."
_SHARED = [f"{_OF_TEACHER}sharded=true", f"{_OF_TEACHER}persistence_threshold=0"]
DISTILLATIONS = {
    "a teacher that ranks share": _SHARED,
    "in bf16": [*_SHARED, f"{_OF_TEACHER}precision=bf16"],
    "on the host": [*_SHARED, f"{_OF_TEACHER}offload=cpu"],
    "a student that reads its own images": ["generator.steps=3", "generator.noised=samples"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTILLATIONS)
def test_no_two_streams_race_in_distillation(on_ranks, name):
    """Nor does the host wait for the device."""
    cell = ([*DMD2, *matrix.ADAM, *DISTILLATIONS[name]], matrix.LAYOUTS["1-bf16-device"])
    found = on_ranks(2, cells.walk, {name: cell}, False, sanitizer=True)
    assert found[name]["waits"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, schedule",
    [
        ("3-bf16-device", "exact"),
        ("1-bf16-device", "overlapped"),
        pytest.param("1-bf16-device", "exact", marks=pytest.mark.nightly),
        pytest.param("3-bf16-device", "overlapped", marks=pytest.mark.nightly),
    ],
)
def test_no_two_streams_race_on_ranks_of_their_own(on_ranks, layout, schedule):
    """G on one, D on the other. In an update neither waits for its device, but for ZeRO 3's own gathers."""
    overrides = ["engines.generator.ranks=1", *MICRO_BATCHES, matrix.R1, f"objective.schedule={schedule}"]
    found = on_ranks(2, cells.walk_apart, {layout: (overrides, matrix.LAYOUTS[layout])}, True, sanitizer=True)[layout]
    assert len(found) == 2
    for each in found:
        assert set(each["waits"]) == ({GATHERS} if layout[0] == "3" else set())
        assert each["launches"] > 100


@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        pytest.param(num, name, marks=pytest.mark.slow if name in IN_CI_OF[num] else pytest.mark.nightly)
        for num in IN_CI_OF
        for name in matrix.RUNS
    ],
)
def test_no_two_streams_race(on_ranks, num_ranks, layout):
    """Samples and checkpoints come last, with the EMA swapped in."""
    cell = ([*MICRO_BATCHES, matrix.R1], matrix.LAYOUTS[layout])
    on_ranks(num_ranks, cells.walk, {layout: cell}, layout in matrix.SHOWN, sanitizer=True)


@pytest.mark.parametrize(
    "whole",
    [pytest.param(False, id="some", marks=pytest.mark.slow), pytest.param(True, id="all", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("layout", matrix.IN_PIPELINES)
def test_pipelines_of_every_family_wait_where_the_docs_say(on_ranks, layout, whole):
    games = {name: cell for name, cell in matrix.cells_in_pipelines(layout).items() if name in matrix.PIPED}
    games = games if whole else matrix.some(layout, games)
    expected = {place: UPDATES * len(NETWORKS) * n for place, n in IN_PIPELINES[layout].items()}
    for name, found in on_ranks(2, cells.walk, games, False).items():
        assert found["waits"] == expected, name


@pytest.mark.slow
def test_each_stream_of_an_inner_stage_has_a_queue(on_ranks):
    assert on_ranks(2, os.getenv, "CUDA_DEVICE_MAX_CONNECTIONS") == "32"


@pytest.mark.slow
def test_what_pipelines_refuse(on_ranks):
    asked = {
        f"{name} {layout}": cell for layout in matrix.RUNS for name, cell in matrix.cells_in_pipelines(layout).items()
    }
    refused = on_ranks(2, cells.refusals, asked)
    for cell in asked:
        name, layout = cell.split()
        if name in matrix.PIPED:
            assert (cell in refused) == (layout not in matrix.IN_PIPELINES), cell
        else:
            assert cell in refused, cell
    for name, field in matrix.NOT_IN_PIPELINES.items():
        assert refused[f"{name} 0-fp32-device"] == field


@pytest.mark.slow
def test_ranks_share_a_device(on_ranks):
    """As ``TESTS_ON_GPU=1`` has them do it: gloo carries tensors of a device, and messages pass through the host."""
    games = {str(stage): ([*MICRO_BATCHES, matrix.R1], matrix.zero(stage)) for stage in range(4)}
    games["pipelines"] = ([*MICRO_BATCHES, *matrix.PIPELINES, matrix.R1], matrix.zero(0))
    games["a rank each"] = ([*MICRO_BATCHES, "engines.generator.ranks=1", matrix.R1], matrix.zero(0))
    found = on_ranks(2, cells.shared, games, sharing=True)
    assert (found.pop("device"), found.pop("backend"), found.pop("sum")) == ("cuda:0", "gloo", 3.0)
    assert found.pop("message") == 2.0  # of rank 1, on rank 0
    assert not found.pop("tf32")
    assert found.keys() == games.keys()
    assert min(found.values()) > 100
