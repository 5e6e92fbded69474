"""What `bigsgan bench train` makes of its measurements: made-up blocks against numbers by hand."""

import json
import math

import pytest
from PIL import Image

from bigsgan.bench import train
from bigsgan.bench.lazy import partly_timed, whole_cycles
from bigsgan.bench.measure import Settings, Visit, covered
from bigsgan.bench.plot import bar_lengths, write_bars
from bigsgan.bench.table import Table, as_json, number, shown
from bigsgan.bench.train import Result, label, record
from bigsgan.bench.variants import chosen_variants, plan_variants
from bigsgan.errors import UserError
from tests.tiny import FAMILIES, tiny_recipe

MIB = 2**20


def visit(seconds, **changes):
    losses = {"loss/discriminator": 2.0, "loss/generator": 0.5, "loss/l1": 0.25}
    values = {
        "data_seconds": 0.0, "disk_seconds": None, "busy": 0.5, "device_peak": None, "host_peak": 900 * MIB,
        "host_before": 500 * MIB, "first_losses": losses, "losses": losses,
    }  # fmt: skip
    return Visit(seconds, **{**values, **changes})


def test_a_record_is_relative_to_the_first_variant_round_by_round(tmp_path):
    recipe = tiny_recipe(tmp_path)
    first = Result("baseline", "", recipe, [[visit(0.8)], [visit(1.6)], [visit(0.4)]])
    others = {"first_losses": {"loss/discriminator": 2.2, "loss/generator": 0.5}, "data_seconds": 0.1, "busy": 0.7}
    slow = [[visit(s / 2), visit(s, host_peak=950 * MIB, **others)] for s in (1.6, 1.6, 0.4)]
    second = Result("zero1", "ZeRO 1", recipe, [[a._replace(**others), b] for a, b in slow])
    found = record(second, [first, second], num_images=100)
    assert found["time_ratio"] == pytest.approx([1.0, 1.0, 1.5])  # of 2, 1 and 1: an update waits for its slowest rank
    assert (found["update_seconds"], found["images_per_second"]) == (pytest.approx(1.6), pytest.approx(8 / 1.6))
    assert found["epoch_seconds"] == pytest.approx(100 * 1.6 / 8)
    assert (found["host_peak_bytes"], found["host_added_bytes"]) == (950 * MIB, 450 * MIB)
    assert found["busy_share"] == pytest.approx(0.7)
    assert found["data_wait_share"] == pytest.approx(6 * 0.1 / (3.6 * 1.5))
    assert (found["disk_wait_share"], found["device_peak_bytes"]) == (None, None)
    assert found["d_loss_difference"] == pytest.approx(0.1)
    assert found["g_loss_difference"] == 0


def test_generators_loss_has_all_its_parts(tmp_path):
    recipe = tiny_recipe(tmp_path, *FAMILIES["pix2pix"])  # l1: 10
    assert record(Result("zero0", "", recipe, [[visit(1.0)]]), [Result("zero0", "", recipe, [[visit(1.0)]])], 1)[
        "g_loss"
    ] == pytest.approx(0.5 + 10 * 0.25)
    assert "synthetic data" in label(recipe)
    assert "synthetic" not in label(tiny_recipe(tmp_path))


def test_other_batches_have_other_losses(tmp_path):
    first = Result("baseline", "", tiny_recipe(tmp_path), [[visit(1.0)]])
    wide = Result("accumulation", "", tiny_recipe(tmp_path, "batch=32", "accumulation=4"), [[visit(2.0)]])
    found = record(wide, [first, wide], 1)
    assert found["time_ratio"] == [0.5] * 3  # four times the images in twice the time
    assert found["d_loss_difference"] is None


def test_a_variant_that_could_not_run_says_why(tmp_path):
    first = Result("baseline", "", tiny_recipe(tmp_path), [[visit(1.0)]])
    refused = Result("pipeline", "two stages", None, [], "needs two ranks")
    assert record(refused, [refused, first], 1) == {
        "variant": "pipeline",
        "what": "two stages",
        "reason": "needs two ranks",
    }


def test_the_time_with_a_kernel_is_the_union_of_the_kernels():
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


def test_no_variant_that_runs_is_an_error(tmp_path, monkeypatch):
    planned = plan_variants(tiny_recipe(tmp_path), chosen_variants("zero0,zero1,pipeline"), 1)
    failed = {0: "memory: ran out", 1: "memory: ran out too", 2: "memory: ran out"}
    monkeypatch.setattr(train, "take_turns", lambda builders, settings, told: ([[] for _ in builders], failed))
    with pytest.raises(UserError, match=r"^--variants: 'zero0,zero1' cannot run here: memory: ran out; choose others"):
        train._measure(planned, Settings(1, 1, 1))
    del failed[1]
    monkeypatch.setattr(train, "take_turns", lambda builders, settings, told: ([[], [[visit(1.0)]], []], failed))
    found = {each.name: each.reason for each in train._measure(planned, Settings(1, 1, 1))}
    assert found.pop("pipeline")
    assert found == {"zero0": "memory: ran out", "control": "memory: ran out", "zero1": ""}


def test_json_has_null_for_what_is_no_number():
    found = as_json({"a": math.inf, "b": [{"c": -math.inf, "d": (math.nan, 1.5)}], "e": "inf", "f": None, "g": 3})
    assert json.loads(found) == {"a": None, "b": [{"c": None, "d": [None, 1.5]}], "e": "inf", "f": None, "g": 3}


def test_whole_cycles_of_lazy_penalties_are_timed(tmp_path):
    lazy = tiny_recipe(tmp_path, "objective.r1={weight: 1, every: 4}", "objective.d_steps=2")
    assert [whole_cycles(lazy, steps) for steps in (1, 2, 5)] == [1, 2, 4]  # R1 is in every 4th of D's, 2nd of G's
    assert partly_timed(lazy, 4) == []
    assert partly_timed(lazy, 1) == ["not timed as often as in a run: objective.r1.every; take --steps 2"]
    family = FAMILIES["stylegan2_path_length"]
    both = tiny_recipe(tmp_path, *family, "objective.r1={weight: 1, every: 6}", "objective.path_length.every=4")
    assert [whole_cycles(both, steps) for steps in (5, 12, 40)] == [5, 12, 36]
    names = "objective.r1.every, objective.path_length.every"
    assert partly_timed(both, 5) == [f"not timed as often as in a run: {names}; take --steps 12"]
    assert partly_timed(both, 4) == ["not timed as often as in a run: objective.r1.every; take --steps 12"]
    assert (whole_cycles(tiny_recipe(tmp_path), 5), partly_timed(tiny_recipe(tmp_path), 5)) == (5, [])


def test_tables():
    table = Table("a title", ("variant", "s"), [["zero0", "1.5"], ["b", "12"]], ["a note"])
    assert shown(table, as_markdown=True).splitlines() == [
        "a title", "", "| variant | s |", "| --- | ---: |", "| zero0 | 1.5 |", "| b | 12 |", "", "- a note",
    ]  # fmt: skip
    assert shown(table, as_markdown=False).splitlines()[2:5] == ["variant    s", "zero0    1.5", "b         12"]
    assert [number(value) for value in (0.01234, 1234.5, 12.34, None)] == ["0.0123", "1234", "12.3", "-"]


def test_a_chart_has_a_bar_for_each_variant(tmp_path):
    bars = [("baseline", (1.0, 1.0, 1.0)), ("zero3", (1.5, 2.0, 4.0))]
    assert bar_lengths(bars, 400) == [(100, 100, 100), (150, 200, 400)]
    out = tmp_path / "plot.png"
    write_bars(out, "title", bars)
    with Image.open(out) as image:
        colours = image.convert("RGB").getcolors(100_000)
        assert (86, 138, 190) in {colour for _, colour in colours}
    with pytest.raises(UserError):
        write_bars(tmp_path / "none" / "plot.png", "title", bars)
