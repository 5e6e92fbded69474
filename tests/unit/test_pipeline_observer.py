"""The bubble and the timeline of spans made by hand."""

from __future__ import annotations

import json

import pytest

from bigsgan.engines.phases import Judges, MakesImages, Task, Trains
from bigsgan.engines.pipeline.observer import TRACED_UPDATE, Observer, Span, bubble, trace_events
from bigsgan.monitor import NOTICE

MAKES = MakesImages(2, 4, d_step=0)
TRAINS = Trains(2, 8, segments=2, images_from=0, d_step=0, tangents_from=None)
JUDGES = Judges(2, 4, segments=1, images_from=0)
PHASES = [MAKES, TRAINS, JUDGES]


def span(phase: int, kind, index: int, start: float, end: float) -> Span:
    return Span(Task(phase, kind, index), PHASES[phase], start, end)


def test_the_bubble_is_what_no_rank_computes_in():
    first = [span(0, "forward", 0, 1.0, 3.0), span(0, "forward", 1, 3.0, 5.0)]
    second = [span(1, "forward", 0, 3.0, 4.0), span(1, "backward", 0, 4.0, 6.0)]
    # From 1 to 6, on two ranks, of which each computes for 4 and 3.
    assert bubble([first, second]) == pytest.approx(1 - 7 / 10)
    assert bubble([first]) == pytest.approx(0)
    assert bubble([second, second]) == pytest.approx(0)


def test_waiting_for_the_slowest_rank_in_a_step_is_no_computing():
    quick = [span(1, "backward", 0, 0.0, 2.0), span(1, "step", 0, 2.0, 9.0)]
    slow = [span(1, "backward", 0, 0.0, 8.0), span(1, "step", 0, 8.0, 9.0)]
    # The step takes 1, as the rank knows that came last; the other waited for 6 before that.
    assert bubble([quick, slow]) == pytest.approx(6 / 18)
    # Each step has a quickest rank of its own.
    quick.append(span(2, "step", 0, 9.0, 9.5))
    slow.append(span(2, "step", 0, 9.0, 12.0))
    assert bubble([quick, slow]) == pytest.approx(1 - (2 + 1 + 0.5 + 8 + 1 + 0.5) / 24)


def test_a_timeline_has_a_row_for_each_rank():
    by_rank = [
        [span(0, "forward", 1, 0.5, 0.75), span(1, "step", 0, 2.0, 2.125)],
        [span(1, "backward", 0, 1.0, 1.5), span(2, "forward", 1, 3.0, 3.25)],
    ]
    events = json.loads(json.dumps(trace_events(by_rank)))
    assert [(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [(0, "rank 0"), (1, "rank 1")]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"thread_name"}
    keys = ("tid", "name", "cat", "ts", "dur")
    assert [tuple(e[key] for key in keys) for e in events if e["ph"] == "X"] == [
        (0, "G makes images forward 1", "forward", 500_000, 250_000),
        (0, "D trains step 0", "step", 2_000_000, 125_000),
        (1, "D trains backward 0", "backward", 1_000_000, 500_000),
        (1, "D judges forward 1", "forward", 3_000_000, 250_000),
    ]
    assert [e["args"] for e in events if e["ph"] == "X"] == [
        {"phase": number, "samples": samples} for number, samples in [(0, 4), (1, 8), (1, 8), (2, 4)]
    ]
    assert {e["pid"] for e in events} == {0}


def test_one_update_is_watched_and_written(tmp_path, monkeypatch, caplog):
    """By a clock that is read once at the start and once a task."""
    clock = iter([10.0, 12.0, 13.0, 16.0])
    monkeypatch.setattr("bigsgan.engines.pipeline.observer.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("bigsgan.runtime.comm.barrier", lambda: None)
    caplog.set_level(NOTICE)
    path = tmp_path / "run" / "trace.json"
    observer = Observer(path)
    watched = []
    for _ in range(TRACED_UPDATE + 2):
        observer.begin()
        watched.append(observer.is_watching)
        if observer.is_watching:
            observer.add(Task(0, "forward", 0), MAKES, start=1.0)
            observer.add(Task(1, "forward", 0), TRAINS, start=observer.now())
        observer.end()
        assert not observer.is_watching
        assert path.exists() == (len(watched) >= TRACED_UPDATE)
    assert watched == [update == TRACED_UPDATE for update in range(1, TRACED_UPDATE + 3)]
    makes, trains = (e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X")
    assert (makes["name"], makes["ts"], makes["dur"]) == ("G makes images forward 0", 1e6, 1e6)
    assert (trains["name"], trains["ts"], trains["dur"]) == ("D trains forward 0", 3e6, 3e6)
    assert trains["args"]["phase"] - makes["args"]["phase"] == 1
    assert f"measured bubble of an update: 20.0 % (timeline: {path})" in caplog.text
    assert observer.bubble == pytest.approx(0.2)


def test_an_update_of_a_benchmark_is_watched_and_not_written(monkeypatch, caplog):
    clock = iter([10.0, 12.0, 13.0, 16.0])
    monkeypatch.setattr("bigsgan.engines.pipeline.observer.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("bigsgan.runtime.comm.barrier", lambda: None)
    observer = Observer(None, 1)
    observer.begin()
    observer.add(Task(0, "forward", 0), MAKES, start=1.0)
    observer.add(Task(1, "forward", 0), TRAINS, start=observer.now())
    observer.end()
    assert observer.bubble == pytest.approx(0.2)
    assert not caplog.text
