"""Updates that overlap are one game in every layout: that of a plain loop with the same staleness."""

import json
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bigsgan import checkpoint
from bigsgan.doctor.saving import save
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.distributed.agreement import SAME
from tests.distributed.test_equivalence import OVERRIDES, PENALTIES, check
from tests.distributed.test_state import ADAM, check_same_run
from tests.reference import worst
from tests.tiny import TINY_GAMES, both, stages, zero

NIGHTLY = pytest.mark.nightly
SLOW = pytest.mark.slow
OVERLAPPED = "objective.schedule=overlapped"

# Name: number of ranks, and how the networks lie on them; of separate ranks, how many are G's.
LAYOUTS = {
    "1": (1, [], both(0)),
    "1, ZeRO 3": (1, [], both(3)),
    "2, ZeRO 2": (2, [], both(2)),
    "2, ZeRO 3": (2, [], both(3)),
    "1 + 1": (2, ["engines.generator.ranks=1"], both(0)),
    "1 + 1, ZeRO 3": (2, ["engines.generator.ranks=1"], both(3)),
    "1 + 2": (3, ["engines.generator.ranks=1"], both(2)),
    "2 + 1": (3, ["engines.generator.ranks=2"], {"generator": zero(3), "discriminator": zero(1)}),
    "2 + 3": (5, ["engines.generator.ranks=2"], both(2)),
    "2, both in stages": (2, stages(2, 2), both(1)),
    "2, both in stages, separate": (2, [*stages(2, 2), "pipeline.schedule=phases"], both(1)),
    "2, D in stages": (2, stages(1, 2), both(1)),
    "2, G in stages": (2, stages(2, 1), both(1)),
    "1 + 2, D in stages": (3, ["engines.generator.ranks=1", *stages(1, 2)], both(1)),
    "2 + 1, G in stages": (3, ["engines.generator.ranks=2", *stages(2, 1)], both(1)),
}


QUICK = {("1 + 1", 2, "exact")}
IN_CI = {("2, ZeRO 3", 2, "exact"), ("1 + 2", 2, "finite_difference"), ("2, both in stages", 2, "exact")}


def cells():
    for cell in product(LAYOUTS, (1, 2), PENALTIES):
        marks = () if cell in QUICK else SLOW if cell in IN_CI else NIGHTLY
        yield pytest.param(*cell, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("name, accumulation, penalty", [*cells()])
def test_matrix(ranks, name, accumulation, penalty):
    num, overrides, ds = LAYOUTS[name]
    options = [
        OVERLAPPED,
        f"accumulation={accumulation}",
        f"batch={12 if num == 5 else 8}",
        *PENALTIES[penalty],
        *overrides,
    ]
    check(ranks(num), options, ds)


GAMES = {
    "two_d_steps": OVERRIDES["two_d_steps"],
    "relativistic": OVERRIDES["relativistic"],
    "reused_fakes": OVERRIDES["reused_fakes"],
    "reused_fakes_of_two": [*OVERRIDES["reused_fakes_made_again"]],
    "gradient_penalty": OVERRIDES["gradient_penalty"],
    "lecam": OVERRIDES["lecam"],
    "ada": OVERRIDES["ada"],
    "own_accumulation": OVERRIDES["own_accumulation"],
    "orthogonal": OVERRIDES["orthogonal"],
    "path_length": TINY_GAMES["stylegan2_path_length"],
    "path_length_and_reused_fakes": OVERRIDES["reused_fakes_with_path_length"],
    "gat": TINY_GAMES["gat"],
}


def games():
    for name, layout in product(GAMES, ("1", "1 + 1, ZeRO 3", "2, both in stages")):
        in_ci = (name, layout) in {("two_d_steps", "1 + 1, ZeRO 3"), ("reused_fakes", "2, both in stages")}
        yield pytest.param(name, layout, marks=SLOW if in_ci else NIGHTLY)


@pytest.mark.parametrize("name, layout", [*games()])
def test_games(ranks, name, layout):
    """Every D step of an update trains on images of the old G, each on its own; nothing else changes its meaning."""
    num, overrides, ds = LAYOUTS[layout]
    check(ranks(num), [*GAMES[name], *overrides, OVERLAPPED], ds)


def kept(overrides, ds, directory=None, found=None, num_updates=0):
    """The images that this rank keeps after some updates, which are saved if a directory is given, and the state."""
    run = scenarios.build(overrides, ds, found)
    scenarios.update(run, num_updates)
    if directory is not None:
        save(run, Path(directory))
    entry = run.entries["kept_images"]
    images = [(part.name, part.offset, part.values.numpy().copy()) for part in entry.parts()]
    state = scenarios.local_state(run)
    scenarios.destroy(run)
    return entry.numbers(), images, state


def whole(by_rank):
    """All samples of each D step, of which every element lies on one rank."""
    found = {}
    for _, images, _ in by_rank:
        for name, offset, values in images:
            assert offset not in found.setdefault(name, {})
            found[name][offset] = values
    return {name: np.concatenate([parts[offset] for offset in sorted(parts)]) for name, parts in found.items()}


@pytest.mark.parametrize("name", [pytest.param("1 + 1", marks=SLOW), pytest.param("2, ZeRO 3", marks=NIGHTLY)])
def test_a_resumed_run_is_the_same(ranks, name, tmp_path):
    num, layout, ds = LAYOUTS[name]
    overrides = [OVERLAPPED, *ADAM, *layout, "accumulation=2", "objective.d_steps=2"]
    uninterrupted = ranks(num).run(scenarios.uninterrupted, overrides, ds, 6)
    parts = ranks(num).run(scenarios.resume, overrides, ds, str(tmp_path), 3, 3)
    check_same_run(uninterrupted, parts)


@pytest.mark.parametrize(
    "name", [pytest.param("1 + 1", marks=SLOW), *(pytest.param(n, marks=NIGHTLY) for n in ("1", "2, both in stages"))]
)
def test_kept_images_are_found_in_another_layout(ranks, name, tmp_path):
    """Each sample's, bit for bit, by its index in the batch; the next update is then that of the layout that saved."""
    options = [OVERLAPPED, "objective.d_steps=2", "batch=8", "accumulation=2"]
    num, layout, ds = LAYOUTS["2, ZeRO 2"]
    of_two = [*options, *layout]
    saved = ranks(num).run(kept, of_two, ds, str(tmp_path), None, 3)
    found = checkpoint.newest(tmp_path)
    after = ranks(num).run(kept, of_two, ds, None, found, 1)
    num, layout, ds = LAYOUTS[name]
    others = [*options, *layout]
    loaded = ranks(num).run(kept, others, ds, None, found, 0)
    assert [numbers for numbers, _, _ in [*saved, *loaded]] == [{"update": 3, "batch": 8, "d_steps": 2}] * (
        len(saved) + num
    )
    before, now = whole(saved), whole(loaded)
    assert sorted(before) == sorted(now) == ["0", "1"]
    for step, images in before.items():
        assert images.size == 8 * 16 * 16
        assert np.array_equal(images, now[step])
    resumed = ranks(num).run(kept, others, ds, None, found, 1)
    states = [scenarios.merge([state for _, _, state in by_rank]) for by_rank in (resumed, after)]
    far, where = worst(*states)
    assert far <= SAME, where


UNIT = 0.03  # seconds
SECONDS = {  # of a micro-batch, forward and backward: both networks take as long
    "G makes images": (1, 0), "G pulls back": (1, 2), "D judges": (0.6, 0.8), "D trains": (1.2, 2.4), "D keeps": (0, 0),
}  # fmt: skip


@contextmanager
def sleeping(phase, task):
    """Around a task: as long as it would take in a network with work to do."""
    forward, backward = SECONDS[phase.label]
    time.sleep(UNIT * {"forward": forward, "backward": backward, "step": 0}[task.kind])
    yield


def timeline(overrides, ds):
    """The third update's tasks on all ranks, as rank 0 writes them."""
    run = scenarios.build(overrides, ds)
    run.step.executor.around = sleeping
    scenarios.update(run, 3)
    scenarios.destroy(run)
    trace = Path(run.recipe.out) / "pipeline_trace.json"
    return json.loads(trace.read_text())["traceEvents"] if comm.rank() == 0 else None


def spans(events, label, *kinds):
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith(label) and e["cat"] in kinds]


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=SLOW) for name in ("exact", "overlapped")])
def test_both_sides_compute_at_once(ranks, schedule):
    """D trains while G pulls back what it judged, which it never does where G waits for what D has learnt.

    ``-s`` prints the share of time in which ranks wait: 31 % of exact updates, and 9 % of those that overlap.
    """
    options = ["engines.generator.ranks=1", "accumulation=2", f"objective.schedule={schedule}"]
    events, _ = ranks(2).run(timeline, options, both(0))
    tasks = [e for e in events if e["ph"] == "X"]
    # G may go forward again before it has the gradients.
    trains, pulls = spans(tasks, "D trains", "forward", "backward"), spans(tasks, "G pulls back", "backward")
    assert (len(trains), len(pulls)) == (4, 2)
    at_once = [1 for start, end in trains for other, last in pulls if start < last and other < end]
    assert bool(at_once) == (schedule == "overlapped")
    length = max(e["ts"] + e["dur"] for e in tasks) - min(e["ts"] for e in tasks)
    print(f"{schedule}: ranks wait {1 - sum(e['dur'] for e in tasks) / (2 * length):.0%} of the time")
