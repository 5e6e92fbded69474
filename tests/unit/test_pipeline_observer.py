"""The measured bubble and the timeline of spans made by hand."""

import pytest

from bigsgan.engines.pipeline.observer import Span, bubble, trace_events
from bigsgan.engines.pipeline.schedule import Phase, Task

PHASE = Phase("discriminator", 2, 8, True, True, step=True)
BY_RANK = [
    [
        Span(Task(0, "forward", 0), PHASE, 1.0, 2.0),
        Span(Task(0, "backward", 0), PHASE, 4.0, 6.0),
        Span(Task(0, "step", 0), PHASE, 6.0, 9.0),  # waits for the other rank
    ],
    [
        Span(Task(0, "forward", 0), PHASE, 2.0, 3.0),
        Span(Task(0, "backward", 0), PHASE, 5.0, 8.0),
        Span(Task(0, "step", 0), PHASE, 8.5, 9.0),
    ],
]


def test_a_step_counts_as_long_as_the_quickest_rank_took():
    # From 1 to 9 on two ranks: 16 seconds, of which 1 + 2 + 0.5 and 1 + 3 + 0.5 were spent computing.
    assert bubble(BY_RANK) == pytest.approx(1 - 8 / 16)


def test_the_timeline_has_a_row_for_each_rank():
    events = trace_events(BY_RANK)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["tid"] for e in spans] == [0, 0, 0, 1, 1, 1]
    assert spans[1]["name"] == "D trains backward 0"
    assert (spans[1]["ts"], spans[1]["dur"]) == (4e6, 2e6)
