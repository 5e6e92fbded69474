"""What `bigsgan bench train` makes of its measurements: made-up blocks against numbers by hand."""

import json
import math
from unittest import mock

import pytest
import torch

from bigsgan.bench import arithmetic, product, train
from bigsgan.bench.arithmetic import Arithmetic, arithmetic_of
from bigsgan.bench.lazy import partly_timed, whole_cycles
from bigsgan.bench.measure import Settings, Visit, covered
from bigsgan.bench.table import Table, as_json, number, shown
from bigsgan.bench.train import Result, label, record
from bigsgan.bench.variants import chosen_variants, plan_variants
from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.plain import Linear
from bigsgan.plan import Speed, estimate_time
from bigsgan.planner.counting import count_network, count_work
from bigsgan.runtime import comm
from tests.teachers import write_teacher
from tests.tiny import TINY_GAMES, both, tiny_plan, tiny_recipe

MIB = 2**20


def visit(seconds, **changes):
    losses = {"loss/discriminator": 2.0, "loss/generator": 0.5, "loss/l1": 0.25}
    values = {
        "data_seconds": 0.0, "busy": 0.5, "device_peak": None, "host_peak": 900 * MIB,
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
    assert (record(first, [first, second], 100)["idle_share"], found["idle_share"]) == (None, None)
    watched = second._replace(
        rounds=[[a._replace(idle=share), b] for share, (a, b) in zip((0.1, 0.4, 0.3), slow, strict=True)]
    )
    assert record(watched, [first, watched], 100)["idle_share"] == 0.3
    assert found["device_peak_bytes"] is None
    assert found["d_loss_difference"] == pytest.approx(0.1)
    assert found["g_loss_difference"] == 0


def test_what_is_measured_reports_to_nobody(tmp_path, monkeypatch, caplog):
    profiled = {network: {**section, "flops_profiler": {"enabled": True}} for network, section in both(0).items()}
    plan = tiny_plan(tmp_path, 1, ["monitor=[wandb, csv]"], profiled)
    built = []
    monkeypatch.setattr(product, "build_run", lambda plan, *others: built.append(plan) or mock.MagicMock())
    product.build_engine_loop(plan)
    assert [each.recipe for each in built] == [plan.recipe.model_copy(update={"monitor": []})]
    assert not any(engine.file.profiles for engine in built[0].engines.values())
    assert caplog.messages == ["flops_profiler is left out here; a run writes its profiles"]


def test_generators_loss_has_all_its_parts(tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["pix2pix"])  # l1: 10
    result = Result("zero0", "", recipe, [[visit(1.0)]])
    assert record(result, [result], 1)["g_loss"] == pytest.approx(0.5 + 10 * 0.25)
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
    found = record(refused, [refused, first], 1)
    assert found == {"variant": "pipeline", "what": "two stages", "reason": "needs two ranks"}


def test_the_time_with_a_kernel_is_the_union_of_the_kernels():
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


def test_no_variant_that_runs_is_an_error(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    planned = plan_variants(recipe, chosen_variants("zero0,zero1,pipeline", recipe), 1)
    failed = {0: "memory: is not enough", 1: "memory: is not enough too", 2: "memory: is not enough"}
    monkeypatch.setattr(train, "take_turns", lambda builders, settings, told: ([[] for _ in builders], failed))
    with pytest.raises(UserError, match=r"^--variants: 'zero0,zero1' cannot run here: memory: is not enough; choose"):
        train._measure(planned, Settings(1, 1, 1))
    del failed[1]
    monkeypatch.setattr(train, "take_turns", lambda builders, settings, told: ([[], [[visit(1.0)]], []], failed))
    found = {each.name: each.reason for each in train._measure(planned, Settings(1, 1, 1))}
    assert found.pop("pipeline")
    assert found == {"zero0": "memory: is not enough", "control": "memory: is not enough", "zero1": ""}


TF32_BACKENDS = {"products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn}


def uses_tf32():
    return {name: backend.allow_tf32 for name, backend in TF32_BACKENDS.items()}


ALL, NONE = dict.fromkeys(TF32_BACKENDS, True), dict.fromkeys(TF32_BACKENDS, False)
DEFAULTS = {"products": False, "convolutions": True}


class Seer:
    """A loop that sees how float32 would be computed."""

    waited_seconds = 0.0

    def __init__(self, seen):
        self.seen = seen
        seen.append(uses_tf32())

    def __call__(self):
        self.seen.append(uses_tf32())

    def idle(self):
        return None

    def means(self):
        return {"loss/discriminator": 1.0, "loss/generator": 1.0}

    def close(self):
        self.seen.append(uses_tf32())


@pytest.fixture
def without_ranks(monkeypatch):
    monkeypatch.setattr(comm, "barrier", lambda: None)


def test_tf32_is_switched_for_its_variant_alone(tmp_path, monkeypatch, without_ranks):
    recipe, seen, peaks = tiny_recipe(tmp_path), [], []
    monkeypatch.setattr(train, "build_plain_loop", lambda plan, distributed: Seer(seen))
    monkeypatch.setattr(arithmetic, "matrix_flops_per_second", lambda dtype, device: peaks.append(uses_tf32()) or 2e12)
    monkeypatch.setattr(arithmetic, "matrix_precision", lambda precision, device: str(uses_tf32()))
    variants = chosen_variants("baseline_fp32,baseline,baseline_tf32", recipe)
    found = train._measure(plan_variants(recipe, variants, 1), Settings(1, 1, 1))
    turn = lambda uses: [uses] * 4  # noqa: E731 - built, a warm-up, timed, closed
    assert seen == [*turn(NONE), *turn(DEFAULTS), *turn(ALL), *turn(NONE)]  # the last is the control
    assert peaks == [NONE, DEFAULTS, ALL]  # once for each
    assert [(each.name, each.arithmetic.precision) for each in found] == [
        ("baseline_fp32", str(NONE)),
        ("control", str(NONE)),
        ("baseline", str(DEFAULTS)),
        ("baseline_tf32", str(ALL)),
    ]
    assert uses_tf32() == DEFAULTS


@pytest.mark.parametrize("kind, has_tf32", [("cpu", False), ("cuda", False), ("cuda", True)])
def test_tf32_needs_a_device_that_has_it(kind, has_tf32, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    planned = plan_variants(recipe, chosen_variants("baseline,baseline_fp32,baseline_tf32", recipe), 1)
    monkeypatch.setattr(comm, "device", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: has_tf32)
    found = {each.variant.name: (each.plan is not None, each.reason) for each in map(train._on_machine, planned)}
    yes, no_cuda = (True, ""), (False, "needs a CUDA device, which alone has TF32")
    on_cuda = yes if has_tf32 else (False, "needs a CUDA device that has TF32")
    fp32, tf32 = (no_cuda, no_cuda) if kind == "cpu" else (yes, on_cuda)
    assert found == {"baseline": yes, "baseline_fp32": fp32, "baseline_tf32": tf32}


def test_the_speed_of_arithmetic(tmp_path, monkeypatch):
    """Of fully connected networks, in which each weight costs an image a multiplication and an addition.

    There are no labels: those that are vectors would cost a little more.
    """
    asked = []
    monkeypatch.setattr(arithmetic, "matrix_flops_per_second", lambda dtype, device: asked.append(dtype) or 4e6)
    recipe, peaks = tiny_recipe(tmp_path, *TINY_GAMES["mlp"], "data.condition_size=0", "objective.d_steps=2"), {}
    names = "zero0,zero1,accumulation,reused_fakes,mixed_precision+reused_fakes,pipeline"
    planned = plan_variants(recipe, chosen_variants(names, recipe), 2)
    found = {each.variant.name: arithmetic_of(each.plan, peaks) for each in planned}
    g, d = (
        2 * sum(module.weight.numel() for module in build_network(recipe, n).modules() if isinstance(module, Linear))
        for n in NETWORKS
    )
    apart, together = ((made + 2) * g + (2 * 6 + 2) * d for made in (3, 2))  # images for D, and G's own, if others
    assert found == {
        "zero0": (apart * 8 // 2, "fp32", 4e6),  # 8 images on 2 ranks
        "zero1": (apart * 8 // 2, "fp32", 4e6),
        "accumulation": (apart * 32 // 2, "fp32", 4e6),
        "reused_fakes": (together * 8 // 2, "fp32", 4e6),
        "mixed_precision+reused_fakes": (together * 8 // 2, "bf16", 4e6),
        "pipeline": None,
    }
    assert asked == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("method, passes", [("auto", 6), ("forward_mode", 8)])
def test_the_speed_of_arithmetic_counts_penalties_as_the_plan_does(tmp_path, monkeypatch, method, passes):
    """R1 in every 4th of D's steps, two an update: 3 passes of reals and fakes more, in forward mode 2 of reals beside.

    The plain loop and ZeRO 0 go backward twice unless they are told otherwise, which the plain loop cannot be.
    """
    monkeypatch.setattr(arithmetic, "matrix_flops_per_second", lambda dtype, device: 4e6)
    lazy = ["objective.d_steps=2", f"objective.r1={{weight: 1, every: 4, method: {method}}}"]
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["mlp"], *lazy)
    variants = chosen_variants("baseline,zero0", recipe)
    planned = {each.variant.name: each.plan for each in plan_variants(recipe, variants, 1)}
    (_, g), (_, d) = (count_network(planned["zero0"], network) for network in NETWORKS)
    found = {name: arithmetic_of(plan, {}) for name, plan in planned.items()}
    without = (3 + 2) * g + (2 * 6 + 2) * d
    for name, more in (("baseline", 6), ("zero0", passes)):
        assert found[name].flops == 8 * (without + 2 * more * d // 4)
    share = arithmetic.speed(found["zero0"], 0.5)["achieved_share"]
    counted = count_work(planned["zero0"])
    assert estimate_time(planned["zero0"], counted, Speed(share, 4e6))["update_seconds"] == pytest.approx(0.5)


@pytest.mark.slow
def test_a_teacher_counts_among_the_operations_of_an_update(tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "matrix_flops_per_second", lambda dtype, device: 4e6)
    taught = [*write_teacher(tmp_path / "t.pt"), "objective.r1={weight: 1}"]
    plan = tiny_plan(tmp_path, 1, [*TINY_GAMES["gat"], *taught], both(0))
    counted = count_work(plan)
    assert counted["teacher_flop"] > 0 < counted["penalties_flop"]
    expected = counted["update_flop"] + counted["penalties_flop"] + counted["teacher_flop"]
    assert arithmetic_of(plan, {}).flops == plan.recipe.batch * expected


def test_a_record_tells_the_speed_of_arithmetic(tmp_path):
    recipe, work = tiny_recipe(tmp_path), Arithmetic(6 * 10**11, "bf16", 5e12)
    counted = Result("zero0", "", recipe, [[visit(0.5), visit(0.2)], [visit(0.25)], [visit(0.3)]], arithmetic=work)
    found = record(counted, [counted], 1)
    assert (found["flops"], found["matrix_precision"], found["matrix_flops_per_second"]) == work
    assert found["flops_per_second"] == pytest.approx(2e12)  # in 0.3 s, the median of the slowest ranks' times
    assert found["achieved_share"] == pytest.approx(0.4)
    cells = dict(zip([column[0] for column in train._COLUMNS], train._row(found), strict=True))
    assert (cells["TFLOP/s"], cells["of peak"]) == ("2", "40.0 %")
    found = record(counted._replace(arithmetic=None), [counted], 1)
    names = ("flops", "flops_per_second", "matrix_precision", "matrix_flops_per_second", "achieved_share")
    assert [found[name] for name in names] == [None] * 5
    cells = dict(zip([column[0] for column in train._COLUMNS], train._row(found), strict=True))
    assert (cells["TFLOP/s"], cells["of peak"]) == ("-", "-")


def test_json_has_null_for_what_is_no_number():
    found = as_json({"a": math.inf, "b": [{"c": -math.inf, "d": (math.nan, 1.5)}], "e": "inf", "f": None, "g": 3})
    assert json.loads(found) == {"a": None, "b": [{"c": None, "d": [None, 1.5]}], "e": "inf", "f": None, "g": 3}


def test_whole_cycles_of_lazy_penalties_are_timed(tmp_path):
    lazy = tiny_recipe(tmp_path, "objective.r1={weight: 1, every: 4}", "objective.d_steps=2")
    assert [whole_cycles(lazy, steps) for steps in (1, 2, 5)] == [1, 2, 4]  # R1 is in every 4th of D's, 2nd of G's
    assert partly_timed(lazy, 4) == []
    assert partly_timed(lazy, 1) == ["not timed as often as in a run: objective.r1.every; take --steps 2"]
    family = TINY_GAMES["stylegan2_path_length"]
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
